-- ARGV: replica
-- A replica left, or a router saw its connection break.
drop_replica(ARGV[1])
return 0
