-- ARGV: id ...
-- Forget tickets whose requests were never sent to a replica, queued or just assigned.
for _, id in ipairs(ARGV) do
  forget(id)
end
dispatch('')
return 0
