-- Shared by every script: the tables, and the moves that keep them consistent.
--
-- KEYS[1] is the prefix P; it carries a hash tag, so that all keys live in one cluster slot.
--   P:tickets    hash  id -> {bin, key, work_s, router, replica or '', assigned_ms}
--   P:bin:<n>    zset  id -> deadline key        P:occupied  set of bins that hold anything
--   P:replicas   hash  replica -> its address and engine, opaque here
--   P:slots      hash  replica -> slots          P:running   hash  replica -> tickets on it
--   P:work       hash  replica -> predicted seconds on it
--   P:free       zset  replica -> predicted seconds on it; only replicas with credit
--   P:on:<r>     set of ids on replica r
--   P:beats      zset  replica -> ms of its last heartbeat      P:routers  the same for routers
-- Channel P:router:<id> carries {{id, replica}, ...}: assignments that the router did not ask for.
--
-- The twin in Python is router/memory_store.py; a contract test runs both over the same histories.

local P = KEYS[1]
local BIN, KEY, WORK, ROUTER, REPLICA, ASSIGNED_MS = 1, 2, 3, 4, 5, 6

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function load_ticket(id)
  local raw = redis.call('HGET', P .. ':tickets', id)
  return raw and cmsgpack.unpack(raw)
end

local function save_ticket(id, ticket)
  redis.call('HSET', P .. ':tickets', id, cmsgpack.pack(ticket))
end

-- Put a replica among the free ones, ordered by its outstanding work, or take it out when its slots are used up.
local function offer(replica)
  local slots = tonumber(redis.call('HGET', P .. ':slots', replica) or '0')
  local running = tonumber(redis.call('HGET', P .. ':running', replica) or '0')
  if running < slots then
    redis.call('ZADD', P .. ':free', redis.call('HGET', P .. ':work', replica) or '0', replica)
  else
    redis.call('ZREM', P .. ':free', replica)
  end
end

local function put_on(id, ticket, replica)
  ticket[REPLICA] = replica
  ticket[ASSIGNED_MS] = now_ms()
  save_ticket(id, ticket)
  redis.call('SADD', P .. ':on:' .. replica, id)
  redis.call('HINCRBY', P .. ':running', replica, 1)
  redis.call('HINCRBYFLOAT', P .. ':work', replica, ticket[WORK])
  offer(replica)
end

local function take_from_bin(id, ticket)
  local bin = P .. ':bin:' .. ticket[BIN]
  redis.call('ZREM', bin, id)
  if redis.call('EXISTS', bin) == 0 then
    redis.call('SREM', P .. ':occupied', ticket[BIN])
  end
end

local function take_from_replica(id, ticket)
  local replica = ticket[REPLICA]
  if redis.call('SREM', P .. ':on:' .. replica, id) == 1 then
    if redis.call('HINCRBY', P .. ':running', replica, -1) == 0 then
      redis.call('HSET', P .. ':work', replica, '0') -- an idle replica starts afresh: rounding never piles up
    else
      redis.call('HINCRBYFLOAT', P .. ':work', replica, -ticket[WORK])
    end
    offer(replica)
  end
end

-- Forget a ticket wherever it is.
local function forget(id)
  local ticket = load_ticket(id)
  if not ticket then
    return nil
  end
  redis.call('HDEL', P .. ':tickets', id)
  if ticket[REPLICA] == '' then
    take_from_bin(id, ticket)
  else
    take_from_replica(id, ticket)
  end
  return ticket
end

-- The most urgent ticket of all bins: least deadline key, then least bin, then least id.
local function most_urgent()
  local best_id, best_key, best_bin
  for _, bin in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
    local head = redis.call('ZRANGE', P .. ':bin:' .. bin, 0, 0, 'WITHSCORES')
    local key, number = tonumber(head[2]), tonumber(bin)
    if not best_key or key < best_key or (key == best_key and number < best_bin) then
      best_id, best_key, best_bin = head[1], key, number
    end
  end
  return best_id
end

-- While a replica has credit and a bin holds a ticket: the most urgent ticket goes to the replica with the least work.
-- Tickets of `router` are returned, those of other routers are published to them.
local function dispatch(router)
  local mine, others = {}, {}
  while true do
    local replica = redis.call('ZRANGE', P .. ':free', 0, 0)[1]
    local id = replica and most_urgent()
    if not id then
      break
    end
    local ticket = load_ticket(id)
    take_from_bin(id, ticket)
    put_on(id, ticket, replica)
    if ticket[ROUTER] == router then
      mine[#mine + 1] = { id, replica }
    else
      local batch = others[ticket[ROUTER]] or {}
      batch[#batch + 1] = { id, replica }
      others[ticket[ROUTER]] = batch
    end
  end
  for owner, batch in pairs(others) do
    redis.call('PUBLISH', P .. ':router:' .. owner, cmsgpack.pack(batch))
  end
  return mine
end

-- Take a replica out of every table; the requests on it are their routers' to recover.
local function drop_replica(replica)
  for _, id in ipairs(redis.call('SMEMBERS', P .. ':on:' .. replica)) do
    redis.call('HDEL', P .. ':tickets', id)
  end
  redis.call('DEL', P .. ':on:' .. replica)
  redis.call('HDEL', P .. ':replicas', replica)
  redis.call('HDEL', P .. ':slots', replica)
  redis.call('HDEL', P .. ':running', replica)
  redis.call('HDEL', P .. ':work', replica)
  redis.call('ZREM', P .. ':free', replica)
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
    if gone[ticket[ROUTER]] and ticket[REPLICA] == '' then
      forget(id)
    end
  end
end
