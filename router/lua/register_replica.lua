-- ARGV: replica, info, slots, classes it is reserved for ("" for all, else ",a,b,"), slowness, max_wait_s of its gang
-- batches ("" for single requests), their patience_s, size of rolling batches, silence_ms, seconds that its start took,
-- a ticket of nobody, id ... of what it runs
-- A replica joins, or comes back after the tables were lost, or after it was out of their reach.
local replica = ARGV[1]
redis.call('HSET', P .. ':replicas', replica, ARGV[2])
redis.call('HSET', P .. ':serves', replica, ARGV[4])
redis.call('HSET', P .. ':slowness', replica, ARGV[5])
redis.call('HSET', P .. ':silence', replica, ARGV[9])
note_beat(replica)
if ARGV[6] == '' then
  redis.call('HDEL', P .. ':gangs', replica)
  redis.call('HSET', P .. ':batch_size', replica, ARGV[8])
else
  redis.call('HDEL', P .. ':batch_size', replica)
  redis.call('HSET', P .. ':gangs', replica, ARGV[6])
  redis.call('HSET', P .. ':gang_patience', replica, ARGV[7])
end
if ARGV[6] ~= '' or ARGV[8] == '1' then
  redis.call('SREM', P .. ':refilled', replica)
end
set_slots(replica, ARGV[3])
offer(replica)
note_start_of_replica(tonumber(ARGV[10]))
for i = 12, #ARGV do
  local ticket = load_ticket(ARGV[i])
  if not ticket then
    put_on(ARGV[i], cmsgpack.unpack(ARGV[11]), replica)
  elseif ticket[REPLICA_ID] == '' then -- its router went on alone meanwhile
    take_from_lane(ARGV[i], ticket)
    put_on(ARGV[i], ticket, replica)
  end
end
dispatch('')
return 0
