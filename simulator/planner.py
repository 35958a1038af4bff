"""What to buy and what to switch on: sweeps systems, replicas, engines and load, and takes every feature out once.

Each point is a simulation of its own, so points run in parallel and the answer does not depend on how many cores do.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from policies.checks import require_probability
from policies.errors import ConfigError
from policies.router.prefill_decode import PrefillDecodeConfig
from simulator.cluster import ClusterConfig, Run, run
from simulator.disaggregated import PoolsConfig, planned_prefill_replicas, run_disaggregated
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.presets import FEATURES, SYSTEMS, system, without
from simulator.report import Target, summary
from simulator.workload import Workload

# What a plan may try: whole systems by name, and Sluice with some of its replicas for prefill alone.
PLANNED = (*SYSTEMS, "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration to try; ``without`` names the feature taken out, if one is."""

    engine: str
    system: str
    replicas: int
    load: float
    without: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A point and what came of it.

    Attributes:
        attainment: of the worst class: share of its requests that met the target.
        in_time: of all classes together.
        goodput_per_s, goodput_per_gpu_s: requests in time of all classes together; a GPU counts while its replica
            is there.
        cost: replicas times the engine's price, averaged over the run where replicas came and went.
    """

    point: Point
    attainment: float
    in_time: float
    goodput_per_s: float
    goodput_per_gpu_s: float
    cost: float
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What to try, and when it is good enough.

    Attributes:
        profiles: engines by name, with their sizes; prices per replica and hour, 1 where not named.
        replicas, systems, loads: what to combine; a load multiplies the workload's arrival rate.
        told: whether Sluice is told the targets, or only judged by them as the others are.
        attainment: share of every class's requests that must meet their target.
        split: how the system "split" decides and moves caches.

    Raises:
        ConfigError: nothing to try, or a value out of bounds.
    """

    profiles: Mapping[str, tuple[EngineProfile, EngineConfig]]
    prices: Mapping[str, float]
    targets: Mapping[str, Target]
    replicas: Sequence[int] = (1, 2, 4)
    systems: Sequence[str] = ("stock", "sluice")
    loads: Sequence[float] = (1.0,)
    told: bool = True
    attainment: float = 0.95
    split: PrefillDecodeConfig = field(default_factory=PrefillDecodeConfig)

    def __post_init__(self) -> None:
        require_probability(self, "attainment")
        if not (self.profiles and self.replicas and self.systems and self.loads and self.targets):
            raise ConfigError("a plan needs engines, replicas, systems, loads and targets")
        if min(self.replicas) < 1 or min(self.loads) <= 0:
            raise ConfigError(f"replicas and loads must be positive, got {self.replicas} and {self.loads}")

    def points(self) -> list[Point]:
        return [
            Point(engine=engine, system=name, replicas=count, load=load)
            for load in self.loads
            for engine in self.profiles
            for count in sorted(set(self.replicas))
            for name in self.systems
            if name != "split" or count > 1
        ]

    def pools(self, prefill_replicas: int) -> PoolsConfig:
        targets = {name: target.tpot_s for name, target in self.targets.items()}
        return PoolsConfig(prefill_replicas=prefill_replicas, split=self.split, itl_targets_s=targets)

    def cluster(self, point: Point) -> ClusterConfig:
        profile, engine = self.profiles[point.engine]
        name = "sluice" if point.system == "split" else point.system
        config = system(name, profile, engine, point.replicas, self.targets if self.told else None)
        return without(point.without, config) if point.without else config


def workers(jobs: int) -> int:
    return max(1, min(jobs, os.cpu_count() or 1))


def try_all(
    config: PlanConfig, points: Sequence[Point], workload: Workload, on_done: Callable[[], object], processes: int
) -> list[Tried]:
    """Every point, in order.

    Args:
        on_done: called when one is finished.
        processes: how many at once; 1 runs them here.
    """
    if processes < 1:
        raise ConfigError(f"processes must be at least 1, got {processes}")
    one = partial(_try, config, workload)
    if processes == 1:
        return [_noted(one(point), on_done) for point in points]
    with ProcessPoolExecutor(max_workers=processes) as pool:
        return [_noted(tried, on_done) for tried in pool.map(one, points)]


