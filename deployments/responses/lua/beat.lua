-- What one router makes in the background: pairs of a response and its status. Those that it should stop making: they
-- were cancelled or deleted, or its lease was over.
local lease_ms, unwanted = ARGV[2], {}
for i = 3, #ARGV, 2 do
  local member, status = ARGV[i], ARGV[i + 1]
  if is_running(member) then
    redis.call("HSET", record(member), "status", status)
    redis.call("PEXPIRE", record(member), keep_ms)
    redis.call("ZADD", key("running"), now_ms() + lease_ms, member)
  else
    unwanted[#unwanted + 1] = member
  end
end
return unwanted
