"""Puts a whole serving system together from names and numbers, runs a workload through it, and sums up.

Every decision is made by the objects of `policies`; what is built here is what the live system builds from its
configuration.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from policies.batches.in_flight import InFlightConfig
from policies.checks import require_at_least
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.gang.buckets import PromptBuckets
from policies.registry import Family, build_of
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.order import Order
from policies.router.placement import Placement
from policies.router.promise import Promise
from policies.types import BatchPolicy, StepTimes
from simulator.backlog import Backlog
from simulator.comparisons import PLACEMENTS
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine, EngineConfig, StepClock
from simulator.fleet import AutoscaleConfig, Failure, Fleet
from simulator.gang import GangCluster, GangTimes
from simulator.real_times import RealClock, RealTimes
from simulator.requests import Request
from simulator.router import Router, RouterConfig
from simulator.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A serving system.

    Attributes:
        times: what policies and router take a step to cost; engines too, unless ``clock`` is finer.
        real_times: how engines' steps differ from both, or None.
        batch, order: kinds of the registry, or ``package.module:Class``; ``*_settings`` their settings. Without an
            order requests go by what they are promised, as they do live by default.
        placement: a name in `simulator.comparisons.PLACEMENTS`; the default is the one that serves.
        bins: how lengths are binned, or None.
        promises: what each class is promised, "*" for every one not named.
        replica_classes: per replica the classes it is reserved for; empty reserves none.
        clients: closed loop: this many requests are kept in the system and arrival times do not count; None is open.
        batches: how many requests of a backlog are in the system.

    Raises:
        ConfigError: a value is out of bounds, or a policy is unknown, of another family or refuses its settings.
    """

    times: StepTimes
    clock: StepClock | None = None
    real_times: RealTimes | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    replicas: int = 1
    batch: str = "stock"
    batch_settings: Mapping[str, Any] = field(default_factory=dict)
    order: str | None = None
    order_settings: Mapping[str, Any] = field(default_factory=dict)
    placement: str = "soonest_first_token"
    router: RouterConfig = field(default_factory=RouterConfig)
    bins: MultiBinConfig | None = None
    promises: Mapping[str, Promise] = field(default_factory=dict)
    replica_classes: tuple[frozenset[str] | None, ...] = ()
    clients: int | None = None
    failures: tuple[Failure, ...] = ()
    autoscale: AutoscaleConfig | None = None
    batches: InFlightConfig = field(default_factory=InFlightConfig)

    def __post_init__(self) -> None:
        require_at_least(1, self, "replicas", "clients")
        self.batch_policy()
        self.order_policy()
        self.placement_policy()
        batches = self.router.batches
        if batches is not None and batches.batch_size > self.engine.slots:
            raise ConfigError(f"batches of {batches.batch_size} requests do not fit into {self.engine.slots} slots")
        if self.replica_classes and len(self.replica_classes) != self.replicas:
            raise ConfigError(f"replica_classes must name {self.replicas} replicas, got {len(self.replica_classes)}")

    def engine_clock(self, replica: int) -> StepClock:
        """Of one of its engines."""
        clock = self.clock or self.times
        return clock if self.real_times is None else RealClock(clock, self.real_times, seed=replica)

    def batch_policy(self) -> BatchPolicy:
        """A new policy for one engine."""
        policy: BatchPolicy = build_of(Family.BATCH, self.batch, self.batch_settings)
        return policy

    def order_policy(self) -> Order | None:
        if self.order is None:
            return None
        order: Order = build_of(Family.ORDER, self.order, self.order_settings)
        return order

    def placement_policy(self) -> Placement:
        """A new one for one router."""
        if self.placement not in PLACEMENTS:
            raise ConfigError(f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}")
        return PLACEMENTS[self.placement]()


@dataclass(slots=True, eq=False)
class Run:
    """A finished run: the requests with their histories, the engines with their totals.

    Attributes:
        requests: those that were served.
        refused: those that no engine's cache could hold, and those that an engine or the router had no room for.
        backlog: requests of batches that were begun, whether they ended before the last of the others or after.
    """

    requests: list[Request]
    refused: list[Request]
    engines: list[Engine]
    makespan_s: float
    replica_s: float
    events: int
    backlog: list[Request] = field(default_factory=list)


class Source:
    """Hands requests to the router: each at its time, or the next one whenever another ends."""

    def __init__(
        self, requests: list[Request], clients: int | None, arrive: Callable[[Request, float], Iterable[Event]]
    ) -> None:
        self._requests, self._clients, self._arrive = requests, clients, arrive
        self._next = 0
        self.ended = 0

    def start(self) -> list[Event]:
        if self._clients is None:
            return self._upcoming()
        return [Event(0.0, Kind.ARRIVAL, self._one) for _ in range(min(self._clients, len(self._requests)))]

    def _upcoming(self) -> list[Event]:
        if self._next >= len(self._requests):
            return []
        return [Event(self._requests[self._next].arrival_s, Kind.ARRIVAL, self._one)]

    def _one(self, now_s: float) -> Iterable[Event]:
        if self._next >= len(self._requests):
            return []
        request = self._requests[self._next]
        self._next += 1
        request.arrival_s = now_s
        events = list(self._arrive(request, now_s))
        return events + self._upcoming() if self._clients is None else events

    def on_ended(self, count: int, now_s: float) -> list[Event]:
        self.ended += count
        if self._clients is None:
            return []
        return [Event(now_s, Kind.ARRIVAL, self._one) for _ in range(count)]

    @property
    def busy(self) -> bool:
        return self.ended < len(self._requests)


