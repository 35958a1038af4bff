-- 1, or 0 where there is none.
local _, member = unpack(ARGV)
local found = redis.call("EXISTS", record(member))
drop(member)
return found
