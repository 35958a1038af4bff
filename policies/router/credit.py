"""How many requests a replica is given, before the rest waits where all replicas share it.

Three bounds: slots, less those that memory does not let run; an eighth more, for an engine that can choose
who is next keeps more promises where slots are short (a quarter brought no more in simulation); and the seconds that
reading takes. Late requests that wait in an engine stand in no other's way, and are not counted.
"""

from collections.abc import Iterable
from math import floor, inf, isfinite

_LOOKAHEAD = 8
# Late requests take memory all the same: at most this many times the slots are left out of the count.
_MOST_LATE = 4
# What memory lets run follows a lighter load by so much for each time that more run than it was taken to let.
_GROWTH = 1.25


def lookahead(slots: int) -> int:
    """Requests beyond the slots."""
    return slots // _LOOKAHEAD


def late_uncounted(late: int, slots: int) -> int:
    """Late requests that wait in an engine and do not count against its credit."""
    return min(late, _MOST_LATE * slots)


def longest_promise_s(ttft_s: Iterable[float]) -> float | None:
    """Seconds that reading may take: what takes longer than the longest promise of a first token is late in any case.
    None where there is no promise."""
    return max((each for each in ttft_s if each < inf), default=None)


def max_unread_tokens(credit_s: float | None, token_s: float | None) -> int | None:
    """Prompt tokens with which a replica has enough to read; None where nothing says so.

    Args:
        credit_s: enough is what takes so long to read; None sets no bound.
        token_s: seconds in which it reads a prompt token; None or 0 while that is not known.
    """
    if credit_s is None or not token_s:
        return None
    most = credit_s / token_s
    return max(1, floor(most)) if isfinite(most) else None


class MemoryBound:
    """Requests that memory lets an engine run, as its plans have shown: what it holds back may fit elsewhere.

    Attributes:
        requests: inf before memory has held a request back.
    """

    def __init__(self) -> None:
        self.requests: float = inf

    def planned(self, running: int, cap: int, *, by_memory: bool) -> None:
        """A plan was made while `running` requests ran: its cap, and whether memory set it."""
        if by_memory:
            self.requests = cap
        elif running > self.requests:
            self.requests = _GROWTH * running
