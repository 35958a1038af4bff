-- Ends one that is being made in the background; as get.lua afterwards.
local _, member = unpack(ARGV)
look_at_lease(member)
if is_running(member) then close(member, "cancelled", "") end
return redis.call("HMGET", record(member), "status", "response", "error", "background")
