-- A response that was begun, and why it will not be completed.
local _, member, maker, message = unpack(ARGV)
if is_made_by(member, maker) then close(member, "failed", message) end
