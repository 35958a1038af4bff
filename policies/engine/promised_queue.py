"""An engine's queue by promises: which request goes next.

In the bands of the router's order: those that have a part of their answer or were put back, then those in time, by
deadline, with late ones that are owed a start before them, then those without a deadline, as they came, then late ones,
oldest first, then those that fill idle capacity.

Which are late is told by ``split``; it is for good, while those that only yielded to others are judged anew each time.
Beyond capacity no bound on the wait can hold for all. So that late ones starve no more than they must, they get a tenth
of the prompt tokens that start once one of them has waited for ``late_patience_s``.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence, Set
from itertools import count
from math import ceil, inf
from operator import attrgetter
from typing import Generic, TypeVar

from policies.engine.lateness import in_the_way, split
from policies.live import Live
from policies.router.completion import MeanCost, completion_due_s
from policies.router.order import Band
from policies.types import Left, Unread

T = TypeVar("T")

NOTHING_LEFT = Left(0.0, 0.0, 0.0)

# Requests that a split looks at: behind as many, the next one does not depend on the rest, and it takes a millisecond.
_MOST_SPLIT = 256
# Of the requests that may run, those beside which late ones start: a quarter or three quarters kept as many promises,
# within a point. Beside whole answers that are late, a tenth kept up to 0.014 more (docs/measurements/completion.md),
# and after a burst it kept the engine at that tenth: what is not served makes the next ones late.
_LATE_SLOTS = 0.5
# Of the prompt tokens that start, those of late ones once these have lost their patience: what is given to who has
# missed its promise is taken from who could keep it.
_LATE_SHARE = 0.1


class Waiting(Generic[T]):
    """One that waits.

    Attributes:
        arrival_s: when it came.
        deadline_s: when its first token is due; inf where none was promised.
        ends_by_s: when its last token is due; inf where none was promised.
        unread_tokens: of its prompt, those that no cache holds.
        left: of its answer, the tokens that it has to make yet.
        due_s: by which it stands among those in time.
        band: as in the router's order.
        yields: it could be in time, but has to let others go first.
        owed: it is late, and the share of late ones has come up for it: it goes before those in time.
        reads: it does not wait any more: a part of its prompt has been read.
    """

    __slots__ = (
        "arrival_s", "band", "deadline_s", "due_s", "ends_by_s", "item", "left", "number", "order", "owed", "reads",
        "unread_tokens", "yields",
    )  # fmt: skip

    def __init__(
        self,
        item: T,
        *,
        arrival_s: float,
        deadline_s: float = inf,
        ends_by_s: float = inf,
        unread_tokens: int = 0,
        left: Left = NOTHING_LEFT,
        resumed: bool = False,
        fills_idle: bool = False,
        reads: bool = False,
    ) -> None:
        self.item = item
        self.arrival_s, self.deadline_s, self.ends_by_s = arrival_s, deadline_s, ends_by_s
        self.unread_tokens, self.left, self.due_s = unread_tokens, left, deadline_s
        self.yields, self.owed, self.reads = False, False, reads
        self.number = 0
        self.order: tuple[float, ...] = ()
        self.band = Band.NO_TARGET if min(deadline_s, ends_by_s) == inf else Band.IN_TIME
        if resumed or fills_idle:
            self.band = Band.RESUMED if resumed else Band.FILLS_IDLE

    def sorted_in(self) -> None:
        due_s = -inf if self.owed else self.due_s
        self.order = (self.band, due_s if self.band is Band.IN_TIME else self.arrival_s, self.number)

    def starts_by_s(self, step_s: float) -> float:
        """When its first token is due, so that what was promised can be kept even where its answer is short."""
        return min(self.deadline_s, self.ends_by_s - self.left.short * step_s)


class PromisedQueue(Generic[T]):
    """An engine's whole queue; every request stands in it once.

    Attributes:
        changed: since the last split.
        unread: what that found to be in time, prompts in progress among it.
    """

    def __init__(self, late_patience_s: Live[float] | None = None) -> None:
        """Args:
        late_patience_s: None is 60 for good.
        """
        self._late_patience_s = late_patience_s or Live(60.0)
        self._sorted: list[Waiting[T]] = []  # the head at the end
        self._numbers = count(1)
        self._yielded: set[Waiting[T]] = set()
        self._unread_tokens = 0  # of all that wait
        self._late_tokens = 0.0  # that late ones may start
        self._impatient = False  # whether one of them has waited for too long
        self._answer_price, self._costs = 0.0, MeanCost()
        self._whole_answers = False  # whether any that came was due as a whole
        self.changed = False
        self.unread = Unread()

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Waiting[T]]:
        return reversed(self._sorted)

    def add(self, waiting: Waiting[T]) -> None:
        waiting.number = next(self._numbers)
        if waiting.ends_by_s < inf:
            self._whole_answers = True
            own = self._costs.relative(self._cost(waiting))
            waiting.due_s = min(waiting.deadline_s, completion_due_s(waiting.arrival_s, waiting.ends_by_s, own))
        self._insert(waiting)

    def _cost(self, waiting: Waiting[T]) -> float:
        """What it takes of the engine, in tokens of a prompt."""
        return waiting.unread_tokens + self._answer_price * waiting.left.mean

    def put_back(self, waiting: Waiting[T]) -> None:
        """It goes on before all others, the one put back last first."""
        waiting.band, waiting.owed, waiting.number = Band.RESUMED, False, -next(self._numbers)
        waiting.arrival_s = -inf
        self._insert(waiting)

    def _insert(self, waiting: Waiting[T]) -> None:
        waiting.sorted_in()
        insort(self._sorted, waiting, key=_backwards)
        self._unread_tokens += waiting.unread_tokens
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

    def cap(self, running: int, most: int) -> int:
        """Most requests that may run after the next step, where it may be so many: late ones leave a half of them to
        those in time that come."""
        ahead = len(self._sorted) - bisect_left(self._sorted, -Band.NO_TARGET, key=_negative_band)
        if ahead == len(self._sorted) or self._sorted[-ahead - 1].band is not Band.LATE:
            return most
        return min(most, max(running + ahead, ceil(most * _LATE_SLOTS)))

    def pop(self) -> Waiting[T]:
        head = self._out(len(self._sorted) - 1)
        self._yielded.discard(head)
        share = _LATE_SHARE if self._impatient else 0.0
        self._late_tokens += (share - 1.0 if head.owed else share) * head.unread_tokens
        self.changed = True
        return head

    def remove(self, waiting: Waiting[T]) -> None:
        self._take(waiting)
        self._yielded.discard(waiting)
        self.changed = True

    def split(
        self,
        now_s: float,
        seconds_per_token: float,
        reading: Sequence[Waiting[T]] = (),
        *,
        answer_price: float = 0.0,
        step_s: float = 0.0,
    ) -> list[T]:
        """Judge which requests can still be in time, and sort by it.

        Args:
            reading: prompts in progress, with what is left of them.
            answer_price: what a token of an answer takes of the engine, in tokens of a prompt.
            step_s: mean seconds of a step.

        Returns:
            Which of these would make others late, and had better wait for them.
        """
        self._answer_price = answer_price
        jobs, others = self._judged(), [one for one in reading if one.band is not Band.RESUMED]
        deadline_s: Sequence[float]
        if self._whole_answers:
            due = sorted([(one.starts_by_s(step_s), one.number, one) for one in (*jobs, *others)], key=_first_two)
            jobs, deadline_s = [one for _, _, one in due], [starts_by_s for starts_by_s, _, _ in due]
        else:
            if others or self._yielded:
                jobs = sorted([*jobs, *others], key=_deadline)
            deadline_s = [one.deadline_s for one in jobs]
        tokens = [one.unread_tokens for one in jobs]
        ahead = sum([one.unread_tokens for one in reading if one.band is Band.RESUMED])
        cost = [self._cost(one) for one in jobs] if answer_price else None
        found = split(
            deadline_s, tokens, now_s=now_s, seconds_per_token=seconds_per_token, tokens_ahead=ahead, cost=cost
        )
        behind = found.late | found.yielded
        in_progress = [place for place, one in enumerate(jobs) if one.reads] if others else []
        promised = _promised(deadline_s, tokens, found.late)
        all_tokens = self._unread_tokens + sum([one.unread_tokens for one in reading])
        self.unread = Unread(*promised, all_tokens - sum(promised[1]))
        put_behind = {jobs[place]: place in found.late for place in behind if not jobs[place].reads}
        for one in self._yielded - put_behind.keys():
            self._judge(one, late=False, yields=False)
        for one, is_late in put_behind.items():
            self._judge(one, late=is_late, yields=not is_late)
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
        """Those that could be in time, by deadline, behind those that yielded."""
        judged = list(self._yielded)
        start, end = (bisect_left(self._sorted, at, key=_negative_band) for at in (-Band.IN_TIME, -Band.RESUMED))
        start = max(start, end - max(0, _MOST_SPLIT - len(judged)))
        judged += [one for one in reversed(self._sorted[start:end]) if not one.owed]
        return judged

    def _take(self, waiting: Waiting[T]) -> None:
        """Out of its place."""
        self._out(bisect_left(self._sorted, _backwards(waiting), key=_backwards))

    def _out(self, at: int) -> Waiting[T]:
        waiting = self._sorted.pop(at)
        self._unread_tokens -= waiting.unread_tokens
        return waiting

    def _let_late_start(self, now_s: float) -> None:
        """The oldest late one goes next where it has waited too long and the share of late ones has come up."""
        at = self._oldest_late()
        self._impatient = at >= 0 and self._has_lost_patience(self._sorted[at], now_s)
        if not self._impatient:
            self._late_tokens = min(self._late_tokens, 0.0)
        elif self._late_tokens >= self._sorted[at].unread_tokens:
            oldest = self._out(at)
            oldest.band, oldest.owed, oldest.yields = Band.IN_TIME, True, False
            self._yielded.discard(oldest)
            self._insert(oldest)

    def _oldest_late(self) -> int:
        """Its place; there or before it stands none that is late, where it is none itself."""
        return bisect_left(self._sorted, -Band.NO_TARGET, key=_negative_band) - 1

    def late_wait_s(self, now_s: float) -> float:
        """How long the oldest late one has waited; 0 where none is late."""
        at = self._oldest_late()
        is_late = at >= 0 and self._sorted[at].band is Band.LATE
        return max(0.0, now_s - self._sorted[at].arrival_s) if is_late else 0.0

    def _has_lost_patience(self, waiting: Waiting[T], now_s: float) -> bool:
        return waiting.band is Band.LATE and now_s - waiting.arrival_s > self._late_patience_s.now


def _backwards(waiting: Waiting[T]) -> tuple[float, ...]:
    return tuple(-each for each in waiting.order)


def _negative_band(waiting: Waiting[T]) -> int:
    return -waiting.band


def _first_two(due: tuple[float, int, Waiting[T]]) -> tuple[float, int]:
    return due[:2]


def _promised(
    deadline_s: Sequence[float], tokens: Sequence[int], late: Set[int]
) -> tuple[Sequence[float], Sequence[int]]:
    """When the first tokens of those are due that are not late, and what is unread of them."""
    ends = bisect_left(deadline_s, inf)
    if not late:
        return deadline_s[:ends], tokens[:ends]
    in_time = [place for place in range(ends) if place not in late]
    return [deadline_s[place] for place in in_time], [tokens[place] for place in in_time]


_deadline = attrgetter("deadline_s", "number")
