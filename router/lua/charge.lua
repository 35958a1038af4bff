-- ARGV: quotas {{quota, cost, per_s, burst} ...}
-- Take out of quotas what no request takes. Returns {1}, or {0, what is spent, seconds until it may be tried again}.
local spent, refusal = quotas_allow(cmsgpack.unpack(ARGV[1]))
if refusal then
  return refusal
end
spend(spent)
return { 1 }
