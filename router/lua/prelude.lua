-- Shared by every script: the tables, and the moves that keep them consistent.
--
-- KEYS[1] is the prefix P; it carries a hash tag, so that all keys live in one cluster slot.
--   P:tickets       hash  id -> msgpack of the fields in router/packing.py, whose names stand before this script
--   P:lane:<l>      zset  id -> deadline key: lane l            P:occupied  set of lanes that hold anything
--                   A lane is "<class>:<bin>:<bucket>".
--   P:waiting       hash  class -> tickets that wait            P:ahead     hash  class -> their predicted seconds
--   P:of_key:<c>:<k>  zset id -> deadline key: what waits in class c, of API key k
--   P:served        zset  API key -> predicted seconds of what it started, halved once a minute
--   P:turns:<c>:<b>   zset API key -> no more than in P:served: keys that wait in class c, band b, and some that did
--   P:halved        there until they are halved again
--   P:replicas      hash  replica -> its address and engine, opaque here
--   P:serves        hash  replica -> classes it is reserved for, "" for all, else ",a,b,"
--   P:slots         hash  replica -> slots                      P:running   hash  replica -> tickets on it
--   P:slowness      hash  replica -> its seconds for one predicted second
--   P:work          hash  replica -> predicted seconds on it
--   P:free          zset  replica -> predicted seconds on it; only replicas with credit that take single requests
--   P:gangs         hash  replica -> max_wait_s; it takes a whole batch of one lane, when all its slots are free
--   P:gang_sizes    hash  replica -> most requests of its batches by bin, "8,8,4"; bins beyond are bound by its slots
--   P:gang_patience hash  replica -> seconds for which batches of shorter answers go before one
--   P:batch_size    hash  replica that takes single requests -> size of its rolling batches
--   P:refilled      set of replicas whose slots were all taken, since as many were free as a rolling batch has
--   P:batches       hash  "<bin>:<why>" -> batches that went, full or as max_wait_s was over
--   P:on:<r>        zset  id -> ms when it came there: those on replica r
--   P:unread_of:<r> hash  id -> tokens of its prompt that were not cached; those on replica r that it has not read
--   P:unread        hash  replica -> all of those               P:prompts   hash  replica -> how many prompts
--   P:reading       hash  replica -> msgpack {of those it has read, or cached, below 0 where more is to be read; with so
--                                 many unread it takes no more, or false; its seconds per prompt token, or false; the chance that
--                                 what its cache gives up next would be wanted again soon}
--   P:recallable    zset  id -> deadline key: what runs and may be called back to its lane
--   P:recalled      set of ids that were called back and still hold their slots
--   P:silence       hash  replica -> ms without a heartbeat after which it counts as dead
--   P:beats         zset  replica -> ms at which it will         P:routers   the same for routers
--   P:started       latest arrival of all tickets that started  P:overtaken longest overtaking seen, seconds
--   P:starts        tickets that started                        P:late      hash  "<class>:<reason>" -> called late
--   P:owed          hash  class -> starts that its tickets were owed
--   P:start_s       seconds that the last start of a replica took
--   P:asked         since when a replica has been asked for, by a ticket that came while none is there
--   APPLICATION:spent:<k>  {seconds until it is whole again, as of this time} of quota k, which models share
--   P:settled:<r>   number of the last settlements that router r has sent
--   P:settings      hash  configured:name -> setting that was changed, of engines that were configured in this way
--   P:edges         hash  shape -> {version, edges of bins, edges of buckets} in force
-- Channel P:router:<id> carries {{id, replica}, ...}, assignments that the router did not ask for, and {{id}, ...}: what
-- is called back.
--
-- The twin in Python is policies/router/dispatcher.py; a contract test runs both over the same histories.

local P, APPLICATION = KEYS[1], KEYS[2]
local WEEK_S = 604800

local function now_s()
  local time = redis.call('TIME')
  return time[1] + time[2] / 1000000
end

local function now_ms()
  return math.floor(now_s() * 1000)
end

local function hash_number(key, field)
  return tonumber(redis.call('HGET', P .. key, field) or '0')
end

local function load_ticket(id)
  local raw = redis.call('HGET', P .. ':tickets', id)
  return raw and cmsgpack.unpack(raw)
end

local function save_ticket(id, ticket)
  redis.call('HSET', P .. ':tickets', id, cmsgpack.pack(ticket))
end

-- Sums of floats: at zero tickets they go, so that rounding never piles up and nothing is left of them. Whether they went.
local function add_counted(count_key, sum_key, field, change, seconds)
  if redis.call('HINCRBY', P .. count_key, field, change) == 0 then
    redis.call('HDEL', P .. count_key, field)
    redis.call('HDEL', P .. sum_key, field)
    return true
  end
  redis.call('HINCRBYFLOAT', P .. sum_key, field, seconds)
end

