"""Starting and ending real child processes; none of them is a model server."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest
import zmq

from bench.servers import (
    ENGINE_ARGUMENTS,
    HOST,
    Server,
    ServerFailed,
    ServerSpec,
    by_kv_events,
    forward_events,
    gpus_of_an_engine,
    publishing,
    server_environment,
    shared_arguments,
    vllm_is_for_gpus,
)
from deployments.process.ports import free_port
from deployments.process.vllm_env import vllm_is_for_cpus
from tests.builds import install_build

HEALTHY = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
# A daemon in a session of its own, which outlives its parent and hides behind a second fork, and a stubborn child. The
# pipe ends when the daemon is what it will be: until then it bears its parent's name.
WITH_DAEMONS = """
import os, signal, time
ends, begins = os.pipe()
if (between := os.fork()) == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sleep", ["daemon", "600"])
    os._exit(0)
os.close(begins)
os.read(ends, 1)
os.waitpid(between, 0)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("Sluice is ready: http://127.0.0.1", flush=True)
    while True:
        time.sleep(600)
time.sleep(600)
"""


def make_spec(program: str, port: int, ready_line: str | None = None) -> ServerSpec:
    return ServerSpec(name="toy", command=(sys.executable, "-c", program, str(port)), port=port, ready_line=ready_line)


def test_a_server_is_ready_when_its_health_answers_and_gone_afterwards(tmp_path: Path) -> None:
    with Server(make_spec(HEALTHY, free_port()), tmp_path) as server:
        assert server.wait_until_ready(30.0) >= 0.0
        processes = server.processes()
    assert processes
    assert not any(process.is_running() for process in processes)


def test_daemons_and_stubborn_children_are_found_and_ended(tmp_path: Path) -> None:
    with Server(make_spec(WITH_DAEMONS, free_port(), "Sluice is ready: "), tmp_path, terminate_s=0.2) as server:
        server.wait_until_ready(30.0)
        processes = server.processes()
        titles = [" ".join(process.cmdline()) for process in processes]
        assert len(processes) == 3
        assert "daemon 600" in titles
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    with (
        Server(make_spec(HEALTHY, free_port()), tmp_path) as server,
        psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander,
    ):
        server.wait_until_ready(30.0)
        server.stop()
        assert bystander.is_running()
        bystander.kill()


def test_a_server_that_dies_shows_its_last_words(tmp_path: Path) -> None:
    dying = "import sys; print('no such model: elephant'); sys.exit(3)"
    with (
        Server(make_spec(dying, free_port()), tmp_path) as server,
        pytest.raises(ServerFailed, match="toy ended with status 3\n(.*\n)*  no such model: elephant"),
    ):
        server.wait_until_ready(30.0)


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    with (
        Server(make_spec("import time; time.sleep(600)", free_port(), "never printed"), tmp_path) as server,
        pytest.raises(ServerFailed, match="toy is not ready after 0.1 s"),
    ):
        server.wait_until_ready(0.1)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        port = int(holder.getsockname()[1])
        with pytest.raises(ServerFailed, match=f"port {port} for toy: Address already in use"):
            Server(make_spec(HEALTHY, port), tmp_path).__enter__()


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    spec = ServerSpec(name="toy", command=("/nowhere/sluice",), port=free_port())
    with pytest.raises(ServerFailed, match="cannot start toy: /nowhere/sluice: No such file"):
        Server(spec, tmp_path).__enter__()


def test_an_interrupt_while_servers_are_stopped_does_not_leave_them(tmp_path: Path) -> None:
    """The server's end interrupts this very process."""
    interrupting = f"""
import os, signal, sys, time
def leave(*_):
    os.kill({os.getpid()}, signal.SIGINT)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
time.sleep(600)
"""
    before = signal.getsignal(signal.SIGINT)
    with Server(make_spec(interrupting, free_port(), "ready"), tmp_path) as server:
        server.wait_until_ready(30.0)
        processes = server.processes()
    assert not any(process.is_running() for process in processes)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("build", "gpus", "more"), [("0.32.0+cpu", 0.0, ()), ("0.32.0", 1.0, ("--gpu-memory-utilization=0.45",))]
)
def test_engines_get_what_the_build_of_vllm_needs(
    build: str, gpus: float, more: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_build(tmp_path, build)
    monkeypatch.syspath_prepend(tmp_path)
    assert shared_arguments(["--seed=1"]) == (*ENGINE_ARGUMENTS, *more, "--seed=1")
    assert gpus_of_an_engine(None) == gpus
    assert gpus_of_an_engine(0.5) == 0.5
    assert vllm_is_for_gpus() is not vllm_is_for_cpus()  # what the servers themselves go by
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")
    assert gpus_of_an_engine(None) == 0.0
    assert vllm_is_for_gpus() is not vllm_is_for_cpus()


def test_where_no_distribution_is_named_vllm_it_is_the_cpu_build() -> None:
    assert shared_arguments([]) == ENGINE_ARGUMENTS
    assert vllm_is_for_gpus() is not vllm_is_for_cpus()


def test_an_inherited_cache_size_does_not_override_the_engine_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    monkeypatch.setenv("HF_HOME", "/models")
    environment = server_environment("mark")
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert environment["HF_HOME"] == "/models"


def test_what_engines_publish_reaches_a_router_though_both_only_connect() -> None:
    ports, context = (free_port(), free_port()), zmq.Context.instance()
    forward_events(*ports)
    (_, told) = publishing(ports[0])
    with context.socket(zmq.PUB) as engine, context.socket(zmq.SUB) as router:
        engine.connect(json.loads(told)["endpoint"])
        (source,) = [each for each in by_kv_events("m", 32, {"http://e": ports[1]}) if "source" in each]
        router.connect(source.removeprefix("--kv-event-source=http://e="))
        router.subscribe("")
        deadline_s = time.monotonic() + 30.0
        while not router.poll(50):  # a subscription takes a while to arrive, and what was said before is gone
            assert time.monotonic() < deadline_s
            engine.send(b"stored")
        assert router.recv() == b"stored"
