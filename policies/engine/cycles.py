"""Of how many steps one reads prompts, so that promises are kept: 003's exclusive phases, with k chosen by promises.

A step that reads prompts beside decodes has a price of its own, so a prompt token costs least in long steps. A promise
is on the mean of an answer: what steps of decodes alone leave of it is saved up for the step that reads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.engine.lateness import split
from policies.types import Unread

_CYCLES = (1, 2, 4, 8)  # more would make prompts wait for longer than first tokens are promised
# Prompts that are looked at, to choose: with all of them the requests in time were the same.
_MOST_JUDGED = 32
# By what a longer cycle reads faster, so that it is worth its waits: without a price of mixing it costs promises.
_FASTER = 0.95


class Cycle(NamedTuple):
    """One step that reads prompts, and those of decodes alone before it.

    Attributes:
        steps: how many these are together.
        longest_s: what the one that reads may take.
        seconds_per_token: of reading, the other steps included.
        in_time_tokens: unread tokens of the prompts that are in time by it.
    """

    steps: int
    longest_s: float
    seconds_per_token: float
    in_time_tokens: int


def best_cycle(
    unread: Unread, now_s: float, *, promised_s: float, alone_s: float, fits: Callable[[float], int], least_tokens: int
) -> Cycle:
    """Of those that read noticeably faster than the shorter ones that one by which the fewest prompts miss their first
    token; of equals the shortest, or the fastest where late prompts wait as well.

    Args:
        promised_s: the mean that the steps may have.
        alone_s: a step of the decodes alone.
        fits: how many prompt tokens fit in a step of so many seconds, beside the decodes.
        least_tokens: that a step reads in any case.
    """
    best, least = None, len(unread.tokens) + 1
    deadline_s, tokens = unread.deadline_s[:_MOST_JUDGED], unread.tokens[:_MOST_JUDGED]
    for steps in _CYCLES:
        saved_s = (steps - 1) * alone_s
        longest_s = steps * promised_s - saved_s
        pace_s = steps * promised_s / max(fits(longest_s), least_tokens)
        if best is not None and pace_s >= _FASTER * best.seconds_per_token:
            continue
        missed, in_time_tokens = _missed(deadline_s, tokens, now_s + saved_s, pace_s)
        if missed < least or (missed == least and unread.late_tokens):
            best, least = Cycle(steps, longest_s, pace_s, in_time_tokens), missed
        if not least and not unread.late_tokens:
            break
    assert best is not None, "the first one misses no more than there are"
    return best


def _missed(deadline_s: Sequence[float], tokens: Sequence[int], now_s: float, pace_s: float) -> tuple[int, int]:
    """How many prompts are not in time, and the tokens of those that are."""
    found = split(deadline_s, tokens, now_s=now_s, seconds_per_token=pace_s)
    behind = found.late | found.yielded
    return len(behind), sum([each for place, each in enumerate(tokens) if place not in behind])
