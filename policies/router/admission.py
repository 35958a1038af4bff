"""Whether a request may queue at all: quotas per customer, and a queue no longer than its class can bear, of which no
customer has more than a share.

A request that will miss its class's limit whatever happens is better refused at once, with the time after which it is
worth another try, than kept until it times out. No paper of the five treats admission at the door.

The quota is the generic cell rate algorithm (ITU-T I.371, a leaky bucket): what is owed is the time that everything
spent takes to come back. What a request will take can only be predicted, so that it is settled by what it took.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.checks import require_at_least, require_positive
from policies.errors import ConfigError

UNLIMITED = float("inf")
# Unix time has steps of 0.2 us in a float, and what is taken one by one is added up at them.
_ROUNDING_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one request takes out of one allowance.

    Attributes:
        name: whose allowance, and of what: one state for each name.
        cost: what the request takes, in the allowance's unit (requests, tokens).
        per_s: how much comes back each second.
        burst: how much may be taken at once after a rest; one request that costs more takes all of it.

    Raises:
        ConfigError: cost is negative, or a rate or burst not positive.
    """

    name: str
    cost: float
    per_s: float
    burst: float

    def __post_init__(self) -> None:
        require_at_least(0, self, "cost")
        require_positive(self, "per_s", "burst")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What was taken out of an allowance beyond what was spent on it; what is below 0 was spent and not taken.

    Attributes:
        name, per_s: as of `Quota`.

    Raises:
        ConfigError: the rate is not positive.
    """

    name: str
    cost: float
    per_s: float

    def __post_init__(self) -> None:
        require_positive(self, "per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a request must meet in order to queue. A replica that can start it at once makes only the quotas count.

    Attributes:
        max_waiting: requests of its class that may wait.
        max_wait_s: longest predicted wait after which its first token can be in time, where it is refused otherwise;
            below 0 it is late already.
        max_of_key: requests of its customer that may wait in this class.
    """

    max_waiting: int
    max_wait_s: float = UNLIMITED
    max_of_key: float = UNLIMITED
    quotas: tuple[Quota, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLimits:
    """How much of a class may wait.

    Attributes:
        max_waiting: requests.
        refuses_late: whether a request is refused whose first token is predicted to come too late.
        max_key_share: of max_waiting, how much one API key may have.

    Raises:
        ConfigError: max_waiting is below 1, or the share not above 0 and at most 1.
    """

    max_waiting: int = 4096
    refuses_late: bool = False
    max_key_share: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_waiting")
        require_positive(self, "max_key_share")
        if self.max_key_share > 1.0:
            raise ConfigError(f"max_key_share must be at most 1, got {self.max_key_share}")

    def of(self, spare_s: float, *, has_key: bool, quotas: tuple[Quota, ...] = ()) -> Limits:
        """For one request. Without an API key it has the whole queue: nothing tells its client from others.

        Args:
            spare_s: how long its first token can wait and be in time.
        """
        shares = has_key and self.max_key_share < 1.0
        return Limits(
            max_waiting=self.max_waiting,
            max_wait_s=spare_s if self.refuses_late else UNLIMITED,
            max_of_key=max(1, int(self.max_key_share * self.max_waiting)) if shares else UNLIMITED,
            quotas=quotas,
        )


@dataclass(frozen=True, slots=True)
class Spent:
    """An allowance that is whole again owed_s after at_s."""

    owed_s: float = 0.0
    at_s: float = -UNLIMITED

    def rested(self, now_s: float) -> "Spent":
        """As of now. While a clock was set back nothing comes back, and from there on it does again."""
        return Spent(max(0.0, self.owed_s - max(0.0, now_s - self.at_s)), now_s)


NO_LIMITS = Limits(max_waiting=1 << 31)


class Foreseen(NamedTuple):
    """What is predicted of a request as it comes.

    Attributes:
        wait_s: until its turn; 0 where a replica can start it at once.
        reading_s: from there to its first token, on the replica that starts it, else on the best one.
        elsewhere_s: the least of the same on another replica that could start it; None without one.
        replicas: how many serve its class.
    """

    wait_s: float
    reading_s: float
    elsewhere_s: float | None = None
    replicas: int = 0

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.reading_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not queue, and when to try again.

    Attributes:
        reason: ``max_waiting``, ``late``, ``max_key_share`` or the name of a quota.
        foreseen: what was predicted of it, which does not tell refusals apart; None by a quota, which asks nothing.
    """

    reason: str
    retry_after_s: float
    foreseen: Foreseen | None = field(default=None, compare=False)


def spend(quota: Quota, rested: Spent) -> tuple[Spent, float]:
    """Take a quota's cost: what is owed afterwards, and the seconds by which that is too much (<= 0: fine).

    owed' = owed + cost / per_s, allowed up to max(burst, cost) / per_s; a millisecond is no delay.
    """
    owed_s = rested.owed_s + quota.cost / quota.per_s
    late_s = owed_s - max(quota.burst, quota.cost) / quota.per_s
    return Spent(owed_s, rested.at_s), late_s if late_s > _ROUNDING_S else min(late_s, 0.0)


def settle(settlement: Settlement, rested: Spent) -> Spent:
    """Take it, allowed or not. What is owed beyond the burst delays later requests; nothing is owed back."""
    return Spent(max(0.0, rested.owed_s + settlement.cost / settlement.per_s), rested.at_s)


class Allowances:
    """What has been spent of every quota, by its name."""

    def __init__(self) -> None:
        self._spent: dict[str, Spent] = {}

    def allow(self, quotas: Iterable[Quota], now_s: float) -> "dict[str, Spent] | Refusal":
        """What each quota owes once `spend` has taken it; the refusal of the first that does not allow it."""
        spent: dict[str, Spent] = {}
        for quota in quotas:
            rested = self.rested(quota.name, now_s)
            spent[quota.name], late_s = spend(quota, rested)
            if late_s > 0.0:
                self._spent[quota.name] = rested
                return Refusal(quota.name, late_s)
        return spent

    def spend(self, spent: Mapping[str, Spent]) -> None:
        self._spent.update(spent)

    def settle(self, settlements: Iterable[Settlement], now_s: float) -> None:
        for settlement in settlements:
            self._spent[settlement.name] = settle(settlement, self.rested(settlement.name, now_s))

    def rested(self, name: str, now_s: float) -> Spent:
        """What is owed of a quota by now."""
        return self._spent.get(name, Spent()).rested(now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What waits of a class, as one request finds it.

    Attributes:
        wait_s: until what goes before this request is worked off.
        of_key, of_key_s: what waits of its customer, and the seconds until all of that is worked off.
    """

    waiting: int
    wait_s: float
    of_key: int = 0
    of_key_s: float = 0.0


def no_room(limits: Limits, queue: Queue) -> Refusal | None:
    """Why a request that no replica can start may not queue; None when it may.

    A customer at its share is told when its own work is done: the others' would not be in its way before.
    """
    if queue.of_key >= limits.max_of_key:
        return Refusal("max_key_share", queue.of_key_s)
    if queue.waiting >= limits.max_waiting:
        return Refusal("max_waiting", queue.wait_s)
    if queue.wait_s > limits.max_wait_s:
        return Refusal("late", queue.wait_s - max(0.0, limits.max_wait_s))
    return None


def predicted_wait_s(
    work_ahead_s: float, slowness: Iterable[float], own_ahead_s: float = 0.0, own_slowness: Iterable[float] = ()
) -> float:
    """Seconds until the work that goes first is worked off by all replicas that serve its class; 0 where none is known.

    A replica of slowness 2 needs two seconds for one predicted second. Replicas that serve this class alone
    (own_slowness) take none but its own work (own_ahead_s): a request waits for whichever is sooner.
    """
    waits_s = (_worked_off_s(work_ahead_s, slowness), _worked_off_s(own_ahead_s, own_slowness))
    return min((wait_s for wait_s in waits_s if wait_s is not None), default=0.0)


def _worked_off_s(work_s: float, slowness: Iterable[float]) -> float | None:
    pace = sum(1.0 / each for each in slowness)
    return work_s / pace if pace > 0.0 else None
