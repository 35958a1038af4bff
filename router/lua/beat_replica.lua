-- ARGV: replica, slots, slowness, lease_ms, most requests of a gang batch by bin ("" or "8,8,4"), reading ("" or as in
-- note_reading)
-- Heartbeat. Returns false when the replica is not registered, else the ids assigned to it longer than lease_ms ago:
-- those it does not know belong to requests that never arrived.
local replica = ARGV[1]
if redis.call('HEXISTS', P .. ':replicas', replica) == 0 then
  return false
end
note_beat(replica)
redis.call('HSET', P .. ':slowness', replica, ARGV[3])
local sizes = redis.call('HGET', P .. ':gang_sizes', replica) or ''
redis.call('HSET', P .. ':gang_sizes', replica, ARGV[5])
if redis.call('HGET', P .. ':slots', replica) ~= ARGV[2] or sizes ~= ARGV[5] or ARGV[6] ~= '' then
  set_slots(replica, ARGV[2])
  note_reading(replica, ARGV[6])
  offer(replica)
  dispatch('')
end
return redis.call('ZRANGEBYSCORE', P .. ':on:' .. replica, '-inf', now_ms() - tonumber(ARGV[4]))