-- policies.router.admission.Spent.rested: what a quota owes now, in seconds.
local function rested(name)
  local now = now_s()
  local raw = redis.call('GET', APPLICATION .. ':spent:' .. name)
  local owed, at = unpack(raw and cmsgpack.unpack(raw) or { 0, now })
  return math.max(0, owed - math.max(0, now - at))
end

local function owe(name, owed)
  local ms = math.min(86400000, math.ceil(owed * 1000) + 1)
  redis.call('SET', APPLICATION .. ':spent:' .. name, cmsgpack.pack({ owed, now_s() }), 'PX', ms)
end

-- policies.router.admission.spend for each of {quota, cost, per_s, burst} ...: what each would owe then, or nil and
-- {0, the one that does not allow it, seconds until it may be tried again}.
local function quotas_allow(quotas)
  local spent = {}
  for _, quota in ipairs(quotas) do
    local name, cost, per_s, burst = quota[1], quota[2], quota[3], quota[4]
    local owed = rested(name)
    local after = owed + cost / per_s
    local late = after - math.max(burst, cost) / per_s
    if late > 0.001 then
      owe(name, owed) -- as of now: if the clock was set back, it counts from here
      return nil, { 0, name, tostring(late) }
    end
    spent[name] = after
  end
  return spent
end

local function spend(spent)
  for name, owed in pairs(spent) do
    owe(name, owed)
  end
end

-- What a replica said last of its prompts, as in P:reading.
local function reading_in(raw)
  return unpack(raw and cmsgpack.unpack(raw) or { 0, false, false, 0 })
end

local function reading_of(replica)
  return reading_in(redis.call('HGET', P .. ':reading', replica))
end

-- Prompt tokens that a replica was given, but for those that it is known to have read.
local function unread_tokens(replica, known)
  return math.max(0, hash_number(':unread', replica) - known)
end

local function is_full_of_prompts(replica)
  local known, most = reading_of(replica)
  return most and unread_tokens(replica, known) >= most
end

-- policies.router.ledger.Replica.note_slots, where `free` of its slots are not taken; true too where none is.
local function is_refilled(replica, size, free, slots)
  if size == 1 then
    return free <= 0
  elseif free <= 0 then
    redis.call('SADD', P .. ':refilled', replica)
  elseif free >= math.min(size, slots) then
    redis.call('SREM', P .. ':refilled', replica)
  end
  return redis.call('SISMEMBER', P .. ':refilled', replica) == 1
end

-- Put a replica among the free ones, ordered by its outstanding work, or take it out when its slots are used up, or it has
-- enough to read.
local function offer(replica)
  local slots, size = hash_number(':slots', replica), redis.call('HGET', P .. ':batch_size', replica)
  local free = slots - hash_number(':running', replica)
  if size and not is_refilled(replica, tonumber(size), free, slots) and not is_full_of_prompts(replica) then
    redis.call('ZADD', P .. ':free', hash_number(':work', replica), replica)
  else
    redis.call('ZREM', P .. ':free', replica)
  end
end

local function lane_of(ticket)
  return ticket[SLO_CLASS] .. ':' .. ticket[BIN_INDEX] .. ':' .. ticket[BUCKET]
end

-- What waits of the class and the API key of this ticket; nil where it has no key.
local function of_key(ticket)
  return ticket[API_KEY] ~= '' and P .. ':of_key:' .. ticket[SLO_CLASS] .. ':' .. ticket[API_KEY] or nil
end

-- policies.router.turns.band_of; nil where keys take no turns.
local function band_of(ticket)
  local band = ticket[API_KEY] ~= '' and ticket[LATE_KEY] and math.floor(ticket[DEADLINE_KEY] / BAND_S)
  return (band == IN_TIME or band == LATE) and band or nil
end

local function turns_of(class, band)
  return P .. ':turns:' .. class .. ':' .. band
end

-- Class, bin and bucket of a lane.
local function parts_of(lane)
  local class, bin, bucket = string.match(lane, '^(.*):(%d+):(%d+)$')
  return class, tonumber(bin), tonumber(bucket)
end

-- A ticket that waits goes by its key, from now on.
local function rank(id, ticket)
  redis.call('ZADD', P .. ':lane:' .. lane_of(ticket), ticket[DEADLINE_KEY], id)
  if of_key(ticket) then
    redis.call('ZADD', of_key(ticket), ticket[DEADLINE_KEY], id)
  end
  local band = band_of(ticket)
  if band then
    redis.call('ZADD', turns_of(ticket[SLO_CLASS], band), 'NX', 0, ticket[API_KEY])
  end
end

local function put_in_lane(id, ticket)
  rank(id, ticket)
  redis.call('SADD', P .. ':occupied', lane_of(ticket))
  add_counted(':waiting', ':ahead', ticket[SLO_CLASS], 1, ticket[WORK_S])
end

