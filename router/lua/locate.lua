-- ARGV: id ...
-- Where tickets are: the replica, '' for one that waits, false for one that is unknown.
local places = {}
for i, id in ipairs(ARGV) do
  local ticket = load_ticket(id)
  places[i] = ticket and ticket[REPLICA_ID]
end
return places
