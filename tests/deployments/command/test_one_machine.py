"""Where `sluice serve` listens, for how many, and on which cores: the address before anything starts, HAProxy through
its wrapper, and everything but the engines beside them."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from deployments.app import ROUTER_QUEUE, _engine_deployment, _groups, _router_deployment
from deployments.command import one_machine
from deployments.command.claims import check_address, fresh_run_dir
from deployments.command.cores import VLLM_TITLE, engines_undisturbed
from deployments.command.one_machine import _check_resources, _wait_until_healthy, end, running
from deployments.command.stages import Stages
from deployments.config.application import AppConfig
from deployments.config.router import RouterSection
from deployments.process import ports
from deployments.process.environment import (
    MAX_CONNECTIONS,
    MOST_HAPROXY_THREADS,
    START_S,
    connections_within,
    cores_beside_engines,
    haproxy_threads,
    one_machine_env,
    serve_env,
)
from deployments.process.ports import address, free_port, free_port_block
from deployments.process.vllm_env import CORES_ENV, cpu_dtype, take_all_cores
from policies.errors import ApplicationStartError
from tests.http_server import answering
from tests.integration.application import REPOSITORY
from tests.waiting import wait_until

DRAWER = """
import sys
from deployments.process.ports import free_port_block
print(free_port_block(3, range(*map(int, sys.argv[1:]))), flush=True)
sys.stdin.read()
"""
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


# Takes the folder of a port, leaves a process of its own behind, prints the pid of that, and waits to be killed.
HOLDER = """
import subprocess, sys, time
from deployments.command.claims import fresh_run_dir
from policies.errors import ApplicationStartError
try:
    run_dir = fresh_run_dir(int(sys.argv[1]))
except ApplicationStartError as error:
    sys.exit(str(error))
(run_dir / "log").touch()
nowhere = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "300"], stdout=nowhere, stderr=nowhere).pid, flush=True)
time.sleep(300)
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


def test_nobody_is_given_the_chosen_ports_before_their_servers_come_up(tmp_path: Path) -> None:
    given_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    env = one_machine_env(tmp_path)
    ports = [int(value) for name, value in env.items() if name.endswith("_PORT")]
    assert len(ports) == len(set(ports)) == 6
    assert max(ports) < given_from and free_port() < given_from


def test_no_port_is_given_twice_before_its_server_comes_up() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == len(ports)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[deque[int]]:
    """The marks of this process, which keeps no others meanwhile."""
    made: deque[int] = deque()
    monkeypatch.setattr(ports, "_marks", made)
    yield made
    for mark in made:
        os.close(mark)


@pytest.fixture
def two_blocks(marks: deque[int]) -> range:
    """Room for two blocks of three ports and their marks, where nobody else draws any."""
    first = free_port_block(8, range(32_000, 32_768))
    os.close(marks.pop())
    return range(first, first + 8)


def test_a_block_of_ports_leaves_out_the_public_one(two_blocks: range) -> None:
    mark, *block = two_blocks[:4]
    with pytest.raises(OSError, match=f"no 3 successive free ports between {mark} and {mark + 4}"):
        free_port_block(3, two_blocks[:4], without=block[1])
    assert free_port_block(3, two_blocks[:4], without=mark) == block[0]


def test_ports_that_another_process_was_given_are_its_own_until_it_ends(two_blocks: range) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRAWER, str(two_blocks.start), str(two_blocks.stop)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        mine = free_port_block(3, two_blocks)
        assert {mine, theirs} == {two_blocks[1], two_blocks[5]}
        with pytest.raises(OSError, match="no 3 successive"):
            free_port_block(3, two_blocks)
        other.communicate()
    assert free_port_block(3, two_blocks) == theirs


