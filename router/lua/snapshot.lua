-- The tables as JSON, for metrics and the status page.
local bins, replicas = {}, {}
for _, bin in ipairs(redis.call('SMEMBERS', P .. ':occupied')) do
  bins[bin] = redis.call('ZCARD', P .. ':bin:' .. bin)
end
for _, replica in ipairs(redis.call('HKEYS', P .. ':replicas')) do
  replicas[replica] = {
    slots = tonumber(redis.call('HGET', P .. ':slots', replica)),
    running = tonumber(redis.call('HGET', P .. ':running', replica) or '0'),
    outstanding_s = tonumber(redis.call('HGET', P .. ':work', replica) or '0'),
  }
end
return cjson.encode({ bins = bins, replicas = replicas, routers = redis.call('ZCARD', P .. ':routers') })