def _noted(tried: Tried, on_done: Callable[[], object]) -> Tried:
    on_done()
    return tried


def _try(config: PlanConfig, workload: Workload, point: Point) -> Tried:
    numbers = summary(_run(config, workload.faster(point.load), point), config.targets)
    shares = [one["attainment"] for one in numbers["classes"].values() if one["attainment"] is not None]
    goodput_per_s = numbers["in_time"]["goodput_per_s"] or 0.0
    replicas = numbers["replica_s"] / numbers["makespan_s"] if numbers["makespan_s"] else 0.0
    gpus = replicas * config.profiles[point.engine][0].gpus
    return Tried(
        point=point,
        attainment=min(shares),
        in_time=numbers["in_time"]["attainment"],
        goodput_per_s=goodput_per_s,
        goodput_per_gpu_s=goodput_per_s / gpus if gpus else 0.0,
        cost=config.prices.get(point.engine, 1.0) * replicas,
        numbers=numbers,
    )


def _run(config: PlanConfig, workload: Workload, point: Point) -> Run:
    cluster = config.cluster(point)
    reading = planned_prefill_replicas(workload, cluster.times, point.replicas) if point.system == "split" else 0
    if not reading:
        return run(cluster, workload)
    return run_disaggregated(replace(cluster, replicas=point.replicas - reading), config.pools(reading), workload)


def cheapest(tried: Iterable[Tried], attainment: float, load: float) -> Tried | None:
    """The least cost that meets every class's target at this load; of equal ones the highest attainment and goodput."""
    good = [each for each in tried if each.point.load == load and each.attainment >= attainment]
    return min(good, key=lambda each: (round(each.cost, 6), -each.attainment, -each.goodput_per_s), default=None)


def most_in_time(tried: Iterable[Tried], load: float) -> Tried:
    """The most requests in time per cost at this load; of equal ones the one with the larger share in time."""
    there = [each for each in tried if each.point.load == load]
    return max(there, key=lambda each: (each.goodput_per_s / each.cost if each.cost else 0.0, each.in_time))


def ablations(point: Point) -> list[Point]:
    """Sluice at that point, whole and with one feature less each, and stock."""
    whole = Point(engine=point.engine, system="sluice", replicas=point.replicas, load=point.load)
    less = [
        Point(engine=point.engine, system="sluice", replicas=point.replicas, load=point.load, without=feature)
        for feature in FEATURES
    ]
    stock = Point(engine=point.engine, system="stock", replicas=point.replicas, load=point.load)
    return [whole, *less, stock]


def contributions(tried: Sequence[Tried]) -> dict[str, dict[str, float | None]]:
    """What each feature adds to the whole: relative change against the system without it, 0 when it adds nothing.

    Args:
        tried: what came of `ablations`, in their order.
    """
    whole = tried[0]
    return {each.point.without or "everything (against stock)": _change(whole, each) for each in tried[1:]}


def _change(whole: Tried, less: Tried) -> dict[str, float | None]:
    def ratio(value: float | None, other: float | None) -> float | None:
        return value / other - 1.0 if value is not None and other else None

    ours, theirs = whole.numbers, less.numbers
    return {
        "goodput": ratio(whole.goodput_per_s, less.goodput_per_s),
        "throughput": ratio(ours["output_tokens_per_s"], theirs["output_tokens_per_s"]),
        "ttft_mean": ratio(ours["ttft_s"]["mean"], theirs["ttft_s"]["mean"]),
        "ttft_p99": ratio(ours["ttft_s"]["p99"], theirs["ttft_s"]["p99"]),
        "latency_mean": ratio(ours["latency_s"]["mean"], theirs["latency_s"]["mean"]),
    }