def test_a_process_keeps_a_bounded_number_of_marks(marks: deque[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_MOST_MARKS", 3)
    for _ in range(5):
        free_port()
    assert len(marks) == 3


def test_a_host_may_be_a_name_or_an_address_of_either_family() -> None:
    assert check_address("::1", free_port()) == "::1"
    assert check_address("127.0.0.1", free_port()) == "127.0.0.1"
    assert check_address("localhost", free_port()) in ("127.0.0.1", "::1")


def test_an_address_in_use_is_named_in_brackets() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ApplicationStartError, match=rf"cannot serve on \[::1\]:{port}: .*--port"):
            check_address("::1", port)


@contextmanager
def holder(port: int) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process | None]]:
    """A process that takes the port's folder, and what it has started; None where it was refused."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    child = psutil.Process(int(line)) if line else None
    try:
        yield process, child
    finally:
        process.kill()
        process.communicate()
        if child is not None:
            child.kill()


@pytest.mark.slow
def test_a_second_start_leaves_the_folder_of_the_first_alone_until_that_is_killed() -> None:
    port = free_port()
    run_dir = Path(tempfile.gettempdir(), f"sluice-{os.getuid():x}-{port}")
    try:
        with holder(port) as (first, left_behind):
            assert left_behind is not None
            with holder(port) as (second, nothing):
                assert nothing is None and "running there already" in second.communicate()[1]
            assert (run_dir / "log").exists()
            first.kill()
            first.wait()
            assert left_behind.is_running()
            with holder(port) as (_, started):
                assert started is not None
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.with_name(f"{run_dir.name}.lock").unlink(missing_ok=True)


def test_a_lock_that_leads_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    port = free_port()
    lock = Path(tempfile.gettempdir(), f"sluice-{os.getuid():x}-{port}.lock")
    lock.symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(ApplicationStartError, match=rf"{lock}: .*TMPDIR"):
            fresh_run_dir(port)
        assert not (tmp_path / "elsewhere").exists()
    finally:
        lock.unlink()


@pytest.mark.parametrize("host", ["fe80::nonsense", "192.0.2.1"])
def test_a_host_that_is_not_here_is_refused_before_anything_starts(host: str) -> None:
    with pytest.raises(ApplicationStartError, match="cannot serve on"):
        check_address(host, 8000)


@pytest.mark.timeout(120)
def test_a_health_that_never_becomes_200_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_machine, "START_S", 0.1)
    with (
        answering(lambda _: (204, b"")) as url,
        pytest.raises(ApplicationStartError, match="status 204"),
    ):
        _wait_until_healthy(url)


def test_a_ray_that_does_not_start_is_told_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ended(**_: object) -> None:
        raise Exception("The current node timed out during startup")  # as Ray does

    monkeypatch.setattr(ray, "init", ended)
    application = running(AppConfig.model_validate({"model": "m"}), tmp_path, "127.0.0.1", 8000, Stages())
    with pytest.raises(ApplicationStartError, match="timed out during startup\n.*folder of logs"), application:
        pass


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


def test_what_does_not_end_by_itself_is_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(one_machine, "ENDING_S", 0.5)
    with psutil.Popen(["sleep", "300"]) as stubborn, psutil.Popen(["true"]) as ended:
        wait_until(lambda: ended.status() == psutil.STATUS_ZOMBIE, 60, "one has ended, and nobody has asked about it")
        end([ended, stubborn])
        assert stubborn.status() == psutil.STATUS_ZOMBIE
    assert not capsys.readouterr().err


def test_more_than_the_machine_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "memory": 1e9})
    _check_resources(AppConfig.model_validate({"model": "m", "engine": {"num_cpus": 3}}))
    for engine, why in (
        ({"num_cpus": 3.5}, "4.5 of CPU, this machine has 4:"),
        ({"resources": {"rack": 1}}, "1 of rack, this machine has 0:"),
        ({"num_gpus": 1, "replicas": 2}, "2 of GPU, this machine has 0:"),
    ):
        with pytest.raises(ApplicationStartError, match=why):
            _check_resources(AppConfig.model_validate({"model": "m", "engine": engine}))


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


def test_a_redeploy_stops_no_router_before_its_successor_serves() -> None:
    """Ray Serve's default stops first, and a router with a stream of half an hour takes no new requests meanwhile."""
    config = _router_deployment(AppConfig(model="m"))._deployment_config
    assert config.max_surge_percent == 100


def test_routers_and_engines_that_are_silent_among_others_are_not_ended_for_minutes() -> None:
    """Ray Serve does it after three times in a row, for the last router as well."""
    config = AppConfig(model="m")
    for deployment in (_router_deployment(config), _engine_deployment(config, 0, next(_groups(config)))):
        assert deployment._deployment_config.health_check_timeout_s * 3 >= 1_800


def test_a_router_that_is_full_says_when_to_come_back() -> None:
    deployment = _router_deployment(AppConfig(model="m", router=RouterSection(max_ongoing_requests=7)))
    assert (deployment.max_ongoing_requests, deployment.max_queued_requests) == (7, ROUTER_QUEUE)
    answer = deployment.backpressure_config
    assert answer.status_code == 503
    assert answer.retry_after_s is not None and answer.retry_after_s > 0


@pytest.mark.parametrize(("flags", "dtype"), [("avx2 avx512f avx512_bf16", "bfloat16"), ("avx2", "float32")])
def test_the_demo_computes_in_what_the_processor_is_quick_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: str
) -> None:
    processor = tmp_path / "cpuinfo"
    processor.write_text(f"flags : {flags}\n")
    monkeypatch.setattr("deployments.process.vllm_env._PROCESSOR", processor)
    assert cpu_dtype() == dtype


def test_each_engine_has_a_core_to_itself_where_that_leaves_as_many() -> None:
    assert cores_beside_engines({0, 1, 4, 5}, 1) == {1, 4, 5}
    assert cores_beside_engines({0, 1, 4, 5}, 2) == {4, 5}
    assert cores_beside_engines({0, 1, 4, 5}, 3) == {0, 1, 4, 5}
    assert cores_beside_engines({0, 1}, 2) == cores_beside_engines({0, 1}, 3) == {0, 1}
    assert cores_beside_engines({7}, 1) == {7}


def test_everything_but_the_engine_keeps_off_a_core_while_the_application_serves() -> None:
    cores = os.sched_getaffinity(0)
    with (
        subprocess.Popen([f"{VLLM_TITLE}EngineCore", "300"], executable="/bin/sleep") as engine,
        subprocess.Popen(["sleep", "300"]) as other,
    ):
        everything = (os.getpid(), other.pid, engine.pid)
        try:
            with engines_undisturbed(AppConfig(model="m")):
                beside = cores_beside_engines(cores, 1)
                assert [os.sched_getaffinity(pid) for pid in everything] == [beside, beside, cores]
            assert [os.sched_getaffinity(pid) for pid in everything] == [cores] * 3
        finally:
            engine.kill()
            other.kill()


def test_an_engine_that_comes_later_takes_all_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv(CORES_ENV, one_machine_env(tmp_path)[CORES_ENV])

    def cores_of_an_engine(binding: str) -> set[int]:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
        os.sched_setaffinity(0, {max(cores)})  # of this thread
        take_all_cores()
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(cores_of_an_engine, "nobind").result(30) == cores
        assert thread.submit(cores_of_an_engine, "auto").result(30) == {max(cores)}


def test_with_engines_on_gpus_or_in_the_replica_itself_everything_may_run_anywhere() -> None:
    cores = os.sched_getaffinity(0)
    for engine in ({"num_gpus": 1}, {"kind": "transformers"}):
        with engines_undisturbed(AppConfig.model_validate({"model": "m", "engine": engine})):
            assert os.sched_getaffinity(0) == cores