def new_router(
    config: ClusterConfig,
    order: Order | None = None,
    on_refused: Callable[[Request, float], Iterable[Event]] = lambda request, now_s: (),
) -> Router:
    """``order`` in the place of the configured one."""
    return Router(
        config.router,
        order=order or config.order_policy(),
        placement=config.placement_policy(),
        step_times=config.times,
        bins=MultiBin(config.bins) if config.bins else None,
        on_refused=on_refused,
    )


def admitted(config: ClusterConfig, workload: Workload) -> tuple[list[Request], list[Request]]:
    """Fresh requests that fit into an engine's cache, and those that never could."""
    requests = workload.requests()
    for request in requests:
        promised = config.promises.get(request.slo_class or "*", config.promises.get("*"))
        if promised is not None:
            request.promise(promised)
    capacity = config.engine.capacity_tokens
    served = [r for r in requests if r.prompt_tokens + r.output_tokens <= capacity]
    refused = [r for r in requests if r.prompt_tokens + r.output_tokens > capacity]
    return served, refused


def end_s(served: Iterable[Request]) -> float:
    return max((r.finished_s for r in served if r.finished_s is not None), default=0.0)


def run(
    config: ClusterConfig,
    workload: Workload,
    on_progress: Callable[[int], object] | None = None,
    backlog: Workload | None = None,
) -> Run:
    """Serve the workload to its end. Requests too long for an engine's cache are refused, not served.

    Args:
        on_progress: told how many requests ended, now and then.
        backlog: requests of batches, which fill what the others leave; arrival times do not count.
    """
    fitting, refused = admitted(config, workload)
    offline = admitted(config, backlog)[0] if backlog else []
    config = replace(config, engine=config.engine.serving([*fitting, *offline]))

    def ended(count: int, now_s: float) -> list[Event]:
        if on_progress is not None:
            on_progress(count)
        return source.on_ended(count, now_s)

    def finished(now_s: float, engine: Engine, requests: list[Request]) -> Iterable[Event]:
        events = [*router.finished(now_s, engine, requests), *ended(of_batches.others(requests), now_s)]
        return [*events, *of_batches.ended(requests, now_s)]

    router = new_router(config, on_refused=lambda request, now_s: ended(1, now_s))
    source = Source(fitting, config.clients, router.arrive)

    replicas = count()
    fleet = Fleet(
        router,
        lambda replica_id: Engine(
            replica_id, config.engine, config.batch_policy(), config.engine_clock(next(replicas)), finished
        ),
        busy=lambda: source.busy,
        autoscale=config.autoscale,
    )
    loop = EventLoop()
    loop.add(fleet.start(config.replicas, config.replica_classes))
    loop.add(fleet.failure(failure) for failure in config.failures)
    loop.add(source.start())
    of_batches = Backlog(
        offline,
        config.batches,
        router,
        slots=lambda: router.state().slots,
        busy=lambda: source.busy,
    )
    loop.add(of_batches.start())
    loop.run()
    served = [request for request in fitting if not request.refused]
    refused += [request for request in fitting if request.refused]
    last_s = end_s(served)
    return Run(served, refused, fleet.engines, last_s, fleet.replica_seconds(last_s), loop.events, of_batches.begun)


@dataclass(slots=True, eq=False)
class GangRun:
    """A finished run of gang batches."""

    requests: list[Request]
    cluster: GangCluster
    makespan_s: float
    events: int

    @property
    def throughput(self) -> float:
        """Requests per second, from the first arrival to the end."""
        return len(self.requests) / self.makespan_s

    @property
    def mean_latency_s(self) -> float:
        return sum(r.finished_s - r.arrival_s for r in self.requests if r.finished_s is not None) / len(self.requests)


def run_gang(
    config: GangConfig,
    bins: MultiBinConfig,
    times: GangTimes,
    workload: Workload,
    replicas: int = 1,
    buckets: PromptBuckets | None = None,
    order: Order | None = None,
) -> GangRun:
    """Serve the workload in gang batches to its end, by buckets of prompt length and in an order if they are given."""
    requests = workload.requests()
    cluster = GangCluster(config, MultiBin(bins), times, replicas, buckets, order)

    def arrive(request: Request, now_s: float) -> list[Event]:
        events = cluster.arrive(request, now_s)
        return events + cluster.flush(now_s) if request is requests[-1] else events

    loop = EventLoop()
    loop.add(Source(requests, None, arrive).start())
    loop.run()
    return GangRun(requests, cluster, end_s(requests), loop.events)
