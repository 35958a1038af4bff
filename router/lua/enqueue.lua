-- ARGV: id, ticket, limits {max_waiting, max_wait_s, {quota, cost, per_s, burst} ...}
-- Queue one ticket and hand out what can be handed out. Returns {1, this router's new assignments}, or
-- {0, what is spent, seconds until it may be tried again}.
local id, ticket, limits = ARGV[1], cmsgpack.unpack(ARGV[2]), cmsgpack.unpack(ARGV[3])
local now = now_s()

-- policies.admission.Spent.rested: what a quota owes now, in seconds.
local function rested(name)
  local raw = redis.call('GET', APPLICATION .. ':spent:' .. name)
  local owed, at = unpack(raw and cmsgpack.unpack(raw) or { 0, now })
  return math.max(0, owed - math.max(0, now - at))
end

local function owe(name, owed)
  local ms = math.min(86400000, math.ceil(owed * 1000) + 1)
  redis.call('SET', APPLICATION .. ':spent:' .. name, cmsgpack.pack({ owed, now }), 'PX', ms)
end

-- policies.admission.spend for every quota; only when all allow it is anything spent.
local function quotas_allow()
  local spent = {}
  for i = 3, #limits do
    local name, cost, per_s, burst = limits[i][1], limits[i][2], limits[i][3], limits[i][4]
    local owed = rested(name)
    local after = owed + cost / per_s
    local late = after - math.max(burst, cost) / per_s
    if late > 0.001 then
      owe(name, owed) -- as of now: if the clock was set back, it counts from here
      return false, { 0, name, tostring(late) }
    end
    spent[name] = after
  end
  return true, spent
end

local function spend(spent)
  for name, owed in pairs(spent) do
    owe(name, owed)
  end
end

-- The predicted seconds of what goes first: all of it, and of this class.
local function work_ahead_s()
  local lanes = redis.call('SMEMBERS', P .. ':occupied')
  table.sort(lanes)
  local ahead, own = 0, 0
  for _, lane in ipairs(lanes) do
    local class = parts_of(lane)
    local earlier = redis.call('ZCOUNT', P .. ':lane:' .. lane, '-inf', ticket[KEY])
    local seconds = earlier * hash_number(':ahead', class) / hash_number(':waiting', class)
    ahead = ahead + seconds
    own = class == ticket[CLASS] and own + seconds or own
  end
  return ahead, own
end

-- policies.admission.predicted_wait_s: over what all replicas together work off, or those of this class alone if sooner.
local function predicted_wait_s()
  local ahead, own_ahead = work_ahead_s()
  local pace, own_pace = 0, 0
  local replicas = redis.call('HKEYS', P .. ':replicas')
  table.sort(replicas)
  for _, replica in ipairs(replicas) do
    if serves(replica, ticket[CLASS]) then
      pace = pace + 1 / slowness_of(replica)
      if redis.call('HGET', P .. ':serves', replica) == ',' .. ticket[CLASS] .. ',' then
        own_pace = own_pace + 1 / slowness_of(replica)
      end
    end
  end
  if own_pace > 0 then -- these replicas serve it, so that pace is above 0 too
    return math.min(ahead / pace, own_ahead / own_pace)
  end
  return pace > 0 and ahead / pace or 0
end

local function refused()
  local waiting = hash_number(':waiting', ticket[CLASS])
  local wait_s = predicted_wait_s()
  if waiting >= limits[1] then
    return { 0, 'max_waiting', tostring(wait_s) }
  elseif wait_s > limits[2] then
    return { 0, 'max_wait_s', tostring(wait_s - limits[2]) }
  end
end

local had_a_place = forget(id)
if had_a_place and had_a_place[ROUTER] == ticket[ROUTER] then
  limits = { math.huge, math.huge } -- its reply was lost: it was taken then, and has paid
end

local function refuse(reply)
  if had_a_place then -- which is another's now
    dispatch('')
  end
  return reply
end

local allowed, spent = quotas_allow()
if not allowed then
  return refuse(spent)
end
local replica = choose(ticket)
local refusal = not replica and refused()
if refusal then
  return refuse(refusal)
end
spend(spent)
ticket[REPLICA], ticket[SINCE_MS], ticket[CHARGE] = '', now_ms(), 0
if replica and not had_a_place then -- what waits has no use for this replica: as through its lane, in fewer moves
  put_on(id, ticket, replica)
  note_start(ticket)
  return { 1, { { id, replica } } }
end
save_ticket(id, ticket)
put_in_lane(id, ticket)
return { 1, dispatch(ticket[ROUTER], not had_a_place) }
