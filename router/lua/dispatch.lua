-- ARGV: router
-- Hand out what time alone has made due: gang batches whose max-wait is over. Returns this router's new assignments.
return dispatch(ARGV[1])
