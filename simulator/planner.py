"""What to buy and what to switch on: tries systems, replicas and engines at each load, the cheapest first, and takes
every feature out once.

Each point is a simulation of its own, so points run in parallel and the answer does not depend on how many cores do.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Self

from policies.checks import require_probability
from policies.errors import ConfigError
from policies.router.prefill_decode import PrefillDecodeConfig
from simulator.cluster import ClusterConfig, Run, run
from simulator.disaggregated import PoolsConfig, planned_prefill_replicas, run_disaggregated
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.presets import FEATURES, TIER, system, without
from simulator.report import Target, summary
from simulator.workload import Workload

# What a plan may try: whole systems by name, and Sluice with some of its replicas for prefill alone.
PLANNED = ("stock", "sluice", "split")

Change = dict[str, float | None]
"""Relative, by the name of what changes; None where there is nothing to compare."""


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
        everything: whether what costs more than the answer is tried too.
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
    everything: bool = False
    split: PrefillDecodeConfig = field(default_factory=PrefillDecodeConfig)

    def __post_init__(self) -> None:
        require_probability(self, "attainment")
        if not (self.profiles and self.replicas and self.systems and self.loads and self.targets):
            raise ConfigError("a plan needs engines, replicas, systems, loads and targets")
        if min(self.replicas) < 1 or not all(0 < load < math.inf for load in self.loads):
            raise ConfigError(f"replicas and loads must be positive, got {self.replicas} and {self.loads}")
        if not all(0 <= price < math.inf for price in self.prices.values()):
            raise ConfigError(f"prices must be at least 0 and finite, got {dict(self.prices)}")

    def points(self, load: float) -> list[Point]:
        """The cheapest first; of equal cost the fewest replicas, which are simulated soonest."""
        points = [
            Point(engine=engine, system=name, replicas=count, load=load)
            for engine in self.profiles
            for count in sorted(set(self.replicas))
            for name in self.systems
            if name != "split" or count > 1
        ]
        return sorted(points, key=lambda point: (self.cost(point), point.replicas))

    def cost(self, point: Point) -> float:
        """While all of its replicas are there."""
        return self.prices.get(point.engine, 1.0) * point.replicas

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


class Trials:
    """Simulations of points of one plan, as many at once as there are processes; the `with` block ends them."""

    def __init__(self, config: PlanConfig, workload: Workload, processes: int) -> None:
        """Args:
            processes: 1 runs them here.

        Raises:
            ConfigError: there are none.
        """
        if processes < 1:
            raise ConfigError(f"processes must be at least 1, got {processes}")
        self._config, self._workload, self._processes = config, workload, processes
        self._pool = ProcessPoolExecutor(max_workers=processes) if processes > 1 else None
        self._tried: dict[Point, Tried] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def each(self, points: Iterable[Point]) -> Iterator[Tried]:
        """In their order, each as soon as it and those before it are known. What was tried before is not run again."""
        todo, ahead = iter(points), deque[Callable[[], Tried]]()
        while True:
            ahead.extend(self._started(point) for point in islice(todo, self._processes - len(ahead)))
            if not ahead:
                return
            tried = ahead.popleft()()
            self._tried[tried.point] = tried
            yield tried

    def _started(self, point: Point) -> Callable[[], Tried]:
        """Returns what waits for its end."""
        if point in self._tried:
            return partial(self._tried.__getitem__, point)
        if self._pool is None:
            return partial(_try, self._config, self._workload, point)
        return self._pool.submit(_try, self._config, self._workload, point).result

    def until_answered(self, load: float) -> Iterator[Tried]:
        """The cheapest first, up to the cost of the first that is good enough, unless everything is to be tried."""
        points, best = self._config.points(load), math.inf
        results = self.each(points)
        for point in points:
            if self._config.cost(point) > best and not self._config.everything:
                return
            tried = next(results)
            if tried.attainment >= self._config.attainment:
                best = min(best, self._config.cost(point))
            yield tried


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


def ablations(point: Point, *, has_tier: bool = False) -> list[Point]:
    """Sluice at that point, whole and with one feature less each, and stock.

    Args:
        has_tier: of its engine; then without that as well.
    """
    whole = Point(engine=point.engine, system="sluice", replicas=point.replicas, load=point.load)
    less = [
        Point(engine=point.engine, system="sluice", replicas=point.replicas, load=point.load, without=feature)
        for feature in (*FEATURES, *([TIER] if has_tier else ()))
    ]
    stock = Point(engine=point.engine, system="stock", replicas=point.replicas, load=point.load)
    return [whole, *less, stock]


def contribution(whole: Tried, less: Tried) -> Change:
    """What one of `ablations` lacks adds to the whole: relative changes against it, 0 where that adds nothing."""

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
