"""Two running servers measured in turn: A B, B A, A B ... at every concurrency.

Both stay up, one at a time is loaded. The two runs of a repeat send the same prompts and follow each other at once, so
their ratio is free of what changes slowly on a shared machine. No server gets a prompt twice, so that no prefix cache
helps: every repeat has new prompts, and so has every pairing, for all pairings share a baseline. What other programs
used meanwhile is kept beside each run, and what both servers use when idle is measured first: the idle one takes that
from the loaded one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import uvloop

from bench.cpu import Role, busy_cpu_s, cpu_s_by_role, cpu_times
from bench.load import LoadReport, error_lines, first_model, measure
from bench.servers import Server, ServerFailed
from bench.session import turns
from bench.workload import LoadConfig

WARM_UP_SEED = 10**9
# Distances of seeds: a pairing, a repeat, and within it the concurrency.
PAIRING_STRIDE, REPEAT_STRIDE = 10**6, 10**4
WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Loads and repeats of a pairing; `least_requests` lengthens the runs of few clients."""

    concurrency: tuple[int, ...] = (1, 16, 64)
    repeats: int = 4
    requests_per_client: int = 8
    least_requests: int = 24
    max_tokens: int = 128
    idle_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("repeats", "requests_per_client", "least_requests", "max_tokens", "idle_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"concurrency must be positive numbers, got {self.concurrency}")

    def requests(self, concurrency: int) -> int:
        return max(self.least_requests, self.requests_per_client * concurrency)

    @property
    def requests_per_pairing(self) -> int:
        return 2 * self.repeats * sum(self.requests(concurrency) for concurrency in self.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load run on one system, with the CPU that the system's roles and all other programs used meanwhile."""

    system: str
    concurrency: int
    repeat: int
    load: LoadReport
    cpu_s: Mapping[Role, float]
    other_programs_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """`idle_cpu_cores` is what each role of a system uses without any request, in cores."""

    baseline: str
    contender: str
    idle_cpu_cores: Mapping[str, Mapping[Role, float]]
    runs: tuple[Run, ...]

    def runs_of(self, system: str, concurrency: int) -> list[Run]:
        """In the order of the repeats."""
        return sorted(
            (run for run in self.runs if (run.system, run.concurrency) == (system, concurrency)),
            key=lambda run: run.repeat,
        )


def measure_pairing(
    baseline: Server,
    contender: Server,
    plan: Plan,
    on_stage: Callable[[str], object],
    on_request_end: Callable[[], object],
    number: int = 0,
) -> Pairing:
    """`number` tells pairings that share a server apart: each has prompts of its own.

    Raises: ServerFailed, ServerUnusable: a server has ended, or answers nothing.
    """
    servers = (baseline, contender)
    models = {server.spec.name: first_model(server.spec.url) for server in servers}
    on_stage("warming up")
    for server in servers:
        warm_up = _config(server, models, plan, max(plan.concurrency), WARM_UP_SEED + number, WARM_UP_TOKENS)
        _load(server, warm_up, lambda: None)
    on_stage("idle CPU")
    idle_cpu_cores = _idle_cpu_cores(servers, plan.idle_s)
    runs = []
    for repeat, concurrency in product(range(plan.repeats), plan.concurrency):
        for server in turns(servers, repeat):
            on_stage(f"repeat {repeat + 1}/{plan.repeats}, concurrency {concurrency}, {server.spec.name}")
            seed = number * PAIRING_STRIDE + repeat * REPEAT_STRIDE + concurrency
            config = _config(server, models, plan, concurrency, seed, plan.max_tokens)
            runs.append(_run(server, servers, config, repeat, on_request_end))
    return Pairing(
        baseline=baseline.spec.name, contender=contender.spec.name, idle_cpu_cores=idle_cpu_cores, runs=tuple(runs)
    )


def _config(
    server: Server, models: Mapping[str, str], plan: Plan, concurrency: int, seed: int, max_tokens: int
) -> LoadConfig:
    return LoadConfig(
        url=server.spec.url,
        model=models[server.spec.name],
        concurrency=concurrency,
        requests=plan.requests(concurrency),
        max_tokens=max_tokens,
        seed=seed,
    )


def _idle_cpu_cores(servers: Sequence[Server], idle_s: float) -> dict[str, dict[Role, float]]:
    before = {server: cpu_times(server.processes()) for server in servers}
    time.sleep(idle_s)
    return {
        server.spec.name: {
            role: used_s / idle_s for role, used_s in cpu_s_by_role(times, cpu_times(server.processes())).items()
        }
        for server, times in before.items()
    }


def _run(
    server: Server, servers: Sequence[Server], config: LoadConfig, repeat: int, on_request_end: Callable[[], object]
) -> Run:
    before = {each: cpu_times(each.processes()) for each in servers}
    busy_before_s = busy_cpu_s()
    load = _load(server, config, on_request_end)
    busy_s = busy_cpu_s() - busy_before_s
    used_s = {each: cpu_s_by_role(before[each], cpu_times(each.processes())) for each in servers}
    ours_s = load.client_cpu_s + sum(sum(by_role.values()) for by_role in used_s.values())
    return Run(
        system=server.spec.name,
        concurrency=config.concurrency,
        repeat=repeat,
        load=load,
        cpu_s=used_s[server],
        other_programs_cpu_s=max(0.0, busy_s - ours_s),
    )


def _load(server: Server, config: LoadConfig, on_request_end: Callable[[], object]) -> LoadReport:
    load = uvloop.run(measure(config, on_request_end))
    server.check_alive()
    if not load.answered:
        reasons = "\n".join(error_lines(load.errors))
        raise ServerFailed(f"{server.spec.name} answered none of {config.requests} requests\n{reasons}")
    return load
