"""In which order waiting requests start: one sort key per request, computed once, at arrival.

A key is a finite double, so it serves as the score of a Redis sorted set; the lowest goes first. Equal keys are the
driver's to break (by arrival, or by id as Redis does). Keys of different orders must not share a queue.

Source: 002 section II-B (SJF for requests per second, LJF for tokens per second, over prompt lengths; here for whole
queues, and in `deadline_keys` for classes that fill idle capacity, as its offline tasks do): shortest-first lowers the
mean wait but starves the long, and LJF the short, without a bound. The default, `deadline_keys`, is earliest due date
first (Jackson 1955), which keeps the greatest lateness least.
"""

import math
from enum import IntEnum
from typing import Literal, NamedTuple, Protocol

from policies.errors import InputError

IdleOrder = Literal["deadline", "shortest_first", "longest_first"]
"""The order among requests of one class that fills idle capacity."""

# Beyond any context; a window of 8 s, cut in as many, is as fine as a key can be.
_LONGEST_PROMPT = 1 << 20

# Beyond any Unix time, and small enough that a key keeps steps of 8 us.
BAND_S = 1e10


class Band(IntEnum):
    """Which requests go before which others, whatever their times."""

    RESUMED = 0
    """Its client has a part of the answer, and it waits again."""
    IN_TIME = 1
    NO_TARGET = 2
    LATE = 3
    FILLS_IDLE = 4


class Order(Protocol):
    """Ranks waiting requests."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        """The sort key; a request with a lower key starts first.

        Args:
            arrival_s: on one clock for all requests of the queue (for a shared queue the store's own time).
            estimated_work_s: predicted seconds of engine time, see `policies.router.placement.work_s`.
        """


class FCFS:
    """First come, first served."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return arrival_s


class SJF:
    """Shortest prompt first (002). No bound: short arrivals may overtake a long request for ever."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return float(prompt_tokens)


class LJF:
    """Longest prompt first (002), for batches of like size in offline work. No bound, as SJF."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return -float(prompt_tokens)


class DeadlineKeys(NamedTuple):
    """Attributes:
    key: of a request as long as it is in time.
    late_key: once it is late; the same for one that cannot be, for it has no target or fills idle capacity.
    """

    key: float
    late_key: float


def deadline_keys(
    arrival_s: float,
    ttft_s: float | None,
    *,
    due_s: float | None = None,
    fills_idle: IdleOrder | None = None,
    prompt_tokens: int = 0,
    late_patience_s: float = 60.0,
) -> DeadlineKeys:
    """Those in time go first, by deadline; then those without a target; then the late, oldest first; then what fills
    idle capacity. Beyond capacity `policies.router.turns` has a say between API keys. Earliest deadline first alone
    collapses there: what is late already would go before what can still be in time, and make that late as well.

        key = band * BAND_S + (arrival_s + ttft_s        in time: the deadline
                               arrival_s + patience_s)   behind: when its patience ends, see `is_owed_a_start`

    Predicted work is no part of a deadline: it says when a first token can come, not when it is due.

    Args:
        due_s: where it stands among those in time; None is where its first token is due (`policies.router.completion`).
        fills_idle: in which order its class fills idle capacity; None for a class that does not.
        prompt_tokens: what the orders by length go by.

    Raises:
        InputError: arrival_s is not finite.
    """
    if not math.isfinite(arrival_s):
        raise InputError(f"arrival_s must be finite, got {arrival_s}")
    patience_ends_s = arrival_s + late_patience_s
    if fills_idle is not None:
        if fills_idle == "deadline":
            idle_s = arrival_s + (ttft_s or 0.0)
        else:
            window_s, longest_first = ttft_s or late_patience_s, fills_idle == "longest_first"
            idle_s = _due_by_length_s(arrival_s, window_s, prompt_tokens, longest_first=longest_first)
        key = banded(Band.FILLS_IDLE, idle_s + late_patience_s)
        return DeadlineKeys(key, key)
    if due_s is None and ttft_s is not None:
        due_s = arrival_s + ttft_s
    if due_s is None:
        key = banded(Band.NO_TARGET, patience_ends_s)
        return DeadlineKeys(key, key)
    return DeadlineKeys(banded(Band.IN_TIME, due_s), banded(Band.LATE, patience_ends_s))


def _due_by_length_s(arrival_s: float, window_s: float, prompt_tokens: int, *, longest_first: bool) -> float:
    """By prompt length among requests that come within one window, and window by window (002's SJF and LJF, with an end
    to the wait: nothing that comes more than a window later goes first).

        w * (floor(a / w) + 1 + share)      a: arrival, w: window, share: of the longest prompt, below 1
    """
    tokens = min(prompt_tokens, _LONGEST_PROMPT)
    share = (_LONGEST_PROMPT - tokens if longest_first else tokens) / (_LONGEST_PROMPT + 1)
    return window_s * (math.floor(arrival_s / window_s) + 1.0 + share)


def banded(band: Band, time_s: float) -> float:
    return band * BAND_S + time_s


def is_late(deadline_s: float, reading_s: float, now_s: float) -> bool:
    """Whether a first token cannot come in time any more from a replica that reads its prompt in `reading_s`."""
    return now_s + reading_s > deadline_s


STARTS_FOR_THE_PATIENT = 10
"""One start in this many goes to a request behind that has no patience left: beyond capacity nothing else would ever
let them start, and a tenth costs those in time a tenth at most."""


def is_owed_a_start(starts: int, key: float, now_s: float) -> bool:
    """Whether the next start, after `starts` starts, goes to the request behind those in time that has this key."""
    return starts % STARTS_FOR_THE_PATIENT == STARTS_FOR_THE_PATIENT - 1 and key % BAND_S <= now_s
