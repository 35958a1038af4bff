"""Replicas that come and go: failures, and scaling by ongoing requests as Ray Serve does it.

    wanted = ceil(ongoing requests / target_ongoing), between min_replicas and max_replicas

A wanted replica joins start_s later; one too many takes nothing more and ends what it holds. Scaling down waits until
fewer were wanted for hold_s without a break.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from policies.checks import require_at_least, require_order, require_positive
from simulator.core import Event, Kind
from simulator.engine import Engine
from simulator.router import Router


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
        target_ongoing: requests, waiting or running, per replica.
        interval_s: between two looks.
        start_s: until a new replica takes requests (loading the model).
        hold_s: how long fewer must be wanted before one goes.

    Raises:
        ConfigError: a value is out of bounds.
    """

    min_replicas: int = 1
    max_replicas: int = 8
    target_ongoing: float = 64.0
    interval_s: float = 10.0
    start_s: float = 60.0
    hold_s: float = 120.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "min_replicas")
        require_order(self, "min_replicas", "max_replicas")
        require_positive(self, "target_ongoing", "interval_s")
        require_at_least(0, self, "start_s", "hold_s")

    def wanted(self, ongoing: int) -> int:
        return min(self.max_replicas, max(self.min_replicas, math.ceil(ongoing / self.target_ongoing)))


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
        self._replica_s = 0.0
        self._few_since_s: float | None = None

    def start(self, replicas: int, slo_classes: tuple[frozenset[str] | None, ...] = ()) -> list[Event]:
        """The replicas that are there from the beginning."""
        events = []
        for index in range(replicas):
            events += self._join(0.0, slo_classes[index] if slo_classes else None)
        if self._autoscale is not None:
            events.append(Event(self._autoscale.interval_s, Kind.FLEET, self._scale))
        return events

    def _join(self, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Event]:
        engine = self._new_engine(f"replica-{len(self.engines)}")
        self.engines.append(engine)
        self._joined_s[engine.replica_id] = now_s
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
        return Event(at_s, Kind.FLEET, partial(self._started, slo_classes))

    def _count(self, replica_id: str, now_s: float) -> None:
        self._replica_s += now_s - self._joined_s.pop(replica_id)

    def replica_seconds(self, now_s: float) -> float:
        """What the replicas cost up to now."""
        return self._replica_s + sum(now_s - joined_s for joined_s in self._joined_s.values())

    def _scale(self, now_s: float) -> Iterable[Event]:
        config = self._autoscale
        assert config is not None
        if not self._busy():
            return []
        here = len(self._joined_s) + self._starting
        wanted = config.wanted(self._router.ongoing)
        events = [Event(now_s + config.interval_s, Kind.FLEET, self._scale)]
        for _ in range(wanted - here):
            events.append(self._start_later(now_s + config.start_s))
        self._shrink(wanted, here, now_s)
        return events

    def _started(self, slo_classes: frozenset[str] | None, now_s: float) -> Iterable[Event]:
        self._starting -= 1
        return self._join(now_s, slo_classes)

    def _shrink(self, wanted: int, here: int, now_s: float) -> None:
        """Retire the newest once fewer have been wanted for long enough; never one for another that only starts."""
        assert self._autoscale is not None
        if here <= wanted:
            self._few_since_s = None
            return
        self._few_since_s = now_s if self._few_since_s is None else self._few_since_s
        if now_s - self._few_since_s < self._autoscale.hold_s:
            return
        spare = max(0, len(self._joined_s) - max(wanted, self._autoscale.min_replicas))
        for replica_id in list(self._joined_s)[len(self._joined_s) - spare :]:
            self._count(replica_id, now_s)
            self._router.leave(replica_id)
