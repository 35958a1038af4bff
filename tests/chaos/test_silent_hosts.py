"""A host goes without a word, as by a power loss or a pulled cable: no packet and no reset comes from it any more."""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.deployments.process.test_haproxy import Serve
from tests.island import Island
from tests.waiting import wait_until

pytestmark = pytest.mark.long
NOTICED_S = 15.0
LATE_S = 5.0  # that a busy machine may need besides
ROUTER = """
import socket, time
with socket.create_server(("0.0.0.0", 8000)) as listener:
    while True:
        connection, _ = listener.accept()
        if connection.recv(4096).startswith(b"GET /-/healthz"):
            connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
            connection.close()
        else:
            stream = connection
            stream.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\n\\r\\nfirst")
"""


@pytest.fixture
def island() -> Iterator[Island]:
    with Island() as made:
        yield made


def test_the_streams_of_its_router_break(island: Island, tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    serve.writes((island.address, 8000))
    router = psutil.Popen([*island.command, sys.executable, "-c", ROUTER])
    try:
        with serve.running():
            client = wait_until(lambda: streaming(serve), 30, "it streams")
            island.pull()
            began_s = time.monotonic()
            client.settimeout(60)
            assert client.recv(4096) == b""
            assert 5 < time.monotonic() - began_s < NOTICED_S + LATE_S
            client.close()
    finally:
        router.kill()
        router.wait()


def streaming(serve: Serve) -> socket.socket | None:
    """A client that has the first piece of its answer; None while no router answers."""
    client = socket.create_connection(("127.0.0.1", serve.port), timeout=30)
    client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    if b"first" in client.recv(4096):
        return client
    client.close()
    return None