local function take_from_lane(id, ticket)
  local lane = lane_of(ticket)
  redis.call('ZREM', P .. ':lane:' .. lane, id)
  if redis.call('EXISTS', P .. ':lane:' .. lane) == 0 then
    redis.call('SREM', P .. ':occupied', lane)
  end
  if of_key(ticket) then
    redis.call('ZREM', of_key(ticket), id)
  end
  if add_counted(':waiting', ':ahead', ticket[SLO_CLASS], -1, -ticket[WORK_S]) then -- only classes that wait are halved
    redis.call('DEL', turns_of(ticket[SLO_CLASS], IN_TIME), turns_of(ticket[SLO_CLASS], LATE))
  end
end

local function slowness_of(replica)
  return tonumber(redis.call('HGET', P .. ':slowness', replica) or '1')
end

-- Whether a slot of this replica, given back, would serve any ticket.
local function is_for_all(replica)
  return redis.call('HGET', P .. ':serves', replica) == '' and redis.call('HEXISTS', P .. ':gangs', replica) == 0
      and hash_number(':slots', replica) > 0
end

local function note_read(replica, id)
  local tokens = redis.call('HGET', P .. ':unread_of:' .. replica, id)
  if tokens then
    redis.call('HDEL', P .. ':unread_of:' .. replica, id)
    redis.call('HINCRBY', P .. ':unread', replica, -tonumber(tokens))
    redis.call('HINCRBY', P .. ':prompts', replica, -1)
  end
end

-- A replica's word {{id that it has read ...}, then of the other prompts what P:reading has}.
local function note_reading(replica, packed)
  if packed == '' then
    return
  end
  local reading = cmsgpack.unpack(packed)
  for _, id in ipairs(reading[1]) do
    note_read(replica, id)
  end
  redis.call('HSET', P .. ':reading', replica, cmsgpack.pack({ reading[2], reading[3], reading[4], reading[5] }))
end

-- policies.router.tickets.Ticket.unread_at and least_unread_tokens: what replicas that have some of its prompt have to
-- read, by replica, and the one that has least.
local function unread_of(ticket)
  local left, least = {}, ticket[UNREAD_TOKENS]
  for _, pair in ipairs(ticket[PREFIXES]) do
    local unread = math.max(0, ticket[UNREAD_TOKENS] - pair[2])
    left[pair[1]], least = unread, math.min(least, unread)
  end
  return left, least
end

-- policies.router.tickets.Ticket.work_at_s
local function work_at_s(ticket, unread, least)
  return ticket[WORK_S] + ticket[PROMPT_TOKEN_S] * (unread - least)
end

local function put_on(id, ticket, replica)
  local left, least = unread_of(ticket)
  local unread = left[replica] or ticket[UNREAD_TOKENS]
  ticket[REPLICA_ID] = replica
  ticket[SINCE_MS] = now_ms()
  ticket[CHARGE_S] = work_at_s(ticket, unread, least) * slowness_of(replica)
  save_ticket(id, ticket)
  redis.call('ZADD', P .. ':on:' .. replica, ticket[SINCE_MS], id)
  if unread > 0 then
    redis.call('HSET', P .. ':unread_of:' .. replica, id, unread)
    redis.call('HINCRBY', P .. ':unread', replica, unread)
    redis.call('HINCRBY', P .. ':prompts', replica, 1)
  end
  add_counted(':running', ':work', replica, 1, ticket[CHARGE_S])
  if ticket[RECALLABLE] and is_for_all(replica) then
    redis.call('ZADD', P .. ':recallable', ticket[DEADLINE_KEY], id)
  end
  offer(replica)
end

local function no_longer_recallable(id)
  redis.call('ZREM', P .. ':recallable', id)
  redis.call('SREM', P .. ':recalled', id)
end

local function take_from_replica(id, ticket)
  local replica = ticket[REPLICA_ID]
  if redis.call('ZREM', P .. ':on:' .. replica, id) == 1 then
    note_read(replica, id)
    add_counted(':running', ':work', replica, -1, -ticket[CHARGE_S])
    if ticket[RECALLABLE] then
      no_longer_recallable(id)
    end
    offer(replica)
  end
end

-- A replica that drains has no slots to give: nothing is called back from it.
local function set_slots(replica, slots)
  redis.call('HSET', P .. ':slots', replica, slots)
  if tonumber(slots) == 0 then
    for _, id in ipairs(redis.call('ZRANGE', P .. ':on:' .. replica, 0, -1)) do
      redis.call('ZREM', P .. ':recallable', id)
    end
  end
end

-- policies.router.starts.Starts.came
local function note_start_of_replica(start_s)
  local asked = redis.call('GET', P .. ':asked')
  redis.call('DEL', P .. ':asked')
  local waited_s = asked and now_s() - tonumber(asked) or 0
  redis.call('SET', P .. ':start_s', math.floor(math.max(start_s, waited_s)), 'EX', WEEK_S)
end

-- policies.router.starts.Starts.asked: returns the predicted seconds until one is there.
local function ask_for_a_replica()
  redis.call('SET', P .. ':asked', now_s(), 'NX', 'EX', WEEK_S)
  local since_s, took_s = redis.call('GET', P .. ':asked'), redis.call('GET', P .. ':start_s')
  return math.max(0, tonumber(took_s or 0) - (now_s() - tonumber(since_s)))
