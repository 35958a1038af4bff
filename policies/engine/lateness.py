"""Which requests can still keep their promise: of those that wait for their first token, and of those that run.

Sources: Moore 1968 (the least number of late jobs on one machine: in order of deadlines, as soon as one would be late,
the largest so far goes behind). Exact for one machine and equal weights; an engine that reads several prompts in a
step, and a pool of replicas, are not one machine, so that here it is a heuristic.
"""

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

import numpy as np

from policies.types import BoolArray, RunningRequests

# Of the time that others have to spare, what prompts in progress may take: to hold one back for nothing costs it a few
# steps, and a step that was believed too short costs somebody the promise.
_SPARE_USED = 0.75
_MANY = 64  # requests, beyond which it is faster to ask first whether all are in time


class Split(NamedTuple):
    """Which of those that wait go behind, by their places in the order that was given.

    Attributes:
        late: cannot meet their deadlines even if they are read next.
        yielded: could, but others that are due as early could not then; they had the longest prompts.
    """

    late: frozenset[int]
    yielded: frozenset[int]


def split(
    deadline_s: Sequence[float],
    unread_tokens: Sequence[int],
    *,
    now_s: float,
    seconds_per_token: float,
    tokens_ahead: int = 0,
    cost: Sequence[float] | None = None,
) -> Split:
    """Go through requests by deadline, adding up the seconds that reading takes.

    Args:
        deadline_s: when first tokens are due, ascending, on one clock with now_s.
        unread_tokens: of each prompt, those that no cache holds.
        seconds_per_token: of reading, decodes in between included.
        tokens_ahead: of prompts that are in progress and are read first.
        cost: what each takes of the engine, its answer included: the dearest yields; None is unread_tokens.
    """
    if len(unread_tokens) > _MANY and _all_in_time(deadline_s, unread_tokens, now_s, seconds_per_token, tokens_ahead):
        return Split(frozenset(), frozenset())
    late: set[int] = set()
    yielded: set[int] = set()
    dearest: list[tuple[float, int]] = []  # a heap of (-cost, place)
    ready_s = now_s + tokens_ahead * seconds_per_token
    for place, (due_s, tokens) in enumerate(zip(deadline_s, unread_tokens, strict=True)):
        if now_s + tokens * seconds_per_token > due_s:
            late.add(place)
            continue
        ready_s += tokens * seconds_per_token
        heappush(dearest, (-(tokens if cost is None else cost[place]), place))
        while ready_s > due_s and dearest:
            _, first = heappop(dearest)
            ready_s -= unread_tokens[first] * seconds_per_token
            yielded.add(first)
    return Split(frozenset(late), frozenset(yielded))


def _all_in_time(
    deadline_s: Sequence[float], unread_tokens: Sequence[int], now_s: float, seconds_per_token: float, tokens_ahead: int
) -> bool:
    """Whether all are, read one after the other. Far faster than to find out who is not."""
    ready_s = now_s + seconds_per_token * (tokens_ahead + np.cumsum(unread_tokens))
    return bool(np.all(ready_s <= np.array(deadline_s)))


def in_the_way(
    deadline_s: Sequence[float],
    unread_tokens: Sequence[int],
    reading: Collection[int],
    found: Split,
    *,
    now_s: float,
    seconds_per_token: float,
    tokens_ahead: int = 0,
) -> list[int]:
    """Prompts in progress that, read to their end first, would make a waiting request late that is due earlier.

    A prompt of a hundred thousand tokens takes seconds, and a request that comes meanwhile may have half a second.
    Where all can be in time in either order none is held back: a cache that is half filled serves none.

    Args:
        deadline_s, unread_tokens, now_s, seconds_per_token, tokens_ahead: as in ``split``.
        reading: places of the prompts in progress; all others wait.
        found: what ``split`` said of these.

    Returns:
        Their places.
    """
    behind = found.late | found.yielded
    held: list[int] = []
    ready_s, first_s, spare_s = now_s + tokens_ahead * seconds_per_token, 0.0, inf
    ends = len(deadline_s) if behind.intersection(reading) else max(reading, default=-1) + 1
    in_time = [place for place in range(ends) if place not in behind]
    for place in (*in_time, *sorted(behind.intersection(reading))):
        takes_s = unread_tokens[place] * seconds_per_token
        if place not in behind:
            ready_s += takes_s
        if place not in reading:
            spare_s = min(spare_s, deadline_s[place] - ready_s)
        elif first_s + takes_s > _SPARE_USED * spare_s:
            held.append(place)
        else:
            first_s += takes_s
    return held


def running_late(running: RunningRequests, now_s: float, decode_step_s: float) -> BoolArray:
    """Which requests missed their first token, or will miss their time per token even if all later steps hold only
    decodes; shape (n,).

    An answer without a prediction is taken to become twice as long as it is.
    """
    made = np.maximum(running.output_tokens - 1, 0)
    predicted = running.predicted_output_tokens
    left = np.where(np.isnan(predicted), running.output_tokens, np.fmax(predicted - running.output_tokens, 1.0))
    elapsed_s = np.fmax(now_s - running.first_token_s, 0.0)
    with np.errstate(invalid="ignore"):
        missed_first = (running.first_token_s > running.deadline_s) | (
            np.isnan(running.first_token_s) & (running.deadline_s < now_s)
        )
        slow = elapsed_s + left / running.tokens_per_step * decode_step_s > running.tpot_s * (made + left)
    return np.asarray(missed_first | slow)
