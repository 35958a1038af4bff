-- ARGV: how many lengths this router has seen, how many to keep, new length ...
-- Append this router's newest observations to the shared window and return those it has not seen, its own among them.
local window, seen, keep = P .. ':lengths', tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do
  redis.call('RPUSH', window, ARGV[i])
end
redis.call('LTRIM', window, -keep, -1)
local total = redis.call('INCRBY', P .. ':lengths_total', #ARGV - 2)
if total < seen then -- the tables were lost
  seen = 0
end
local unseen = math.min(total - seen, keep)
return { total, unseen > 0 and redis.call('LRANGE', window, -unseen, -1) or {} }
