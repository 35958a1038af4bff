-- Status, response, error, and whether it was made in the background; then messages where they are asked for.
local _, member, with_messages = unpack(ARGV)
look_at_lease(member)
local found = redis.call("HMGET", record(member), "status", "response", "error", "background")
if with_messages == "1" then found[5] = redis.call("HGET", record(member), "messages") end
return found
