"""How many requests of batches may be in flight: as many as idle capacity takes, and no more.

As TCP finds out what a network carries (slow start, then slow growth and halving: Jacobson 1988): what other classes
leave is not known, so more is sent until they wait or miss their promises, or until what was sent waits itself.
"""

from dataclasses import dataclass

from policies.checks import require_at_least, require_probability

_MOST_ROUTERS = 64  # whose counts are remembered: those that are gone do not come back


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightConfig:
    """
    Attributes:
        most: requests, however idle the engines are. They are never more than the slots: further ones would only wait
            in the engines, and cost those beside them what reading them costs.
        growth: by how much of itself the number grows at each look, once it has been too large. A promise of seconds
            per token is seen to be missed when its answer ends, so what is added until then must be little.
        backoff: what remains of the number when other classes wait or miss their promises.

    Raises:
        ConfigError: most is below 1, or one of the others is not between 0 and 1.
    """

    most: int = 1024
    growth: float = 0.01
    backoff: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, self, "most")
        require_probability(self, "growth", "backoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One model's engines, as one router sees them now.

    Attributes:
        slots: of all replicas together; 0 while there is none.
        waiting_idle: waiting requests of classes that fill idle capacity.
        waiting_promised: waiting requests of all other classes.
        router_id: the router that says so.
        missed: requests of those others that ended at this router with a promise missed; it only grows.
    """

    slots: int
    waiting_idle: int = 0
    waiting_promised: int = 0
    router_id: str = ""
    missed: int = 0


class InFlight:
    """The number, look by look."""

    def __init__(self, config: InFlightConfig) -> None:
        self._config = config
        self._missed: dict[str, int] = {}
        self._limit, self._was_too_large, self._has_engines = 1.0, False, True

    @property
    def limit(self) -> int:
        """Requests that may be in flight now; 0 while there is no engine."""
        return int(self._limit) if self._has_engines else 0

    def observe(self, load: Load, in_flight: int) -> None:
        """What the engines had to do a moment ago, once for each look.

        Args:
            in_flight: requests of batches; while they are fewer than may be, nothing is learned of what more would do.
        """
        others_suffer = self._newly_missed(load) or load.waiting_promised > 0
        self._was_too_large |= others_suffer or load.waiting_idle > 0
        self._has_engines = load.slots > 0
        if others_suffer:
            self._limit = max(1.0, self._config.backoff * self._limit)
        elif 0 < self.limit <= in_flight and not load.waiting_idle:
            growth = self._config.growth if self._was_too_large else 1.0
            self._limit = min(self._config.most, (1.0 + growth) * self._limit)
        if self._has_engines:
            self._limit = min(self._limit, load.slots)

    def _newly_missed(self, load: Load) -> bool:
        before = self._missed.pop(load.router_id, load.missed)
        self._missed[load.router_id] = load.missed
        if len(self._missed) > _MOST_ROUTERS:
            self._missed.pop(next(iter(self._missed)))
        return load.missed > before
