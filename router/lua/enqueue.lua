-- ARGV: 'admit' to go by limits and quotas and queue nothing, else ''; then of each ticket: id, ticket,
-- limits {max_waiting, max_wait_s, max_of_key}, quotas {{quota, cost, per_s, burst} ...}.
-- Queue tickets, one after the other, and hand out what can be handed out. Returns for each {1, this router's new
-- assignments}, or {0, why not, seconds until it may be tried again}, and policies.router.admission.Foreseen after that:
-- seconds until its turn, from there to its first token, and the latter elsewhere or ''. A quota foresees nothing.
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

-- How much all replicas that serve its class work off in a second, and those that serve this class alone; the least
-- seconds in which one of them sends its first token once its turn has come.
local function paces()
  local pace, own_pace, least_s = 0, 0, math.huge
  local replicas = redis.call('HKEYS', P .. ':replicas')
  table.sort(replicas)
  local tables, left = replicas[1] and tables_of(replicas), unread_of(ticket)
  for i, replica in ipairs(replicas) do
    local classes = tables.serves[i] or ''
    if is_for(classes, ticket[SLO_CLASS]) then
      local ahead, unread, _, token_s, slowness = to_read(ticket, left, replica, tables, i)
      least_s = math.min(least_s, (ahead + unread) * token_s + ticket[STEP_S] * slowness)
      pace = pace + 1 / slowness
      own_pace = own_pace + (classes == ',' .. ticket[SLO_CLASS] .. ',' and 1 / slowness or 0)
    end
  end
  return pace, own_pace, pace > 0 and least_s or 0
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

-- policies.router.admission.no_room, where no replica can start it; and what is foreseen of it.
local function no_room()
  local max_waiting, max_wait_s, max_of_key = unpack(limits)
  local pace, own_pace, reading_s = paces()
  local nobody_there = pace == 0 and redis.call('EXISTS', P .. ':replicas') == 0
  local wait_s = nobody_there and ask_for_a_replica() or predicted_wait_s(pace, own_pace)
  local waiting = hash_number(':waiting', ticket[SLO_CLASS])
  local count, of_key_s = waiting_of_key(waiting, pace)
  local foreseen = { tostring(wait_s), tostring(reading_s), '' }
  if count >= max_of_key then
    return { 0, 'max_key_share', tostring(of_key_s), unpack(foreseen) }
  elseif waiting >= max_waiting then
    return { 0, 'max_waiting', tostring(wait_s), unpack(foreseen) }
  elseif wait_s > max_wait_s then
    return { 0, 'late', tostring(wait_s - math.max(0, max_wait_s)), unpack(foreseen) }
  end
  return nil, foreseen
end

-- Of its replica's offer and the others'.
local function foreseen_at(replica, offers)
  local own_s, elsewhere_s = 0, math.huge
  for _, offer in ipairs(offers) do
    if offer[1] == replica then
      own_s = offer[8]
    else
      elsewhere_s = math.min(elsewhere_s, offer[8])
    end
  end
  return { '0', tostring(own_s), offers[2] and tostring(elsewhere_s) or '' }
end

local function enqueue(id, only_admits)
  local had_a_place = not only_admits and forget(id)
  if had_a_place and had_a_place[ROUTER_ID] == ticket[ROUTER_ID] then
    limits, quotas = { math.huge, math.huge, math.huge }, {} -- its reply was lost: it was taken, and has paid
  end
  local spent, refusal = quotas_allow(quotas)
  local replica, foreseen
  if not refusal then
    replica, foreseen = choose(ticket)
    if replica then
      foreseen = foreseen_at(replica, foreseen)
    else
      refusal, foreseen = no_room()
    end
  end
  if refusal then
    if had_a_place then -- which is another's now
      dispatch('')
    end
    return refusal
  end
  spend(spent)
  if only_admits then
    return { 1, {}, unpack(foreseen) }
  end
  ticket[REPLICA_ID], ticket[SINCE_MS], ticket[CHARGE_S] = '', now_ms(), 0
  local alone = not had_a_place and redis.call('EXISTS', P .. ':occupied') == 0
  if replica and alone and not is_behind(ticket) and not is_late(ticket, replica) then
    put_on(id, ticket, replica) -- as through its lane, in fewer moves
    note_start(ticket)
    return { 1, { { id, replica } }, unpack(foreseen) }
  end
  save_ticket(id, ticket)
  put_in_lane(id, ticket)
  return { 1, dispatch(ticket[ROUTER_ID], not (had_a_place or replica)), unpack(foreseen) }
end

local replies = {}
for i = 2, #ARGV, 4 do
  ticket, limits, quotas = cmsgpack.unpack(ARGV[i + 1]), cmsgpack.unpack(ARGV[i + 2]), cmsgpack.unpack(ARGV[i + 3])
  replies[#replies + 1] = enqueue(ARGV[i], ARGV[1] == 'admit')
end
return replies
