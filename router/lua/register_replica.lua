-- ARGV: replica, info, slots, id ... of the requests it already runs
-- A replica joins, or comes back after the tables were lost.
local replica = ARGV[1]
redis.call('HSET', P .. ':replicas', replica, ARGV[2])
redis.call('HSET', P .. ':slots', replica, ARGV[3])
redis.call('ZADD', P .. ':beats', now_ms(), replica)
for i = 4, #ARGV do
  if not load_ticket(ARGV[i]) then
    put_on(ARGV[i], { '0', '0', '0', '', '', 0 }, replica)
  end
end
offer(replica)
dispatch('')
return 0
