"""The environment of Ray and Ray Serve, and HAProxy as the wrapper of one machine starts it."""

import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from deployments.app import ROUTER_QUEUE
from deployments.config.router import RouterSection
from deployments.process.environment import (
    MAX_CONNECTIONS,
    MOST_HAPROXY_THREADS,
    START_S,
    connections_within,
    haproxy_threads,
    one_machine_env,
    serve_env,
)
from deployments.process.ports import address, free_port
from deployments.process.vllm_env import cpu_dtype
from tests.waiting import wait_until

# What of Ray Serve's configuration says where HAProxy listens, in its own shape.
CONFIG = """\
global
    maxconn {connections}
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    option abortonclose
    option splice-request
    option splice-response
frontend prometheus
    bind :{metrics_port}
    http-request return status 200
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200
listen stats
  bind *:{stats_port}
"""


@contextmanager
def haproxy(folder: Path, host: str, port: int) -> Iterator[psutil.Process]:
    env = one_machine_env(folder, host, port)
    metrics_port, stats_port = (env[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS"))
    file = folder / "haproxy.cfg"
    connections = env["RAY_SERVE_HAPROXY_MAXCONN"]
    file.write_text(CONFIG.format(connections=connections, metrics_port=metrics_port, stats_port=stats_port, port=port))
    process = psutil.Popen([env["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: process.poll() is not None or listening(process), 30, "it listens")
        assert process.poll() is None, "it did not start"
        yield process
    finally:
        process.terminate()
        process.wait(30)


def listening(process: psutil.Process) -> set[str]:
    found = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {address(*c.laddr) for c in found} if len(found) == 3 else set()


@pytest.mark.parametrize(
    ("host", "reached_by"),
    [("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"]), ("::1", ["::1"]), ("::", ["127.0.0.1", "::1"])],
)
def test_haproxy_serves_on_the_address_that_was_asked_for_and_else_on_loopback(
    tmp_path: Path, host: str, reached_by: list[str]
) -> None:
    port = free_port()
    with haproxy(tmp_path, host, port) as process:
        addresses = listening(process)
        assert address(host, port) in addresses
        assert all(each.startswith("127.0.0.1:") for each in addresses - {address(host, port)})
        for local in reached_by:
            socket.create_connection((local, port), timeout=30).close()


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: sluice\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
)


UPGRADE += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"


def test_haproxy_closes_the_connection_of_a_refused_websocket(tmp_path: Path) -> None:
    """HAProxy strips what a router says of that. Other connections it keeps."""
    port = free_port()
    with haproxy(tmp_path, "127.0.0.1", port), socket.create_connection(("127.0.0.1", port), timeout=30) as kept:
        for request, closes in ((UPGRADE.replace(b"websocket", b"h2c"), False), (UPGRADE, True)):
            kept.sendall(request)
            answer = kept.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 200")
            assert (b"connection: close" in answer) == closes
        assert kept.recv(10_000) == b""
    assert "\nfrontend http_frontend\n" in HAPROXY_CONFIG_TEMPLATE, "the line that the wrapper looks for"


def test_nothing_of_ray_is_given_up_sooner_than_a_start_and_no_worker_comes_after_its_neighbours(
    tmp_path: Path,
) -> None:
    env = one_machine_env(tmp_path)
    for name, per_second in (
        ("RAY_gcs_server_port_wait_time_s", 1),
        ("RAY_agent_register_timeout_ms", 1000),
        ("RAY_worker_register_timeout_seconds", 1),
        ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", 1),
        ("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", 1),
    ):
        assert int(env[name]) >= START_S * per_second, name
    assert serve_env()["RAY_worker_niceness"] == "0"


def test_haproxy_takes_what_two_routers_do_and_starts_where_files_are_few() -> None:
    admitted = RouterSection().max_ongoing_requests + ROUTER_QUEUE
    assert int(serve_env()["RAY_SERVE_HAPROXY_MAXCONN"]) == MAX_CONNECTIONS >= 2 * admitted
    assert connections_within(resource.RLIM_INFINITY) == connections_within(65_536) == MAX_CONNECTIONS
    assert connections_within(20_000) == 7_795
    assert connections_within(64) == 1


def test_the_request_log_does_not_grow_for_ever() -> None:
    """Ray rotates the logs of its workers where this environment names a size, and not by default."""
    assert 0 < int(serve_env()["RAY_ROTATION_MAX_BYTES"]) <= 100_000_000
    assert 1 <= int(serve_env()["RAY_ROTATION_BACKUP_COUNT"]) <= 10


def test_haproxy_leaves_the_cores_of_a_small_machine_to_the_engines() -> None:
    assert [haproxy_threads(cores) for cores in (1, 2, 8, 64)] == [1, 1, 2, MOST_HAPROXY_THREADS]


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512f avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_the_demo_computes_in_what_the_processor_is_quick_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    monkeypatch.setattr("deployments.process.vllm_env._PROCESSOR", processor)
    assert cpu_dtype() == dtype