end

-- A replica lives: each by its own silence, for in a redeploy that of old routers may be shorter than its heartbeat.
local function note_beat(replica)
  redis.call('ZADD', P .. ':beats', now_ms() + hash_number(':silence', replica), replica)
end

-- Forget a ticket wherever it is.
local function forget(id)
  local ticket = load_ticket(id)
  if not ticket then
    return nil
  end
  redis.call('HDEL', P .. ':tickets', id)
  if ticket[REPLICA_ID] == '' then
    take_from_lane(id, ticket)
  else
    take_from_replica(id, ticket)
  end
  return ticket
end

-- The ticket of a lane that `rank` others go before, as {id, key, bin, bucket, class, lane, rank}; nil when there is none.
local function of_rank(lane, rank)
  local found = redis.call('ZRANGE', P .. ':lane:' .. lane, rank, rank, 'WITHSCORES')
  if not found[1] then
    return nil
  end
  local class, bin, bucket = parts_of(lane)
  local key = tonumber(found[2])
  return { id = found[1], key = key, bin = bin, bucket = bucket, class = class, lane = lane, rank = rank }
end

local function heads_of_lanes()
  local heads = {}
  for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
    heads[#heads + 1] = of_rank(lane, 0)
  end
  return heads
end

local function replace_or_remove(heads, index, following)
  if following then
    heads[index] = following
  else
    table.remove(heads, index)
  end
end

local function more_urgent(a, b)
  if a.key ~= b.key then
    return a.key < b.key
  elseif a.bin ~= b.bin then
    return a.bin < b.bin
  elseif a.bucket ~= b.bucket then
    return a.bucket < b.bucket
  end
  return a.class < b.class
end

local function is_for(classes, class)
  return classes == '' or string.find(classes, ',' .. class .. ',', 1, true) ~= nil
end

local function serves(replica, class)
  return is_for(redis.call('HGET', P .. ':serves', replica) or '', class)
end

-- It was called late, in an order that knows late tickets.
local function is_behind(ticket)
  return ticket[LATE_KEY] and math.floor(ticket[DEADLINE_KEY] / BAND_S) == LATE
end

-- The tables of replicas that say how long each takes to read, with one call for each.
local function tables_of(ids)
  local read = {}
  for _, name in ipairs({ 'serves', 'slowness', 'unread', 'reading' }) do
    read[name] = redis.call('HMGET', P .. ':' .. name, unpack(ids))
  end
  return read
end

-- What the replica of this number has to read before the ticket and for it, in tokens; the most of them that it takes;
-- its seconds for one of them, and for a predicted one; the chance that what it gives up would be wanted again.
local function to_read(ticket, left, id, tables, i)
  local known, most, token_s, returns = reading_in(tables.reading[i])
  local ahead, slowness = math.max(0, (tables.unread[i] or 0) - known), tonumber(tables.slowness[i] or 1)
  local pace = token_s or ticket[PROMPT_TOKEN_S] * slowness
  return ahead, left[id] or ticket[UNREAD_TOKENS], most, pace, slowness, returns
end

-- Of the replicas with credit that serve the ticket's class: {replica, its work with the ticket, seconds for the prompts
-- ahead, seconds for its own, seconds of a step, how many prompts it has to read, the chance that what it gives up would
-- be wanted again, seconds until the first token} ...
-- A late ticket goes where nothing is to be read, unless a start is owed to it: it would stand in the way of others.
local function offers_to(ticket, owed)
  local free, offers = redis.call('ZRANGE', P .. ':free', 0, -1, 'WITHSCORES'), {}
  if not free[1] then
    return offers
  end
  local ids = {}
  for i = 1, #free, 2 do
    ids[#ids + 1] = free[i]
  end
  local tables, prompts = tables_of(ids), redis.call('HMGET', P .. ':prompts', unpack(ids))
  local late = not owed and is_behind(ticket)
  local left, least_unread = unread_of(ticket)
  for i, id in ipairs(ids) do
    local ahead, unread, most, pace, slowness, returns = to_read(ticket, left, id, tables, i)
    if is_for(tables.serves[i] or '', ticket[SLO_CLASS]) and not (late and most and ahead > 0) then
      local work = free[2 * i] + work_at_s(ticket, unread, least_unread) * slowness
      local others, step = tonumber(prompts[i] or 0), ticket[STEP_S] * slowness
      local first = ahead * pace + unread * pace + step
      offers[#offers + 1] = { id, work, ahead * pace, unread * pace, step, others, returns, first }
    end
  end
  return offers
end

-- Those of replicas that the ticket's router can reach, if there are any.
local function within_reach(ticket, offers)
  local avoided, kept = {}, {}
  for _, id in ipairs(ticket[AVOIDS]) do
    avoided[id] = true
  end
  for _, offer in ipairs(offers) do
    if not avoided[offer[1]] then
      kept[#kept + 1] = offer
    end
  end
  return kept[1] and kept or offers
end

-- policies.router.placement.prices_s, in the place of seconds for the prompts ahead, and the least of all.
local function least_price_s(offers)
  local others, least_s = math.huge, math.huge
  for _, offer in ipairs(offers) do
    others = math.min(others, offer[6])
  end
  for _, offer in ipairs(offers) do
    offer[3] = offer[3] + offer[4] * (1 + others + offer[7])
    least_s = math.min(least_s, offer[3])
  end
  return least_s
end

-- policies.router.placement.soonest, or nil when there is no offer: the least price; of those less than a step dearer the
-- least work, then the price, then the id. Returns all offers besides.
local function choose(ticket, owed)
  local offers = within_reach(ticket, offers_to(ticket, owed))
  local least_s = least_price_s(offers)
  local best
  for _, other in ipairs(offers) do
    if other[3] - other[5] <= least_s then
      if not best or other[2] < best[2] or (other[2] == best[2] and (other[3] < best[3]
          or (other[3] == best[3] and other[1] < best[1]))) then
        best = other
      end
    end
  end
  return best and best[1], offers
end

-- How long before this ticket the latest arrival came that started before it: what overtook it did so by no more.
local function note_start(ticket)
  redis.call('INCR', P .. ':starts')
  if ticket[API_KEY] ~= '' then
    redis.call('ZINCRBY', P .. ':served', ticket[WORK_S], ticket[API_KEY])
  end
  if ticket[ARRIVAL_S] then
    local latest = tonumber(redis.call('GET', P .. ':started') or '-inf')
    if latest > ticket[ARRIVAL_S] then
      local longest = tonumber(redis.call('GET', P .. ':overtaken') or '0')
      if latest - ticket[ARRIVAL_S] > longest then
        redis.call('SET', P .. ':overtaken', latest - ticket[ARRIVAL_S], 'KEEPTTL')
      end
    else
      redis.call('SET', P .. ':started', ticket[ARRIVAL_S], 'KEEPTTL')
    end
  end
end

local function start(id, ticket, replica)
  take_from_lane(id, ticket)
  put_on(id, ticket, replica)
  note_start(ticket)
end

-- policies.router.order.is_late, from a replica that could take it, of a ticket that was not called that before.
local function is_late(ticket, replica)
  if not ticket[LATE_KEY] or not ticket[DEADLINE_S] or ticket[DEADLINE_KEY] == ticket[LATE_KEY] then
    return false
  end
  local _, _, token_s = reading_of(replica)
  local unread = unread_of(ticket)[replica] or ticket[UNREAD_TOKENS]
  local reading_s = unread * (token_s or ticket[PROMPT_TOKEN_S] * slowness_of(replica))
  return now_s() + reading_s > ticket[DEADLINE_S]
end

-- Give it the key of those behind.
local function call_late(ticket)
  local reason = now_s() > ticket[DEADLINE_S] and 'passed' or 'reading'
  redis.call('HINCRBY', P .. ':late', ticket[SLO_CLASS] .. ':' .. reason, 1)
  ticket[DEADLINE_KEY] = ticket[LATE_KEY]
end

-- Of the keys that wait in this class and band, the least served one's first ticket, and what it was served; nil when
-- none does. No key is noted with more than it was served: where the least note is the truth, no other was served less.
local function first_turn(class, band)
  local turns = turns_of(class, band)
  while true do
    local key, noted = unpack(redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES'))
    if not key then
      return nil
    end
    local served = redis.call('ZSCORE', P .. ':served', key) or '0'
    if served ~= noted then
      redis.call('ZADD', turns, served, key)
    else
      local waits = P .. ':of_key:' .. class .. ':' .. key
      local first = redis.call('ZRANGEBYSCORE', waits, band * BAND_S, '(' .. (band + 1) * BAND_S, 'LIMIT', 0, 1)[1]
      if first then
        return first, tonumber(served)
      end
      redis.call('ZREM', turns, key)
    end
  end
end

-- policies.router.turns: whose turn it is where the order has this ticket go to this replica.
local function in_turn(head, ticket, replica, owed)
  local band, least = band_of(ticket), math.huge
  if not band or (band == IN_TIME and not first_turn(ticket[SLO_CLASS], LATE)) then
    return head, ticket, replica
  end
  local classes = band == LATE and redis.call('HKEYS', P .. ':waiting') or { ticket[SLO_CLASS] }
  table.sort(classes)
  for _, class in ipairs(classes) do
    local id, served = first_turn(class, band)
    local other = id and served < least and load_ticket(id)
    local its_replica = other and choose(other, owed)
    if its_replica then
      least, head, ticket, replica = served, { id = id, lane = lane_of(other) }, other, its_replica
    end
  end
  return head, ticket, replica
end

-- policies.router.lanes.Lanes.late_like, as far as policies.router.late.looked_at: ids, the oldest first.
local function late_like(ticket)
  local waits = of_key(ticket) or P .. ':lane:' .. lane_of(ticket)
  local from, to, seen = LATE * BAND_S, '(' .. (LATE + 1) * BAND_S, {}
  local ids = redis.call('ZRANGEBYSCORE', waits, from, to, 'LIMIT', 0, OLDEST)
  for _, id in ipairs(ids) do
    seen[id] = true
  end
  local newest = redis.call('ZREVRANGEBYSCORE', waits, to, from, 'LIMIT', 0, NEWEST)
  for i = #newest, 1, -1 do
    if not seen[newest[i]] then
      ids[#ids + 1] = newest[i]
    end
  end
  return ids
end

-- policies.router.ledger.Replica.has_room, of those that serve this class: {id, unread tokens, work, own seconds per
-- prompt token or false, slowness, whether a late ticket may start there} ..., by id.
local function with_room(class)
  local replicas = {}
  for _, id in ipairs(redis.call('HKEYS', P .. ':batch_size')) do
    local slots, running = hash_number(':slots', id), hash_number(':running', id)
    if serves(id, class) and slots > running and redis.call('SISMEMBER', P .. ':refilled', id) == 0 then
      local known, most, token_s = reading_of(id)
      local unread, free = unread_tokens(id, known), redis.call('ZSCORE', P .. ':free', id)
      local work, may_start = hash_number(':work', id), free and not (most and unread > 0)
      replicas[#replicas + 1] = { id, unread, work, token_s, slowness_of(id), may_start }
    end
  end
  table.sort(replicas, function(a, b) return a[1] < b[1] end)
  return replicas
end

-- Where a late ticket belongs among replicas `with_room`, its tokens to read there and its seconds per token: the least of
-- policies.router.late.most_saved, and the first of equal ones; nil where there is none.
local function own_replica(ticket, replicas)
  local left, avoided = unread_of(ticket), {}
  for _, id in ipairs(ticket[AVOIDS]) do
    avoided[id] = 1
  end
  local own, own_out, own_s, own_unread, own_pace
  for _, each in ipairs(replicas) do
    local unread, pace = left[each[1]] or ticket[UNREAD_TOKENS], each[4] or ticket[PROMPT_TOKEN_S] * each[5]
    local out, seconds = avoided[each[1]] or 0, (each[2] + unread) * pace
    if not own or out < own_out or (out == own_out and (seconds < own_s or (seconds == own_s and each[3] < own[3]))) then
      own, own_out, own_s, own_unread, own_pace = each, out, seconds, unread, pace
    end
  end
  return own, own_unread, own_pace
end

-- policies.router.late.most_saved, of the late tickets beside this one, of which it is the first: head, ticket, replica.
local function most_saved(first)
  local replicas, most_s = with_room(first[SLO_CLASS]), -1
  local head, chosen, replica
  for _, id in ipairs(late_like(first)) do
    local ticket = load_ticket(id)
    local own, unread, pace = own_replica(ticket, replicas)
    if own and ticket[API_KEY] == first[API_KEY] then
      own[2] = own[2] + unread
      local saved_s = (ticket[UNREAD_TOKENS] - unread) * pace
      if own[6] and saved_s > most_s then
        most_s, head, chosen, replica = saved_s, { id = id, lane = lane_of(ticket) }, ticket, own[1]
      end
    end
  end
  return head, chosen, replica
end

-- The most urgent ticket that a replica with credit may take, or whose turn it is, and that replica; nil without any.
local function next_start(heads)
  table.sort(heads, more_urgent)
  for _, head in ipairs(heads) do
    local ticket = load_ticket(head.id)
    local replica = choose(ticket)
    if replica then
      head, ticket, replica = in_turn(head, ticket, replica)
      if is_behind(ticket) then
        head, ticket, replica = most_saved(ticket)
      end
      if replica then
        return head, ticket, replica
      end
    end
  end
end

-- policies.router.order.is_owed_a_start: of those behind, one of each lane, whose patience ended first.
local function next_owed()
  local starts = tonumber(redis.call('GET', P .. ':starts') or '0')
  if (starts + 1) % STARTS_FOR_THE_PATIENT ~= 0 then
    return nil
  end
  local owed
  for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
    local found = redis.call('ZRANGEBYSCORE', P .. ':lane:' .. lane, NO_TARGET * BAND_S, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    local ends = found[1] and tonumber(found[2]) % BAND_S
    if ends and ends <= now_s() and (not owed or ends < owed.ends or (ends == owed.ends and found[1] < owed.id)) then
      owed = { id = found[1], lane = lane, ends = ends }
    end
  end
  local ticket = owed and load_ticket(owed.id)
  local replica = ticket and ticket[LATE_KEY] == ticket[DEADLINE_KEY] and choose(ticket, true) -- other keys have no bands
  if replica then
    return in_turn(owed, ticket, replica, true)
  end
end

-- The first of a lane is another one than before.
local function look_again(heads, lane)
  for index, head in ipairs(heads) do
    if head.lane == lane then
      replace_or_remove(heads, index, of_rank(lane, 0))
      return
    end
  end
end

-- In terms of bands, of heads that hold it yet: it was not owed its start.
local function is_most_urgent(heads, ticket)
  local least = math.huge
  for _, head in ipairs(heads) do
    least = math.min(least, head.key)
  end
  return math.floor(least / BAND_S) == math.floor(ticket[DEADLINE_KEY] / BAND_S)
end

-- Late tickets go where nothing is to be read.
local function may_start_at(ticket, replica)
  local known, most = reading_of(replica)
  return not (is_behind(ticket) and most and unread_tokens(replica, known) > 0)
end

-- The rest of a rolling batch: the next ones of the lane and band of its first, but for those that are late.
local function start_companions(heads, first, replica, started)
  local size, lane = tonumber(redis.call('HGET', P .. ':batch_size', replica)), lane_of(first)
  if size == 1 or not is_most_urgent(heads, first) then
    return
  end
  for _ = 2, size do
    local head = redis.call('ZSCORE', P .. ':free', replica) and of_rank(lane, 0)
    local ticket = head and load_ticket(head.id)
    if not ticket or math.floor(head.key / BAND_S) ~= math.floor(first[DEADLINE_KEY] / BAND_S)
        or is_late(ticket, replica) or not may_start_at(ticket, replica) then
      break
    end
    start(head.id, ticket, replica)
    started[#started + 1] = { head.id, replica, ticket[ROUTER_ID] }
  end
end

-- While a replica has credit and a lane holds a ticket that it may take: the most urgent goes first. Those that turn out
-- to be late when it is their turn move behind.
local function start_singles(started)
  if redis.call('EXISTS', P .. ':free') == 0 then
    return
  end
  local heads, called = heads_of_lanes(), 0
  while true do
    local head, ticket, replica = next_owed()
    if replica then
      redis.call('HINCRBY', P .. ':owed', ticket[SLO_CLASS], 1)
    else
      head, ticket, replica = next_start(heads)
    end
    if not replica then
      break
    elseif called < MOST_CALLED_LATE and is_late(ticket, replica) then
      called = called + 1
      call_late(ticket)
      save_ticket(head.id, ticket)
      rank(head.id, ticket)
    else
      start(head.id, ticket, replica)
      started[#started + 1] = { head.id, replica, ticket[ROUTER_ID] }
      start_companions(heads, ticket, replica, started)
    end
    look_again(heads, head.lane)
    if redis.call('EXISTS', P .. ':free') == 0 then
      break
    end
  end
end

-- Seconds that the ticket has waited which waits longest among these.
local function longest_wait_s(ids)
  local oldest = now_ms()
  for _, id in ipairs(ids) do
    oldest = math.min(oldest, load_ticket(id)[SINCE_MS])
  end
  return (now_ms() - oldest) / 1000
end

-- policies.gang.batches.formed_key, as {ids, key, is_full}, of a lane's first tickets up to `size`; nil when it is not formed.
local function formed(lane, size, max_wait_s)
  local first = redis.call('ZRANGE', P .. ':lane:' .. lane, 0, size - 1, 'WITHSCORES')
  local ids = {}
  for i = 1, #first, 2 do
    ids[#ids + 1] = first[i]
  end
  local due = tonumber(first[2]) + max_wait_s
  if #ids == size then
    return { ids = ids, key = math.min(tonumber(first[2 * size]), due), is_full = true }
  elseif longest_wait_s(ids) >= max_wait_s then
    return { ids = ids, key = due, is_full = false }
  end
end

-- policies.gang.batches.GangConfig.bin_sizes, the first bin's at 1.
local function gang_sizes_of(replica)
  local sizes = {}
  for size in string.gmatch(redis.call('HGET', P .. ':gang_sizes', replica) or '', '%d+') do
    sizes[#sizes + 1] = tonumber(size)
  end
  return sizes
end

-- policies.gang.batches.next_batch
local function goes_before(a, b)
  if a.band ~= b.band then
    return a.band < b.band
  elseif a.turn ~= b.turn then
    return a.turn < b.turn
  end
  return more_urgent(a, b)
end

-- policies.gang.batches.next_batch: the batch that this idle replica takes, or nil.
local function next_gang(replica)
  local size, max_wait_s = hash_number(':slots', replica), hash_number(':gangs', replica)
  local patience_s, sizes, best = hash_number(':gang_patience', replica), gang_sizes_of(replica), nil
  for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
    local class, bin, bucket = parts_of(lane)
    local batch = serves(replica, class) and formed(lane, math.min(size, sizes[bin + 1] or size), max_wait_s)
    if batch then
      local is_patient = patience_s > 0 and longest_wait_s(batch.ids) < patience_s
      batch.band, batch.turn = math.floor(batch.key / BAND_S), is_patient and bin or -1
      batch.bin, batch.bucket, batch.class = bin, bucket, class
      if not best or goes_before(batch, best) then
        best = batch
      end
    end
  end
  return best
end

-- Every idle replica that takes gang batches, the fastest first, takes one if one is formed.
local function start_gangs(started)
  local idle = {}
  for _, replica in ipairs(redis.call('HKEYS', P .. ':gangs')) do
    if hash_number(':running', replica) == 0 and hash_number(':slots', replica) > 0 then
      idle[#idle + 1] = { slowness_of(replica), replica }
    end
  end
  table.sort(idle, function(a, b)
    return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2])
  end)
  for _, pair in ipairs(idle) do
    local batch = next_gang(pair[2])
    if batch then
      redis.call('HINCRBY', P .. ':batches', batch.bin .. ':' .. (batch.is_full and 'full' or 'waited'), 1)
      for _, id in ipairs(batch.ids) do
        local ticket = load_ticket(id)
        start(id, ticket, pair[2])
        started[#started + 1] = { id, pair[2], ticket[ROUTER_ID] }
      end
    end
  end
end

-- A replica with slots that has enough to read, or waits for more of them: what waits gets one of them soon.
local function slots_wait()
  for _, replica in ipairs(redis.call('SMEMBERS', P .. ':refilled')) do
    if hash_number(':running', replica) < hash_number(':slots', replica) then
      return true
    end
  end
  for _, replica in ipairs(redis.call('HKEYS', P .. ':reading')) do
    if hash_number(':running', replica) < hash_number(':slots', replica) and is_full_of_prompts(replica) then
      return true
    end
  end
end

-- policies.router.recall.recalls: for urgent tickets that no replica could take.
local function recall()
  if redis.call('EXISTS', P .. ':recallable') == 0 or slots_wait() then
    return
  end
  local heads, on_the_way, owners = heads_of_lanes(), redis.call('SCARD', P .. ':recalled'), {}
  while #heads > 0 do
    table.sort(heads, more_urgent)
    local head = heads[1]
    if load_ticket(head.id)[FILLS_IDLE] then
      break
    elseif on_the_way > 0 then
      on_the_way = on_the_way - 1
    else
      local last = redis.call('ZREVRANGE', P .. ':recallable', 0, 0, 'WITHSCORES')
      if not last[1] or tonumber(last[2]) <= head.key then
        break
      end
      local id = last[1]
      local owner = load_ticket(id)[ROUTER_ID]
      redis.call('ZREM', P .. ':recallable', id)
      redis.call('SADD', P .. ':recalled', id)
      owners[owner] = owners[owner] or {}
      table.insert(owners[owner], { id })
    end
    replace_or_remove(heads, 1, of_rank(head.lane, head.rank + 1))
  end
  for owner, batch in pairs(owners) do
    redis.call('PUBLISH', P .. ':router:' .. owner, cmsgpack.pack(batch))
  end
end

-- Hand out what can be handed out, so that no replica has credit for what waits when a script ends, late ones aside that
-- wait for the replica that has their prompt. Tickets of `router` are returned, those of other routers are published to them. `no_slot_came_free`: single requests need no second look.
local function dispatch(router, no_slot_came_free)
  local started, mine, others = {}, {}, {}
  if not no_slot_came_free then
    start_singles(started)
  end
  start_gangs(started)
  for _, each in ipairs(started) do
    local id, replica, owner = each[1], each[2], each[3]
    if owner == router then
      mine[#mine + 1] = { id, replica }
    else
      others[owner] = others[owner] or {}
      table.insert(others[owner], { id, replica })
    end
  end
  for owner, batch in pairs(others) do
    redis.call('PUBLISH', P .. ':router:' .. owner, cmsgpack.pack(batch))
  end
  recall()
  return mine
end

-- Take a replica out of every table; the requests on it are their routers' to recover.
local function drop_replica(replica)
  for _, id in ipairs(redis.call('ZRANGE', P .. ':on:' .. replica, 0, -1)) do
    redis.call('HDEL', P .. ':tickets', id)
    no_longer_recallable(id)
  end
  redis.call('DEL', P .. ':on:' .. replica, P .. ':unread_of:' .. replica)
  for _, table_name in ipairs({ 'replicas', 'serves', 'slots', 'running', 'slowness', 'work', 'gangs', 'gang_sizes', 'gang_patience',
    'batch_size', 'silence', 'unread', 'prompts', 'reading' }) do
    redis.call('HDEL', P .. ':' .. table_name, replica)
  end
  redis.call('ZREM', P .. ':free', replica)
  redis.call('SREM', P .. ':refilled', replica)
  redis.call('ZREM', P .. ':beats', replica)
end

-- Take routers out, and their tickets that wait. What runs is ended by its replica, which sees the connection close.
local function remove_routers(routers)
  if #routers == 0 then
    return
  end
  local gone = {}
  for _, router in ipairs(routers) do
    gone[router] = true
    redis.call('ZREM', P .. ':routers', router)
  end
  for _, id in ipairs(redis.call('HKEYS', P .. ':tickets')) do
    local ticket = load_ticket(id)
    if gone[ticket[ROUTER_ID]] and ticket[REPLICA_ID] == '' then
      forget(id)
    end
  end
end
