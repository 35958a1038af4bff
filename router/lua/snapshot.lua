-- The tables as JSON, for metrics and the status page.
local lanes, replicas = {}, {}
for _, lane in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
  lanes[lane] = redis.call('ZCARD', P .. ':lane:' .. lane)
end
for _, replica in ipairs(redis.call('HKEYS', P .. ':replicas')) do
  local known, most, token_s = reading_of(replica)
  replicas[replica] = {
    slots = hash_number(':slots', replica),
    running = hash_number(':running', replica),
    outstanding_s = hash_number(':work', replica),
    slowness = slowness_of(replica),
    unread_tokens = unread_tokens(replica, known),
    max_unread_tokens = most or cjson.null,
    prompt_token_s = token_s or cjson.null,
    gang = redis.call('HEXISTS', P .. ':gangs', replica) == 1,
  }
end
local ahead = 0
for _, seconds in ipairs(redis.call('HVALS', P .. ':ahead')) do
  ahead = ahead + tonumber(seconds)
end
local function pairs_of(flat)
  local found = {}
  for i = 1, #flat, 2 do
    found[#found + 1] = { flat[i], tonumber(flat[i + 1]) }
  end
  return found
end
return cjson.encode({
  lanes = lanes,
  replicas = replicas,
  routers = redis.call('ZCARD', P .. ':routers'),
  waiting_s = ahead,
  recalled = redis.call('SMEMBERS', P .. ':recalled'),
  overtaken_s = tonumber(redis.call('GET', P .. ':overtaken') or '0'),
  late = pairs_of(redis.call('HGETALL', P .. ':late')),
  owed = pairs_of(redis.call('HGETALL', P .. ':owed')),
  batches = pairs_of(redis.call('HGETALL', P .. ':batches')),
  asked = redis.call('EXISTS', P .. ':asked') == 1,
  starts = tonumber(redis.call('GET', P .. ':starts') or '0'),
  start_s = tonumber(redis.call('GET', P .. ':start_s') or '0'),
  served = pairs_of(redis.call('ZREVRANGE', P .. ':served', 0, 49, 'WITHSCORES')),
})
