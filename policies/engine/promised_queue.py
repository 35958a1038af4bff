"""An engine's queue by promises: which request goes next.

In the bands of the router's order: those that have a part of their answer or were put back, then those in time, by
deadline, with late ones that are owed a start before them, then those without a deadline, as they came, then late ones,
oldest first, then those that fill idle capacity.

Which are late is told by ``split``; it is for good, while those that only yielded to others are judged anew each time.
Beyond capacity no bound on the wait can hold for all. So that late ones starve no more than they must, they get a tenth
of the prompt tokens that start once one of them has waited for ``late_patience_s``.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import count
from math import inf
from typing import Generic, TypeVar

from policies.engine.lateness import in_the_way, split
from policies.live import Live
from policies.router.order import Band

T = TypeVar("T")

# Requests that a split looks at: behind as many, the next one does not depend on the rest, and it takes a millisecond.
_MOST_SPLIT = 256
# Of the prompt tokens that start, those of late ones once these have lost their patience: what is given to who has
# missed its promise is taken from who could keep it.
_LATE_SHARE = 0.1


class Waiting(Generic[T]):
    """One that waits.

    Attributes:
        arrival_s: when it came.
        deadline_s: when its first token is due; inf where none was promised.
        unread_tokens: of its prompt, those that no cache holds.
        band: as in the router's order.
        yields: it could be in time, but has to let others go first.
        owed: it is late, and the share of late ones has come up for it: it goes before those in time.
        reads: it does not wait any more: a part of its prompt has been read.
    """

    __slots__ = (
        "arrival_s", "band", "deadline_s", "item", "number", "order", "owed", "reads", "unread_tokens", "yields",
    )  # fmt: skip

    def __init__(
        self,
        item: T,
        *,
        arrival_s: float,
        deadline_s: float = inf,
        unread_tokens: int = 0,
        resumed: bool = False,
        fills_idle: bool = False,
        reads: bool = False,
    ) -> None:
        self.item = item
        self.arrival_s, self.deadline_s, self.unread_tokens = arrival_s, deadline_s, unread_tokens
        self.yields, self.owed, self.reads = False, False, reads
        self.number = 0
        self.order: tuple[float, ...] = ()
        self.band = Band.NO_TARGET if deadline_s == inf else Band.IN_TIME
        if resumed or fills_idle:
            self.band = Band.RESUMED if resumed else Band.FILLS_IDLE

    def sorted_in(self) -> None:
        due_s = -inf if self.owed else self.deadline_s
        self.order = (self.band, due_s if self.band is Band.IN_TIME else self.arrival_s, self.number)


class PromisedQueue(Generic[T]):
    """An engine's whole queue; every request stands in it once."""

    def __init__(self, late_patience_s: Live[float] | None = None) -> None:
        """Args:
        late_patience_s: None is 60 for good.
        """
        self._late_patience_s = late_patience_s or Live(60.0)
        self._sorted: list[Waiting[T]] = []  # the head at the end
        self._numbers = count(1)
        self._yielded: set[Waiting[T]] = set()
        self._late_tokens = 0.0  # that late ones may start
        self._impatient = False  # whether one of them has waited for too long
        self.changed = False  # since the last split

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Waiting[T]]:
        return reversed(self._sorted)

    def add(self, waiting: Waiting[T]) -> None:
        waiting.number = next(self._numbers)
        self._insert(waiting)

    def put_back(self, waiting: Waiting[T]) -> None:
        """It goes on before all others, the one put back last first."""
        waiting.band, waiting.owed, waiting.number = Band.RESUMED, False, -next(self._numbers)
        waiting.arrival_s = -inf
        self._insert(waiting)

    def _insert(self, waiting: Waiting[T]) -> None:
        waiting.sorted_in()
        insort(self._sorted, waiting, key=_backwards)
        self.changed = True

    @property
    def in_time(self) -> int:
        """How many are not late and fill no idle capacity."""
        return sum([one.band < Band.LATE for one in self._sorted])

    @property
    def in_time_tokens(self) -> int:
        """Unread, of all that are not late and fill no idle capacity."""
        return sum([one.unread_tokens for one in self._sorted if one.band < Band.LATE])

    def head(self) -> Waiting[T]:
        return self._sorted[-1]

    def pop(self) -> Waiting[T]:
        head = self._sorted.pop()
        self._yielded.discard(head)
        share = _LATE_SHARE if self._impatient else 0.0
        self._late_tokens += (share - 1.0 if head.owed else share) * head.unread_tokens
        self.changed = True
        return head

    def remove(self, waiting: Waiting[T]) -> None:
        self._take(waiting)
        self._yielded.discard(waiting)
        self.changed = True

    def split(self, now_s: float, seconds_per_token: float, reading: Sequence[Waiting[T]] = ()) -> list[T]:
        """Judge which requests can still be in time, and sort by it.

        Args:
            reading: prompts in progress, with what is left of them.

        Returns:
            Which of these would make others late, and had better wait for them.
        """
        jobs = sorted([*self._judged(), *(one for one in reading if one.band is not Band.RESUMED)], key=_deadline)
        deadline_s, tokens = [one.deadline_s for one in jobs], [one.unread_tokens for one in jobs]
        ahead = sum([one.unread_tokens for one in reading if one.band is Band.RESUMED])
        found = split(deadline_s, tokens, now_s=now_s, seconds_per_token=seconds_per_token, tokens_ahead=ahead)
        in_progress: list[int] = []
        for place, one in enumerate(jobs):
            if one.reads:
                in_progress.append(place)
            else:
                self._judge(one, late=place in found.late, yields=place in found.yielded)
        self._let_late_start(now_s)
        self.changed = False
        if not in_progress:
            return []
        held = in_the_way(
            deadline_s,
            tokens,
            in_progress,
            found,
            now_s=now_s,
            seconds_per_token=seconds_per_token,
            tokens_ahead=ahead,
        )
        return [jobs[place].item for place in held]

    def _judge(self, waiting: Waiting[T], *, late: bool, yields: bool) -> None:
        waiting.yields = yields
        (self._yielded.add if yields else self._yielded.discard)(waiting)
        band = Band.LATE if yields or late else Band.IN_TIME
        if band is not waiting.band:
            self._take(waiting)
            waiting.band = band
            self._insert(waiting)

    def _judged(self) -> list[Waiting[T]]:
        """Those that could be in time, and those that yielded."""
        judged = list(self._yielded)
        for one in reversed(self._sorted):
            if one.band > Band.IN_TIME or len(judged) >= _MOST_SPLIT:
                break
            if one.band is Band.IN_TIME and not one.owed:
                judged.append(one)
        return judged

    def _take(self, waiting: Waiting[T]) -> None:
        """Out of its place."""
        del self._sorted[bisect_left(self._sorted, _backwards(waiting), key=_backwards)]

    def _let_late_start(self, now_s: float) -> None:
        """The oldest late one goes next where it has waited too long and the share of late ones has come up."""
        at = bisect_left(self._sorted, -Band.NO_TARGET, key=_negative_band) - 1
        self._impatient = at >= 0 and self._has_lost_patience(self._sorted[at], now_s)
        if not self._impatient:
            self._late_tokens = min(self._late_tokens, 0.0)
        elif self._late_tokens >= self._sorted[at].unread_tokens:
            oldest = self._sorted.pop(at)
            oldest.band, oldest.owed, oldest.yields = Band.IN_TIME, True, False
            self._yielded.discard(oldest)
            self._insert(oldest)

    def _has_lost_patience(self, waiting: Waiting[T], now_s: float) -> bool:
        return waiting.band is Band.LATE and now_s - waiting.arrival_s > self._late_patience_s.now


def _backwards(waiting: Waiting[T]) -> tuple[float, ...]:
    return tuple(-each for each in waiting.order)


def _negative_band(waiting: Waiting[T]) -> int:
    return -waiting.band


def _deadline(waiting: Waiting[T]) -> tuple[float, int]:
    return waiting.deadline_s, waiting.number
