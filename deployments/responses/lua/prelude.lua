-- Stored responses of an application. KEYS[1] begins all of its keys:
--   :record:OWNER:ID  hash: status, response, messages, error, and of one in the background: background, maker
--   :bytes            hash: OWNER:ID -> bytes that count for it
--   :used             hash: OWNER -> bytes, and * -> bytes of all owners
--   :running          sorted set: OWNER:ID of those that a router makes in the background, by the end of its lease, ms
--   :ended            sorted set: OWNER:ID of all others, by the time at which they expire, ms
--   :of:OWNER         the same, of one owner
-- ARGV[1]: how long a response is kept, ms.

local keep_ms = tonumber(ARGV[1])
local MOST = 256 -- responses that one call removes: with more it would hold up the queue, which is in the same Redis

local function key(name) return KEYS[1] .. ":" .. name end

local function record(member) return key("record:" .. member) end

local function owner_of(member) return string.match(member, "^[^:]*") end

-- To the microsecond: of two that end within a millisecond, too, the older one is known.
local function now_ms()
  local time = redis.call("TIME")
  return time[1] * 1000 + time[2] / 1000
end

local function number(name, field) return tonumber(redis.call("HGET", key(name), field) or 0) end

local function count(member, bytes)
  local more = bytes - number("bytes", member)
  for _, whose in ipairs({owner_of(member), "*"}) do
    if redis.call("HINCRBY", key("used"), whose, more) <= 0 then redis.call("HDEL", key("used"), whose) end
  end
  if bytes > 0 then
    redis.call("HSET", key("bytes"), member, bytes)
  else
    redis.call("HDEL", key("bytes"), member)
  end
end

local function drop(member)
  redis.call("UNLINK", record(member))
  redis.call("ZREM", key("running"), member)
  redis.call("ZREM", key("ended"), member)
  redis.call("ZREM", key("of:" .. owner_of(member)), member)
  count(member, 0)
end

local function is_running(member) return redis.call("ZSCORE", key("running"), member) end

-- Whether it is being made, and by the one that asks: another may have been begun under an id that was deleted.
local function is_made_by(member, maker)
  return is_running(member) and redis.call("HGET", record(member), "maker") == maker
end

local function put(member, bytes, ...)
  count(member, bytes)
  redis.call("HSET", record(member), ...)
  redis.call("PEXPIRE", record(member), keep_ms)
end

-- From now on it expires, and may give way to others.
local function finish(member)
  local expires_ms = now_ms() + keep_ms
  redis.call("ZREM", key("running"), member)
  redis.call("ZADD", key("ended"), expires_ms, member)
  redis.call("ZADD", key("of:" .. owner_of(member)), expires_ms, member)
  redis.call("PEXPIRE", record(member), keep_ms)
end

local function close(member, status, message)
  redis.call("HSET", record(member), "status", status, "error", message)
  finish(member)
end

local function look_at_lease(member)
  local lease_ms = is_running(member)
  if lease_ms and tonumber(lease_ms) <= now_ms() then
    close(member, "failed", "the router that made this response was lost: ask again")
  end
end

local function sweep()
  local now = now_ms()
  for _, member in ipairs(redis.call("ZRANGEBYSCORE", key("running"), "-inf", now, "LIMIT", 0, MOST)) do
    look_at_lease(member)
  end
  for _, member in ipairs(redis.call("ZRANGEBYSCORE", key("ended"), "-inf", now, "LIMIT", 0, MOST)) do
    drop(member)
  end
end

-- Whether so many bytes fit now; the oldest go for them, of the owner where its share is full.
local function makes_room(member, bytes, most, most_of_owner)
  if bytes > math.min(most, most_of_owner) then return false end
  local owner = owner_of(member)
  local more = bytes - number("bytes", member)
  for _ = 1, MOST do
    local is_share_full = number("used", owner) + more > most_of_owner
    if not is_share_full and number("used", "*") + more <= most then return true end
    local oldest = redis.call("ZRANGE", is_share_full and key("of:" .. owner) or key("ended"), 0, 0)[1]
    if not oldest then return false end
    drop(oldest)
  end
  return false
end
