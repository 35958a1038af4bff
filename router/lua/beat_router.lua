-- ARGV: router, silence_ms
-- Heartbeat of a router, and the sweep that goes with it: replicas and routers leave the tables that have been silent for
-- as long as each of them named. Returns the replicas dropped and the routers dropped.
-- What no ticket, replica or router holds outlives the last heartbeat by a week: an application may be away for a while,
-- and each version of its vllm_args has tables of its own.
if redis.call('SET', P .. ':halved', '', 'NX', 'EX', 60) then -- policies.router.turns.Turns.note_time
  local tables = { P .. ':served' }
  for _, class in ipairs(redis.call('HKEYS', P .. ':waiting')) do
    tables[#tables + 1], tables[#tables + 2] = turns_of(class, IN_TIME), turns_of(class, LATE)
  end
  for _, name in ipairs(tables) do
    redis.call('ZUNIONSTORE', name, 1, name, 'WEIGHTS', 0.5)
  end
  redis.call('ZREMRANGEBYSCORE', P .. ':served', '-inf', '(0.001')
end
redis.call('ZADD', P .. ':routers', now_ms() + tonumber(ARGV[2]), ARGV[1])
for _, name in ipairs({ 'lengths', 'lengths_total', 'edges', 'started', 'overtaken', 'starts', 'late', 'owed', 'served',
  'batches', 'start_s' }) do
  redis.call('EXPIRE', P .. ':' .. name, WEEK_S)
end
local replicas = redis.call('ZRANGEBYSCORE', P .. ':beats', '-inf', now_ms())
for _, replica in ipairs(replicas) do
  drop_replica(replica)
end
local routers = redis.call('ZRANGEBYSCORE', P .. ':routers', '-inf', now_ms())
remove_routers(routers)
return { replicas, routers }
