-- ARGV: id, bin, deadline key, work_s, router, most tickets that may wait
-- Queue one ticket and hand out what can be handed out. Returns this router's new assignments, or false when full.
local id, router = ARGV[1], ARGV[5]
forget(id)
local free = redis.call('ZCARD', P .. ':free') > 0
if not free then
  local waiting = 0
  for _, bin in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
    waiting = waiting + redis.call('ZCARD', P .. ':bin:' .. bin)
  end
  if waiting >= tonumber(ARGV[6]) then
    return false
  end
end
save_ticket(id, { ARGV[2], ARGV[3], ARGV[4], router, '', 0 })
redis.call('ZADD', P .. ':bin:' .. ARGV[2], ARGV[3], id)
redis.call('SADD', P .. ':occupied', ARGV[2])
return dispatch(router)
