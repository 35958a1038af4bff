"""HAProxy as the script of a cluster starts it, and the wrapper of one machine, as Ray Serve itself configures it."""

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from itertools import islice
from pathlib import Path

import psutil
import pytest
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from deployments.process.environment import loopback_env
from deployments.process.ports import address, free_port
from tests.http_server import answering
from tests.integration.application import REPOSITORY
from tests.waiting import wait_until

PIDFD_GETFD = 438  # the number of this system call on every processor that has it
SCRIPT = REPOSITORY / "deployments/process/haproxy.sh"
# As Ray Serve has it, whose variable names the script itself.
ENV = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(SCRIPT),
}
# Starts HAProxy, prints its process, and waits to be killed.
ACTOR = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(300)"


class Serve:
    """What Ray Serve knows of one application, and the file that it writes for HAProxy.

    host: where clients come in on one machine; None on a cluster.
    """

    def __init__(self, folder: Path, host: str | None = None) -> None:
        self.port, self.file, self._script = free_port(), folder / "haproxy.cfg", str(SCRIPT)
        if host is not None:
            self._script = loopback_env(folder, host, self.port)["RAY_SERVE_HAPROXY_BINARY_PATH"]
        self._config = HAProxyConfig(
            socket_path=str(folder / "admin.sock"),
            server_state_base=str(folder),
            server_state_file=str(folder / "server-state"),
            metrics_socket_path=str(folder / "metrics.sock"),
            metrics_port=free_port(),
            stats_port=free_port(),
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
            maxconn=100,
        )

    def writes(self, *routers: int | tuple[str, int]) -> None:
        """For routers with these ports, or these hosts and ports."""
        places = [each if isinstance(each, tuple) else ("127.0.0.1", each) for each in routers]
        servers = [ServerConfig(name=f"r{number}", host=host, port=port) for number, (host, port) in enumerate(places)]
        backend = BackendConfig(
            name="http-sluice", path_prefix="/", app_name="sluice", servers=servers, protocol=RequestProtocol.HTTP
        )
        api = HAProxyApi(self._config, {"http-sluice": backend} if routers else {}, str(self.file))
        api._generate_config_file_internal()

    def logs_to(self, port: int) -> None:
        self._config.log_target = f"127.0.0.1:{port}"

    def answer(self) -> tuple[int, str | None]:
        """The status of a request, and its Retry-After."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=30) as response:
                return response.status, response.headers["Retry-After"]
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Retry-After"]

    @contextmanager
    def running(self, *arguments: str) -> Iterator[psutil.Process]:
        process = psutil.Popen([self._script, "-db", "-f", str(self.file), *arguments], env=ENV)
        try:
            wait_until(lambda: process.poll() is not None or len(listening(process)) >= 3, 30, "it listens")
            assert process.poll() is None, "it did not start"
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(30)

    def is_down(self) -> bool:
        """Whether its first router is taken for dead."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self._config.socket_path)
            admin.sendall(b"show stat\n")
            return any(
                line.startswith("http-sluice,r0,") and ",DOWN," in line
                for line in read_all(admin).decode().splitlines()
            )

    def is_open(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def listening(process: psutil.Process) -> set[str]:
    """Where clients come in, and for metrics and statistics."""
    found = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {address(*c.laddr) for c in found}


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    return Serve(tmp_path)


@pytest.fixture
def router() -> Iterator[int]:
    with answering(lambda _: (200, b"")) as url:
        yield int(url.rpartition(":")[2])


def test_a_body_has_the_routers_time_to_come_and_is_refused_in_openais_form(
    serve: Serve, router: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "SLUICE_BODY_TIMEOUT_MS", "500")
    serve.writes(router)
    with serve.running(), socket.create_connection(("127.0.0.1", serve.port), timeout=30) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 10\r\n\r\nslow")
        assert error_in(read_all(client)) == (408, "RequestTimeout", None)


def test_a_router_that_breaks_off_before_it_answers_is_told_in_openais_form(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve.writes(listener.getsockname()[1])
        with serve.running(), socket.create_connection(("127.0.0.1", serve.port), timeout=30) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            _asked_for(listener, b"GET /v1/models").close()
            assert error_in(read_all(client)) == (502, "BadGateway", "5")


def test_its_log_tells_requests_without_the_ids_of_responses(serve: Serve, router: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as syslog:
        syslog.bind(("127.0.0.1", 0))
        syslog.settimeout(30)
        serve.logs_to(syslog.getsockname()[1])
        serve.writes(router)
        with serve.running():
            for path in ("/v1/responses/resp_opens_it/cancel?a=b", "/v1/models?after=x"):
                with urllib.request.urlopen(f"http://127.0.0.1:{serve.port}{path}", timeout=30):
                    pass
            told = iter(lambda: syslog.recv(8192).decode(), "")
            asked = islice((line.split('"')[1] for line in told if '"GET' in line), 2)
            assert list(asked) == ["GET /v1/responses/ID HTTP/1.1", "GET /v1/models?after=x HTTP/1.1"]


def test_every_page_of_its_own_has_openais_form(serve: Serve, router: int) -> None:
    serve.writes(router)
    with serve.running():
        text = serve.file.read_text()
    pages = re.findall(r"^ *errorfile (\d+) (.*)$", text, re.MULTILINE)
    assert [int(status) for status, _ in pages] == [400, 408, 500, 502, 503, 504]
    for status, file in pages:
        found, kind, retry_after = error_in(Path(file).read_bytes())
        assert (found, kind) == (int(status), HTTPStatus(found).phrase.replace(" ", ""))
        assert (retry_after is not None) == (found > 500)
    (nowhere,) = re.findall(r"http-request return status 404 content-type (\S+) string '(.*)'", text)
    assert (nowhere[0], json.loads(nowhere[1])["error"]["code"]) == ("application/json", 404)


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65_536), b""))


