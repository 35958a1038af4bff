-- A response that was made while its client waited. 1, or 0 where there is no room.
local _, member, bytes, response, messages, most, most_of_owner = unpack(ARGV)
sweep()
drop(member)
if not makes_room(member, tonumber(bytes), tonumber(most), tonumber(most_of_owner)) then return 0 end
put(member, tonumber(bytes), "status", "ended", "response", response, "messages", messages)
finish(member)
return 1
