-- ARGV: replica, ms for which they must have been on it ("" for any), reading ("" or as in note_reading), id ...
-- Requests ended on a replica: free their slots and form the next batch. A ticket that has moved on stays where it is.
local latest = ARGV[2] == '' and math.huge or now_ms() - tonumber(ARGV[2])
local has_read = ARGV[3] ~= '' and redis.call('HEXISTS', P .. ':replicas', ARGV[1]) == 1
if has_read then
  note_reading(ARGV[1], ARGV[3])
end
for i = 4, #ARGV do
  local ticket = load_ticket(ARGV[i])
  if ticket and ticket[REPLICA_ID] == ARGV[1] and ticket[SINCE_MS] <= latest then
    forget(ARGV[i]) -- which offers what is left as well
    has_read = false
  end
end
if has_read then
  offer(ARGV[1])
end
dispatch('')
return 0