def error_in(answer: bytes) -> tuple[int, str, str | None]:
    """Status and type of an error in OpenAI's form, and its Retry-After."""
    head, _, body = answer.decode().partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    error = json.loads(body)["error"]
    assert (headers["content-type"], int(headers["content-length"])) == ("application/json", len(body))
    assert error["code"] == int(status.split()[1])
    return error["code"], error["type"], headers.get("retry-after")


@pytest.mark.parametrize("out_of_reach", [0, 1])
def test_a_haproxy_without_a_router_to_ask_says_when_to_come_back(serve: Serve, out_of_reach: int) -> None:
    serve.writes(*(free_port() for _ in range(out_of_reach)))
    with serve.running():
        assert serve.answer() == (503, "5")


def test_one_that_comes_after_a_killed_one_begins_with_the_routers_that_that_one_knew(
    serve: Serve, router: int
) -> None:
    serve.writes(router)
    with serve.running() as first:
        assert serve.answer()[0] == 200
        first.kill()
        first.wait(30)
        serve.writes()
        with serve.running():
            assert serve.answer()[0] == 200


def test_an_application_that_is_gone_is_not_kept(serve: Serve, router: int) -> None:
    serve.writes(router)
    with serve.running() as first:
        assert serve.answer()[0] == 200
        serve.writes()
        with serve.running("-sf", str(first.pid)) as second:
            wait_until(lambda: serve.answer() == (503, "5"), 30, "the new one answers")
            assert second.is_running()


def test_what_streams_ends_whole_when_the_actor_that_started_it_is_killed_with_its_process_group(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve.writes(listener.getsockname()[1])
        command = [sys.executable, "-c", ACTOR, str(SCRIPT), "-db", "-f", str(serve.file)]
        with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True, process_group=0) as actor:
            assert actor.stdout is not None
            haproxy = psutil.Process(int(actor.stdout.readline()))
            wait_until(serve.is_open, 30, "it listens")
            assert os.getsid(haproxy.pid) == os.getsid(0), "it gets its share of cores among all of this session"
            with socket.create_connection(("127.0.0.1", serve.port), timeout=30) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
                stream = _asked_for(listener, b"GET / ")
                stream.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst")
                assert b"first" in client.recv(4096)
                os.killpg(actor.pid, signal.SIGKILL)
                actor.wait(30)
                wait_until(lambda: not serve.is_open(), 30, "it takes no new ones")
                stream.sendall(b"second")
                stream.close()
                assert client.recv(4096) == b"second"
                assert client.recv(4096) == b""
            haproxy.wait(30)


