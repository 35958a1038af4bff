-- What one router makes in the background: each response, its maker and its status. The makers that should stop: theirs
-- were cancelled or deleted, or their lease was over.
local lease_ms, unwanted = ARGV[2], {}
for i = 3, #ARGV, 3 do
  local member, maker, status = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if is_made_by(member, maker) then
    redis.call("HSET", record(member), "status", status)
    redis.call("PEXPIRE", record(member), keep_ms)
    redis.call("ZADD", key("running"), now_ms() + lease_ms, member)
  else
    unwanted[#unwanted + 1] = maker
  end
end
return unwanted
