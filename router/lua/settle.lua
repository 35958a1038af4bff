-- ARGV: router, number, settlements {{quota, cost, per_s} ...}
-- policies.router.admission.settle for each, once: a router's numbers grow, and a call whose reply was lost comes again. A
-- number is kept for a day, which no router waits.
local number = tonumber(ARGV[2])
if number <= tonumber(redis.call('GET', P .. ':settled:' .. ARGV[1]) or '0') then
  return 0
end
redis.call('SET', P .. ':settled:' .. ARGV[1], number, 'PX', 86400000)
for _, settlement in ipairs(cmsgpack.unpack(ARGV[3])) do
  local name, cost, per_s = settlement[1], settlement[2], settlement[3]
  owe(name, math.max(0, rested(name) + cost / per_s))
end
return 0
