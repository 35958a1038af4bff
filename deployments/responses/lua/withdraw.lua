-- One that was begun, and of which its client has not heard.
local _, member, maker = unpack(ARGV)
if is_made_by(member, maker) then drop(member) end
