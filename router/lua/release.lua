-- ARGV: replica, id ...
-- Requests ended on a replica: free their slots and form the next batch. A ticket that has moved on stays where it is.
for i = 2, #ARGV do
  local ticket = load_ticket(ARGV[i])
  if ticket and ticket[REPLICA] == ARGV[1] then
    forget(ARGV[i])
  end
end
dispatch('')
return 0
