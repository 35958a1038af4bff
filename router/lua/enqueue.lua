-- ARGV: 'admit' to go by limits and quotas and queue nothing, else ''; then of each ticket: id, ticket,
-- limits {max_waiting, max_wait_s, max_of_key}, quotas {{quota, cost, per_s, burst} ...}.
-- Queue tickets, one after the other, and hand out what can be handed out. Returns for each {1, this router's new
-- assignments, seconds that it waits by prediction}, or {0, what is spent, seconds until it may be tried again}.
local ticket, limits, quotas -- of the one whose turn it is

-- The predicted seconds of what goes first: all of it, and of this class.
local function work_ahead_s()
  local lanes = redis.call('SMEMBERS', P .. ':occupied')
  table.sort(lanes)
  local ahead, own = 0, 0
  for _, lane in ipairs(lanes) do
    local class = parts_of(lane)
    local earlier = redis.call('ZCOUNT', P .. ':lane:' .. lane, '-inf', ticket[DEADLINE_KEY])
    local seconds = earlier * hash_number(':ahead', class) / hash_number(':waiting', class)
    ahead = ahead + seconds
    own = class == ticket[SLO_CLASS] and own + seconds or own
  end
  return ahead, own
end

-- How much all replicas that serve its class work off in a second, and those that serve this class alone.
local function paces()
  local pace, own_pace = 0, 0
  local replicas = redis.call('HKEYS', P .. ':replicas')
  table.sort(replicas)
  for _, replica in ipairs(replicas) do
    if serves(replica, ticket[SLO_CLASS]) then
      pace = pace + 1 / slowness_of(replica)
      if redis.call('HGET', P .. ':serves', replica) == ',' .. ticket[SLO_CLASS] .. ',' then
        own_pace = own_pace + 1 / slowness_of(replica)
      end
    end
  end
  return pace, own_pace
end

-- policies.router.admission.predicted_wait_s: over what all replicas together work off, or those of this class alone if sooner.
local function predicted_wait_s(pace, own_pace)
  local ahead, own_ahead = work_ahead_s()
  if own_pace > 0 then -- these replicas serve it, so that pace is above 0 too
    return math.min(ahead / pace, own_ahead / own_pace)
  end
  return pace > 0 and ahead / pace or 0
end

-- What waits of its API key, and the seconds until that is worked off; each counts as the mean of its class.
local function waiting_of_key(waiting, pace)
  local count = of_key(ticket) and redis.call('ZCARD', of_key(ticket)) or 0
  if count == 0 or pace == 0 then
    return count, 0
  end
  return count, count * hash_number(':ahead', ticket[SLO_CLASS]) / waiting / pace
end

-- policies.router.admission.no_room; else the seconds for which it waits by prediction.
local function no_room()
  local max_waiting, max_wait_s, max_of_key = unpack(limits)
  local pace, own_pace = paces()
  local waiting, wait_s = hash_number(':waiting', ticket[SLO_CLASS]), predicted_wait_s(pace, own_pace)
  local count, of_key_s = waiting_of_key(waiting, pace)
  if count >= max_of_key then
    return { 0, 'max_key_share', tostring(of_key_s) }
  elseif waiting >= max_waiting then
    return { 0, 'max_waiting', tostring(wait_s) }
  elseif wait_s > max_wait_s then
    return { 0, 'late', tostring(wait_s - math.max(0, max_wait_s)) }
  end
  return nil, wait_s
end

local function enqueue(id, only_admits)
  local had_a_place = not only_admits and forget(id)
  if had_a_place and had_a_place[ROUTER_ID] == ticket[ROUTER_ID] then
    limits, quotas = { math.huge, math.huge, math.huge }, {} -- its reply was lost: it was taken, and has paid
  end
  local spent, refusal = quotas_allow(quotas)
  local replica, wait_s = not refusal and choose(ticket), 0
  if not refusal and not replica then
    refusal, wait_s = no_room()
  end
  if refusal then
    if had_a_place then -- which is another's now
      dispatch('')
    end
    return refusal
  end
  spend(spent)
  if only_admits then
    return { 1, {}, tostring(wait_s) }
  end
  ticket[REPLICA_ID], ticket[SINCE_MS], ticket[CHARGE_S] = '', now_ms(), 0
  local alone = not had_a_place and redis.call('EXISTS', P .. ':occupied') == 0
  if replica and alone and not is_behind(ticket) and not is_late(ticket, replica) then
    put_on(id, ticket, replica) -- as through its lane, in fewer moves
    note_start(ticket)
    return { 1, { { id, replica } }, '0' }
  end
  save_ticket(id, ticket)
  put_in_lane(id, ticket)
  return { 1, dispatch(ticket[ROUTER_ID], not (had_a_place or replica)), tostring(wait_s) }
end

local replies = {}
for i = 2, #ARGV, 4 do
  ticket, limits, quotas = cmsgpack.unpack(ARGV[i + 1]), cmsgpack.unpack(ARGV[i + 2]), cmsgpack.unpack(ARGV[i + 3])
  replies[#replies + 1] = enqueue(ARGV[i], ARGV[1] == 'admit')
end
return replies
