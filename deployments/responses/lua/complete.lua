-- A response that was begun, unless it is not wanted any more. "room" where there is none, of which it then tells.
local _, member, maker, bytes, response, messages, most, most_of_owner = unpack(ARGV)
sweep()
if not is_made_by(member, maker) then return end
if not makes_room(member, tonumber(bytes), tonumber(most), tonumber(most_of_owner)) then
  close(member, "failed", "there is no room to store the response")
  return "room"
end
put(member, tonumber(bytes), "status", "ended", "response", response, "messages", messages)
finish(member)
