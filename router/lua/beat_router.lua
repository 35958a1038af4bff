-- ARGV: router, timeout_ms
-- Heartbeat of a router, and the sweep that goes with it: replicas and routers that stopped beating leave the tables.
-- Returns the replicas dropped and the routers dropped.
redis.call('ZADD', P .. ':routers', now_ms(), ARGV[1])
local oldest = now_ms() - tonumber(ARGV[2])
local replicas = redis.call('ZRANGEBYSCORE', P .. ':beats', '-inf', oldest)
for _, replica in ipairs(replicas) do
  drop_replica(replica)
end
local routers = redis.call('ZRANGEBYSCORE', P .. ':routers', '-inf', oldest)
remove_routers(routers)
return { replicas, routers }
