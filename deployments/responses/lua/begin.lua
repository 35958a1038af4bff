-- A response that a router begins to make in the background. "begun", "exists", or "room" where there is none.
local _, member, maker, bytes, response, lease_ms, most, most_of_owner = unpack(ARGV)
sweep()
if redis.call("EXISTS", record(member)) == 1 then return "exists" end
if not makes_room(member, tonumber(bytes), tonumber(most), tonumber(most_of_owner)) then return "room" end
put(member, tonumber(bytes), "status", "queued", "response", response, "background", "1", "maker", maker)
redis.call("ZADD", key("running"), now_ms() + lease_ms, member)
return "begun"
