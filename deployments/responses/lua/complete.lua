-- A response that was begun. 1; 0 where nobody wants it any more, and where there is no room, of which it then tells.
local _, member, bytes, response, messages, most, most_of_owner = unpack(ARGV)
sweep()
if not is_running(member) then return 0 end
if not makes_room(member, tonumber(bytes), tonumber(most), tonumber(most_of_owner)) then
  close(member, "failed", "there is no room to store the response")
  return 0
end
put(member, tonumber(bytes), "status", "ended", "response", response, "messages", messages)
finish(member)
return 1
