-- ARGV: version that new edges follow on, edge ...
-- Put new bin edges in force and move what waits to its new bins, unless another router was first; without edges only
-- read. Returns {version, {edge ...}} in force, false before the first.
local current = redis.call('GET', P .. ':edges')
local in_force = current and cmsgpack.unpack(current)
local version = in_force and in_force[1] or 0
if #ARGV == 1 or version ~= tonumber(ARGV[1]) then
  return in_force
end
local edges = {}
for i = 2, #ARGV do
  edges[#edges + 1] = ARGV[i]
end
redis.call('SET', P .. ':edges', cmsgpack.pack({ version + 1, edges }))

-- policies.multi_bin.MultiBin.assign: the inner edges at or below the prediction.
local function bin_of(predicted)
  local bin = 0
  for i = 2, #edges - 1 do
    if tonumber(edges[i]) <= predicted then
      bin = bin + 1
    end
  end
  return bin
end

for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
  for _, id in ipairs(redis.call('ZRANGE', P .. ':lane:' .. lane, 0, -1)) do
    local ticket = load_ticket(id)
    if ticket[PREDICTED] and bin_of(ticket[PREDICTED]) ~= ticket[BIN] then
      take_from_lane(id, ticket)
      ticket[BIN] = bin_of(ticket[PREDICTED])
      save_ticket(id, ticket)
      put_in_lane(id, ticket)
    end
  end
end
dispatch('') -- a bin may hold a whole gang batch now
return { version + 1, edges }
