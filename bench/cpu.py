"""CPU seconds of a server by the role of its processes.

On a machine whose cores are shared, CPU time per token is a steadier figure than wall-clock time. The engine core's
share is the model's own work and the same on both sides; all the rest is what serving costs, the "front end".
"""

import enum
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import psutil


class Role(enum.StrEnum):
    ENGINE_CORE = "engine core"
    API_SERVER = "vLLM API server"
    ROUTER = "router"
    VLLM_ROUTER = "vllm-router"
    ENGINE_RELAY = "engine relay"
    PREDICTOR = "predictor"
    HAPROXY = "HAProxy"
    REDIS = "Redis"
    RAY = "Ray"
    OTHER = "other"


# Matched against the command line, which vLLM and Ray replace by a title; the first that is found decides.
ROLE_PATTERNS = (
    (re.compile(r"^VLLM::(EngineCore|Worker)"), Role.ENGINE_CORE),
    (re.compile(r"^ray::ServeReplica:\S*router", re.IGNORECASE), Role.ROUTER),
    (re.compile(r"^ray::ServeReplica:\S*engine", re.IGNORECASE), Role.ENGINE_RELAY),
    (re.compile(r"^ray::ServeReplica:\S*predictor", re.IGNORECASE), Role.PREDICTOR),
    (re.compile(r"^(\S*python\S* )?\S*vllm-router\b|^vllm::router", re.IGNORECASE), Role.VLLM_ROUTER),
    (re.compile(r"^\S*haproxy\b"), Role.HAPROXY),
    (re.compile(r"^\S*(redis|valkey)-server\b|^ray::RedisServer", re.IGNORECASE), Role.REDIS),
    (re.compile(r"^ray::|/ray/|\bray-dashboard"), Role.RAY),
    (re.compile(r"^VLLM::APIServer|\bvllm\.entrypoints\.cli\.main serve\b"), Role.API_SERVER),
)


def role_of(command_line: str) -> Role:
    return next((role for pattern, role in ROLE_PATTERNS if pattern.search(command_line)), Role.OTHER)


CpuTimes = Mapping[psutil.Process, tuple[Role, float]]


def cpu_times(processes: Iterable[psutil.Process]) -> CpuTimes:
    """Role and CPU seconds (user and system) so far of every process that still lives."""
    times: dict[psutil.Process, tuple[Role, float]] = {}
    for process in processes:
        with suppress(psutil.Error), process.oneshot():
            used = process.cpu_times()
            times[process] = (role_of(" ".join(process.cmdline())), used.user + used.system)
    return times


def cpu_s_by_role(before: CpuTimes, after: CpuTimes) -> dict[Role, float]:
    """What each role used in between. A process that has ended meanwhile is lost; a new one counts in full."""
    used_s: defaultdict[Role, float] = defaultdict(float)
    for process, (role, now_s) in after.items():
        _, earlier_s = before.get(process, (role, 0.0))
        used_s[role] += now_s - earlier_s
    return dict(used_s)


def busy_cpu_s() -> float:
    """CPU seconds that the whole machine has worked so far, with those that its host took away from it."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


def front_end_cpu_s(by_role: Mapping[Role, float]) -> float:
    return sum(used_s for role, used_s in by_role.items() if role is not Role.ENGINE_CORE)
