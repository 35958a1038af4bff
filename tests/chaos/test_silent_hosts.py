"""A host goes without a word, as by a power loss or a pulled cable: no packet and no reset comes from it any more."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.chaos.fleet import ENDLESS, Fleet
from tests.deployments.process.test_haproxy import Serve
from tests.island import Island
from tests.router.service import Service, begun
from tests.waiting import until, wait_until

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


async def noticed(has_gone: Callable[[], bool]) -> None:
    """In time, and not before a short cut would be over."""
    began_s = time.monotonic()
    await until(has_gone)
    assert 5 < time.monotonic() - began_s < NOTICED_S + LATE_S


async def test_its_replica_is_noticed_by_routers_amid_streams_and_without_redis(island: Island, fleet: Fleet) -> None:
    fleet.replica_on(island, "--step-s", "0.02")
    service = Service(fleet.redis.url, fleet.namespace)
    try:
        front_end = await service.front_end()
        await begun(await front_end.ask_many(4, 100_000))
        connections = front_end.client.connections
        island.pull()
        os.kill(fleet.redis.pid, signal.SIGKILL)
        await noticed(lambda: not connections.all_open)
    finally:
        await service.close()


@pytest.mark.parametrize("requests", [0, 4])
async def test_its_router_is_noticed_by_replicas(island: Island, fleet: Fleet, requests: int) -> None:
    """Also one that has nothing to say, or is told nothing."""
    service = Service(fleet.redis.url, fleet.namespace)
    try:
        replica = await service.replica(host=island.ashore)
        router = fleet.router_on(island, ENDLESS, "--requests", "20", "--concurrency", str(requests or 1))
        await until(lambda: len(replica.relay._links) == 1)
        if not requests:
            await until(lambda: router.asked >= 0 and replica.engine.held > 0)
            replica.engine.pause()
        island.pull()
        await noticed(lambda: not replica.relay._links)
    finally:
        await service.close()


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
