"""From a request to an engine replica: bins and credit in Redis, and the token stream over TCP."""