def test_each_connection_to_a_router_is_asked_after(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        serve.writes(port)
        with serve.running() as haproxy, socket.create_connection(("127.0.0.1", serve.port), timeout=30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            with _asked_for(listener, b"GET / ") as stream:
                asks = wait_until(lambda: keepalive_timer_s(stream.getpeername()[1], port), 30, "it is to be asked")
                assert asks <= 5.5
                assert user_timeouts_ms(haproxy.pid, port) == {12_000}


def user_timeouts_ms(pid: int, peers_port: int) -> set[int]:
    """After which the kernel gives up what is sent and not acknowledged, of a process' connections to this port."""
    libc, found = ctypes.CDLL(None, use_errno=True), set[int]()
    process = os.pidfd_open(pid)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        taken = libc.syscall(PIDFD_GETFD, process, int(entry.name), 0)
        if not os.readlink(entry).startswith("socket:"):
            os.close(taken)
            continue
        with socket.socket(fileno=taken) as mine, suppress(OSError):  # not connected
            peer = mine.getpeername()
            if mine.family == socket.AF_INET and peer[1] == peers_port:
                found.add(mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    os.close(process)
    return found


def keepalive_timer_s(port: int, peers_port: int) -> float | None:
    """Seconds until the kernel asks for a sign of life; None where another timer of that connection runs, or none."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, mine, peers, _, _, timer, *_ = line.split()
        if (mine.split(":")[1], peers.split(":")[1]) == (f"{port:04X}", f"{peers_port:04X}"):
            kind, _, ticks = timer.partition(":")
            return int(ticks, 16) / os.sysconf("SC_CLK_TCK") if kind == "02" else None
    return None


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 DRAINING\r\nContent-Length: 0\r\n\r\n", b""])
def test_what_streams_through_a_router_that_takes_no_more_or_stands_still_goes_on(serve: Serve, answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serve.writes(listener.getsockname()[1])
        text = serve.file.read_text()
        serve.file.write_text(re.sub(r"(default-server .* inter) 5s", r"\1 250ms", text))
        with serve.running(), socket.create_connection(("127.0.0.1", serve.port), timeout=30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            stream = _asked_for(listener, b"GET / ")
            stream.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfirst")
            assert b"first" in client.recv(4096)
            with answering_checks(listener, answer):
                wait_until(serve.is_down, 30, "it gets nothing new")
                stream.sendall(b"second")
                stream.close()
                assert client.recv(4096) == b"second"
                assert client.recv(4096) == b""


@contextmanager
def answering_checks(listener: socket.socket, answer: bytes) -> Iterator[None]:
    """Every connection gets this answer, or waits for one."""
    waiting: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                waiting.append(connection)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)
    for each in waiting:
        each.close()


def _asked_for(listener: socket.socket, beginning: bytes) -> socket.socket:
    """The connection on which that is asked: others are health checks, which are answered."""
    while True:
        connection, _ = listener.accept()
        if connection.recv(4096).startswith(beginning):
            return connection
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()


@pytest.mark.parametrize(
    ("host", "reached_by"),
    [("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"]), ("::1", ["::1"]), ("::", ["127.0.0.1", "::1"])],
)
def test_on_one_machine_it_serves_on_the_address_that_was_asked_for_and_else_on_loopback(
    tmp_path: Path, host: str, reached_by: list[str]
) -> None:
    serve = Serve(tmp_path, host)
    serve.writes()
    with serve.running() as process:
        addresses = listening(process)
        assert address(host, serve.port) in addresses
        assert all(each.startswith("127.0.0.1:") for each in addresses - {address(host, serve.port)})
        for local in reached_by:
            socket.create_connection((local, serve.port), timeout=30).close()


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: sluice\r\nConnection: Upgrade\r\nUpgrade: %b\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_the_connection_of_a_refused_websocket_is_closed(serve: Serve, router: int) -> None:
    """HAProxy strips what a router says of that. Other connections it keeps."""
    serve.writes(router)
    with serve.running(), socket.create_connection(("127.0.0.1", serve.port), timeout=30) as kept:
        for protocol, closes in ((b"h2c", False), (b"websocket", True)):
            kept.sendall(UPGRADE % protocol)
            answer = kept.recv(10_000)
            assert answer.startswith(b"HTTP/1.1 200")
            assert (b"connection: close" in answer.lower()) == closes
        assert kept.recv(10_000) == b""
