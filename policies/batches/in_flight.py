"""How many requests of batches may be in flight: as many as idle capacity takes, and no more.

Additive increase, multiplicative decrease: what other classes leave is not known, it is found out by sending more until
they wait or are late, or until what was sent waits itself.
"""

from dataclasses import dataclass

from policies.checks import require_at_least
from policies.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightConfig:
    """
    Attributes:
        most: requests, however idle the engines are.
        growth_fraction: of the engines' slots, by how much the number grows at each look.
        backoff: what remains of the number when other classes wait or are late.

    Raises:
        ConfigError: most is below 1, or a fraction not above 0, or backoff not below 1.
    """

    most: int = 1024
    growth_fraction: float = 0.125
    backoff: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, self, "most")
        for name in ("growth_fraction", "backoff"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be in (0, 1), got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One model's engines, as they are now.

    Attributes:
        slots: of all replicas together; 0 while there is none.
        waiting_idle: waiting requests of classes that fill idle capacity.
        waiting_promised: waiting requests of all other classes.
        late: requests of those others that were called late so far; it only grows.
    """

    slots: int
    waiting_idle: int = 0
    waiting_promised: int = 0
    late: int = 0


class InFlight:
    """The number, look by look.

    Attributes:
        limit: requests that may be in flight now; 0 while there is no engine.
    """

    def __init__(self, config: InFlightConfig) -> None:
        self._config = config
        self._late: int | None = None
        self.limit = 1

    def observe(self, load: Load, in_flight: int) -> None:
        """What the engines had to do a moment ago, once for each look.

        Args:
            in_flight: requests of batches; while they are fewer than may be, nothing is learned of what more would do.
        """
        newly_late = self._late is not None and load.late > self._late
        self._late = load.late
        if load.slots == 0:
            self.limit = 0
        elif newly_late or load.waiting_promised:
            self.limit = max(1, int(self._config.backoff * self.limit))
        elif in_flight >= self.limit and not load.waiting_idle:
            growth = max(1, int(self._config.growth_fraction * load.slots))
            self.limit = min(self._config.most, self.limit + growth)
