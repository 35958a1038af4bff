"""Replicas that come and go: failures, and scaling by predicted work as it serves (`policies.router.autoscale`).

As Ray Serve does, it keeps between min_replicas and max_replicas, and waits until more or fewer were wanted for a while
without a break. A wanted replica joins start_s later; one too many takes nothing more and ends what it holds. It costs
from the moment it is wanted until it holds nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from policies.checks import require_at_least, require_order, require_positive
from policies.router.autoscale import ReplicasForWork, ReplicasForWorkConfig
from policies.router.promised_scale import PromisedState, ReplicasForPromises, ReplicasForPromisesConfig
from simulator.core import Event, Kind
from simulator.engine import Engine
from simulator.router import Router
from simulator.scale_need import ScaleNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A replica dies at ``at_s`` and is replaced ``replaced_after_s`` later, or never when None."""

    replica: int
    at_s: float
    replaced_after_s: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "replica", "at_s", "replaced_after_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """How many replicas there should be.

    Attributes:
        slot_use, max_queue_s: what is enough, as of `ReplicasForWorkConfig`.
        most_ratio: what is enough, as of `ReplicasForPromisesConfig`, in the place of both; None goes by work.
        interval_s: between two looks.
        upscale_delay_s, downscale_delay_s: how long more, or fewer, must be wanted.
        start_s: until a new replica takes requests (loading the model).

    Raises:
        ConfigError: a value is out of bounds.
    """

    min_replicas: int = 1
    max_replicas: int = 8
    slot_use: float = 0.8
    max_queue_s: float = 5.0
    most_ratio: float | None = None
    interval_s: float = 1.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    start_s: float = 60.0

    def __post_init__(self) -> None:
        require_order(self, "min_replicas", "max_replicas")
        require_positive(self, "interval_s")
        require_at_least(0, self, "upscale_delay_s", "downscale_delay_s", "start_s")
        self.by_work()  # refuses what it cannot take
        self.by_promises()

    def by_promises(self) -> ReplicasForPromises | None:
        if self.most_ratio is None:
            return None
        return ReplicasForPromises(
            ReplicasForPromisesConfig(most_ratio=self.most_ratio, min_replicas=self.min_replicas)
        )

    def by_work(self) -> ReplicasForWork:
        return ReplicasForWork(
            ReplicasForWorkConfig(slot_use=self.slot_use, max_queue_s=self.max_queue_s, min_replicas=self.min_replicas)
        )


class Fleet:
    """Starts, loses and retires the replicas behind a router.

    Attributes:
        engines: every engine there ever was.
    """

    def __init__(
        self,
        router: Router,
        new_engine: Callable[[str], Engine],
        busy: Callable[[], bool],
        autoscale: AutoscaleConfig | None = None,
    ) -> None:
        self.engines: list[Engine] = []
        self._router, self._new_engine, self._busy, self._autoscale = router, new_engine, busy, autoscale
        self._joined_s: dict[str, float] = {}
        self._reserved: dict[str, frozenset[str] | None] = {}
        self._starting = 0
        self._ordered_s: list[float] = []
        self._draining: dict[str, float] = {}  # since when each was there
        self._replica_s = 0.0
        self._by_work = autoscale.by_work() if autoscale else None
        self._by_promises = autoscale.by_promises() if autoscale else None
        if self._by_promises is not None:
            router.need = ScaleNeed()
        self._more, self._since_s = 0, 0.0

    def start(self, replicas: int, slo_classes: tuple[frozenset[str] | None, ...] = ()) -> list[Event]:
        """The replicas that are there from the beginning."""
        events = []
        for index in range(replicas):
            events += self._join(0.0, slo_classes[index] if slo_classes else None)
        if self._autoscale is not None:
            events.append(Event(self._autoscale.interval_s, Kind.FLEET, self._scale))
        return events

    def _join(
        self, now_s: float, slo_classes: frozenset[str] | None = None, since_s: float | None = None
    ) -> list[Event]:
        engine = self._new_engine(f"replica-{len(self.engines)}")
        self.engines.append(engine)
        self._joined_s[engine.replica_id] = now_s if since_s is None else since_s
        self._reserved[engine.replica_id] = slo_classes
        return self._router.join(engine, now_s, slo_classes)

    def failure(self, failure: Failure) -> Event:
        return Event(failure.at_s, Kind.FLEET, partial(self._fail, failure))

    def _fail(self, failure: Failure, now_s: float) -> Iterable[Event]:
        replica_id = f"replica-{failure.replica}"
        if replica_id not in self._joined_s:
            return []
        self._count(replica_id, now_s)
        events = self._router.lose(replica_id, now_s)
        if failure.replaced_after_s is not None:
            events.append(self._start_later(now_s + failure.replaced_after_s, self._reserved[replica_id]))
        return events

    def _start_later(self, at_s: float, slo_classes: frozenset[str] | None = None) -> Event:
        self._starting += 1
        return Event(at_s, Kind.FLEET, partial(self._started, slo_classes, None))

    def _count(self, replica_id: str, now_s: float) -> None:
        self._replica_s += now_s - self._joined_s.pop(replica_id)

    def replica_seconds(self, now_s: float) -> float:
        """What the replicas cost up to now."""
        return self._replica_s + sum(
            now_s - since_s for since_s in (*self._joined_s.values(), *self._draining.values(), *self._ordered_s)
        )

    def _scale(self, now_s: float) -> Iterable[Event]:
        config = self._autoscale
        assert config is not None
        events = self._end_drains(now_s)
        if not self._busy():
            return events
        wanted = min(config.max_replicas, self._choose(now_s))
        missing = wanted - len(self._joined_s) - self._starting
        events.append(Event(now_s + config.interval_s, Kind.FLEET, self._scale))
        if self._has_stood(missing, now_s):
            events += [self._order(now_s, config.start_s) for _ in range(missing)]
            retired = self._retire_beyond(wanted, now_s)
            if missing > 0 or retired:
                self._more = 0  # the next has to be wanted for as long again
        return events

    def _choose(self, now_s: float) -> int:
        state, need = self._router.state(), self._router.need
        if self._by_promises is None or need is None:
            assert self._by_work is not None
            return self._by_work.choose(state)
        return self._by_promises.choose(
            PromisedState(
                now_s=now_s,
                replicas=state.replicas,
                starting=self._starting,
                arrived_s=need.arrived_s,
                waiting_s=state.waiting_s,
                ratio=need.ratios.worst(now_s),
            )
        )

    def _order(self, now_s: float, start_s: float) -> Event:
        """A replica that costs from now on."""
        self._starting += 1
        self._ordered_s.append(now_s)
        return Event(now_s + start_s, Kind.FLEET, partial(self._started, None, now_s))

    def _end_drains(self, now_s: float) -> list[Event]:
        """Of those that hold nothing any more, as far as a look can tell."""
        events = []
        for replica_id in [each for each in self._draining if not self._router.holds(each)]:
            self._replica_s += now_s - self._draining.pop(replica_id)
            events += self._router.lose(replica_id, now_s)
        return events

    def _has_stood(self, missing: int, now_s: float) -> bool:
        """Whether more, or fewer, have been wanted for long enough."""
        assert self._autoscale is not None
        more = (missing > 0) - (missing < 0)
        if more != self._more:
            self._more, self._since_s = more, now_s
        delay_s = self._autoscale.upscale_delay_s if more > 0 else self._autoscale.downscale_delay_s
        return now_s - self._since_s >= delay_s

    def _started(self, slo_classes: frozenset[str] | None, ordered_s: float | None, now_s: float) -> Iterable[Event]:
        self._starting -= 1
        if ordered_s is not None:
            self._ordered_s.remove(ordered_s)
        return self._join(now_s, slo_classes, ordered_s)

    def _retire_beyond(self, wanted: int, now_s: float) -> int:
        """The newest; never one for another that only starts. Returns how many went."""
        spare = max(0, len(self._joined_s) - wanted)
        for replica_id in list(self._joined_s)[len(self._joined_s) - spare :]:
            self._draining[replica_id] = self._joined_s.pop(replica_id)
            self._router.leave(replica_id)
        return spare
