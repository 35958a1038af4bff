-- ARGV: router
-- A router left in good order.
remove_routers({ ARGV[1] })
return 0
