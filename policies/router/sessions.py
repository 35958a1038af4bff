"""Sessions of agents: turns with pauses in between, in which a tool runs or a person thinks.

Of each session what its next turn will be judged by is kept, for a while; of all together how long pauses last, how
many turns sessions have, and by how much their prompts grow. Nothing here is a client's text: a session goes by the
digest of its name.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

from policies.checks import require_at_least, require_positive
from policies.router.promise import Promise

_PAUSE_EDGES_S = tuple(2.0**power for power in range(-3, 14))  # an eighth of a second to two hours
_TURN_BUCKETS = 12  # 1, 2 to 3, 4 to 7, ...: the last from 2 048 turns on
_GROWTH_MEMORY = 0.02  # of the newest turn, in the mean growth
# As if so many turns had been seen in every bucket, one of which was the last of its session.
_PRIOR_TURNS = 16.0


class Task(NamedTuple):
    """Attributes:
    task_s: what its client gave it.
    ends_by_s: when it is due, on the clock of all routers.
    """

    task_s: float
    ends_by_s: float


def within_task(promise: Promise, task: Task | None, now_s: float) -> Promise:
    """What a turn that begins now is promised: its whole answer before its task ends, unless that is over.

    All that the task has left is the turn's ("ultimate deadline", Kao and Garcia-Molina, ICDCS 1993). An equal share
    for each turn that may follow kept fewer tasks than no deadline at all, for it calls turns late that need not be.
    """
    left_s = 0.0 if task is None else task.ends_by_s - now_s
    if left_s <= 0.0:
        return promise
    return replace(promise, e2e_s=left_s if promise.e2e_s is None else min(left_s, promise.e2e_s))


class Turn(NamedTuple):
    """One that has ended, as routers tell each other.

    Attributes:
        session: digest of the name.
        began_s, ended_s: on the clock of all routers.
        task: that it belongs to, or None.
    """

    session: str
    began_s: float
    ended_s: float
    prompt_tokens: int
    task: Task | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Attributes:
    turns: that have ended.
    ended_s: when the last one did.
    prompt_tokens: that it had.
    task: that its turns belong to, or None.
    """

    turns: int
    ended_s: float
    prompt_tokens: int
    task: Task | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionsConfig:
    """Attributes:
    max_sessions: remembered; the one that paused longest is forgotten first. About 600 bytes each.
    keep_s: a session that pauses longer counts as over.

    Raises:
        ConfigError: a value is out of bounds.
    """

    max_sessions: int = 16_384
    keep_s: float = 3600.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_sessions")
        require_positive(self, "keep_s")


class Pauses:
    """How long sessions pause, as counts by powers of two of a second."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_PAUSE_EDGES_S) + 1)

    def ended(self, pause_s: float) -> None:
        self._counts[sum(pause_s >= edge for edge in _PAUSE_EDGES_S)] += 1

    @property
    def seen(self) -> int:
        return sum(self._counts)

    @property
    def median_s(self) -> float | None:
        """Of those that ended."""
        half, below = self.seen / 2.0, 0
        for index, count in enumerate(self._counts):
            if count and below + count >= half:
                low, high = _edges(index)
                return low + (high - low) * (half - below) / count
            below += count
        return None


def _edges(index: int) -> tuple[float, float]:
    low = _PAUSE_EDGES_S[index - 1] if index else 0.0
    return low, _PAUSE_EDGES_S[index] if index < len(_PAUSE_EDGES_S) else 2.0 * low


class TurnCounts:
    """After how many turns sessions are over, by powers of two of their turns."""

    def __init__(self) -> None:
        self._went_on, self._over = [0] * _TURN_BUCKETS, [0] * _TURN_BUCKETS

    def went_on(self, turns: int) -> None:
        """A session with so many turns had another one."""
        self._went_on[_bucket(turns)] += 1

    def was_over(self, turns: int) -> None:
        self._over[_bucket(turns)] += 1

    def chance_of_another(self, turns: int) -> float:
        """After so many."""
        return 1.0 - self._end_chance(_bucket(turns))

    def _end_chance(self, bucket: int) -> float:
        over = self._over[bucket]
        return (over + 1.0) / (over + self._went_on[bucket] + _PRIOR_TURNS)


def _bucket(turns: int) -> int:
    return min(_TURN_BUCKETS, max(1, turns).bit_length()) - 1


class Sessions:
    """What is known of sessions; each router has one, and all are told of every turn that ends.

    Attributes:
        pauses, turn_counts: of all sessions.
        growth_tokens: by which a turn's prompt is longer than that of the one before, in the mean.
        turns: that were seen.
    """

    def __init__(self, config: SessionsConfig | None = None) -> None:
        self.config = config or SessionsConfig()
        self.pauses, self.turn_counts = Pauses(), TurnCounts()
        self.growth_tokens, self.turns = 0.0, 0
        self._known: OrderedDict[str, Session] = OrderedDict()  # by when the last turn ended

    def __len__(self) -> int:
        return len(self._known)

    def find(self, session: str) -> Session | None:
        return self._known.get(session)

    def observe(self, turn: Turn) -> None:
        """A turn has ended. One that is told again, or after a later one of its session, does not count."""
        self._forget(turn.ended_s)
        known = self._known.get(turn.session)
        if known is not None and turn.ended_s <= known.ended_s:
            return
        self.turns += 1
        new = Session(turns=1, ended_s=turn.ended_s, prompt_tokens=turn.prompt_tokens, task=turn.task)
        if known is not None:
            self.pauses.ended(max(0.0, turn.began_s - known.ended_s))
            self.turn_counts.went_on(known.turns)
            self.growth_tokens += _GROWTH_MEMORY * (turn.prompt_tokens - known.prompt_tokens - self.growth_tokens)
            new = replace(new, turns=known.turns + 1, task=turn.task or known.task)
        self._known[turn.session] = new
        self._known.move_to_end(turn.session)
        if len(self._known) > self.config.max_sessions:
            self._known.popitem(last=False)

    def _forget(self, now_s: float) -> None:
        """Those that are over."""
        while self._known:
            session = next(iter(self._known.values()))
            if session.ended_s + self.config.keep_s > now_s:
                return
            self._known.popitem(last=False)
            self.turn_counts.was_over(session.turns)

    def comes_back(self, session: str) -> bool:
        """Whether another turn is likelier than none, once the one that begins now has ended."""
        known = self._known.get(session)
        return self.turn_counts.chance_of_another(1 if known is None else known.turns + 1) >= 0.5

    def task(self, session: str, task_s: float | None, now_s: float) -> Task | None:
        """That a turn which begins now belongs to.

        Args:
            task_s: what its client says; the same again goes on with the task, another begins one. None goes on.
        """
        known = self._known.get(session)
        going_on = None if known is None else known.task
        if task_s is None or (going_on is not None and going_on.task_s == task_s):
            return going_on
        return Task(task_s, now_s + task_s)
