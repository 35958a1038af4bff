-- How many responses there are, and their bytes.
sweep()
return {redis.call("HLEN", key("bytes")), number("used", "*")}
