-- ARGV: shape, version that new edges follow on, number of edges of bins, edge ... of bins, edge ... of buckets
-- Put new edges in force and move what waits to its new lanes, unless another router was first; without edges only
-- read. Returns {version, {edge ...}, {edge ...}} in force, false before the first.
local current = redis.call('HGET', P .. ':edges', ARGV[1])
local in_force = current and cmsgpack.unpack(current)
local version, bin_edges = in_force and in_force[1] or 0, tonumber(ARGV[3])
if bin_edges == 0 or version ~= tonumber(ARGV[2]) then
  return in_force
end

local function argv_between(first, last)
  local found = {}
  for i = first, last do
    found[#found + 1] = ARGV[i]
  end
  return found
end

local bins, buckets = argv_between(4, 3 + bin_edges), argv_between(4 + bin_edges, #ARGV)
redis.call('HSET', P .. ':edges', ARGV[1], cmsgpack.pack({ version + 1, bins, buckets }))

-- policies.router.multi_bin.MultiBin.assign, policies.gang.buckets.AdaptiveBuckets.assign: the inner edges at or below the tokens.
local function range_of(tokens, edges)
  local range = 0
  for i = 2, #edges - 1 do
    if tonumber(edges[i]) <= tokens then
      range = range + 1
    end
  end
  return range
end

for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
  for _, id in ipairs(redis.call('ZRANGE', P .. ':lane:' .. lane, 0, -1)) do
    local ticket = load_ticket(id)
    local bin = ticket[PREDICTED_OUTPUT_TOKENS] and range_of(ticket[PREDICTED_OUTPUT_TOKENS], bins) or ticket[BIN_INDEX]
    local bucket = ticket[PROMPT_TOKENS] and range_of(ticket[PROMPT_TOKENS], buckets) or ticket[BUCKET]
    if bin ~= ticket[BIN_INDEX] or bucket ~= ticket[BUCKET] then
      take_from_lane(id, ticket)
      ticket[BIN_INDEX], ticket[BUCKET] = bin, bucket
      save_ticket(id, ticket)
      put_in_lane(id, ticket)
    end
  end
end
dispatch('') -- a lane may hold a whole gang batch now
return { version + 1, bins, buckets }
