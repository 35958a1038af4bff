"""How many replicas the work needs: the slots used to a fraction, and the queue short in seconds.

    max(requests / (slot_use * slots per replica), waiting_s * slowness / max_queue_s)

Requests run or wait; ``waiting_s`` is the predicted work of those that wait, so that a few long ones count for what
they are. Counting requests alone is a poor signal for language models, because one may be a hundred times another.
Delays against thrash are the driver's (Ray Serve holds a decision until it has stood for a while). No paper of the five
treats the number of replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from policies.checks import require_at_least, require_positive, require_probability


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """All replicas at one moment; ``slowness`` is their mean, in seconds for one predicted second."""

    replicas: int
    slots: int
    running: int
    waiting: int
    waiting_s: float
    slowness: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasForWorkConfig:
    """What is enough.

    Attributes:
        slot_use: fraction of all slots that should be in use, below 1 for room to take a burst.
        max_queue_s: longest time that working off the queue should take.
        min_replicas: never fewer.

    Raises:
        ConfigError: slot_use is not between 0 and 1, max_queue_s not positive, or min_replicas below 0.
    """

    slot_use: float = 0.8
    max_queue_s: float = 5.0
    min_replicas: int = 1

    def __post_init__(self) -> None:
        require_probability(self, "slot_use")
        require_positive(self, "max_queue_s")
        require_at_least(0, self, "min_replicas")


class ReplicasForWork:
    """Counts the replicas; the state after scaling is not foreseen, because a queue drains faster than models load."""

    def __init__(self, config: ReplicasForWorkConfig) -> None:
        self.config = config

    def choose(self, state: FleetState) -> int:
        if not state.replicas or not state.slots:
            return max(self.config.min_replicas, state.replicas)
        slots_each = state.slots / state.replicas
        for_slots = (state.running + state.waiting) / (self.config.slot_use * slots_each)
        for_queue = state.waiting_s * state.slowness / self.config.max_queue_s
        return max(self.config.min_replicas, ceil(max(for_slots, for_queue) - 1e-9))


class LoopLoad(NamedTuple):
    """What a router's event loop takes, and what it costs.

    Attributes:
        cores: that its process uses.
        lag_s: by how much its event loop is late in the mean: every token waits for so long.
    """

    cores: float
    lag_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasForLoopsConfig:
    """What is enough for routers, each of which has one event loop and so about one core.

    Attributes:
        cpu_use: cores that one should use on average, below 1 for room to take a burst.
        max_lag_s: what an event loop may be late in the mean.
        min_replicas: never fewer.

    Raises:
        ConfigError: cpu_use is not between 0 and 1, max_lag_s not positive, or min_replicas below 1.
    """

    cpu_use: float = 0.6
    max_lag_s: float = 0.02
    min_replicas: int = 1

    def __post_init__(self) -> None:
        require_probability(self, "cpu_use")
        require_positive(self, "max_lag_s")
        require_at_least(1, self, "min_replicas")


class ReplicasForLoops:
    """The cores in use by all, over what one should use; and one more than there are while they are late.

    Lag says what CPU does not: a loop that waits for a core, or that long pieces of work hold up, is late at little
    use. It does not say how many routers would mend it, so they come one at a time, and none goes before the lag is
    down to half of what it may be.
    """

    def __init__(self, config: ReplicasForLoopsConfig) -> None:
        self.config = config

    def choose(self, loads: Sequence[LoopLoad]) -> int:
        """Args:
        loads: of each router; not empty.
        """
        lag_s = sum(load.lag_s for load in loads) / len(loads)
        for_cpu = ceil(sum(load.cores for load in loads) / self.config.cpu_use - 1e-9)
        for_lag = len(loads) if 2 * lag_s > self.config.max_lag_s else 0
        return max(self.config.min_replicas, for_cpu, for_lag + (lag_s > self.config.max_lag_s))
