-- A response that was begun, and why it will not be completed.
local _, member, message = unpack(ARGV)
if is_running(member) then close(member, "failed", message) end
