"""When a request goes whose whole answer is due by a time: the cheap ones before the dear ones.

Beyond capacity some answers miss their time whatever the order; fewest do where what is missed would have cost most.
So a request stands where its deadline would be if all cost the same, drawn nearer the less it costs:

    due = arrival + (ends_by - arrival) * cost / mean cost

One of mean cost stands at its deadline, as those that were promised a first token do, so that both share one order;
how far the rest is drawn out or in has no unit and nothing to tune. No paper of the five treats it: 002's shortest
first has no deadlines, and earliest deadline first lets a dear answer that will be late take what three cheap ones
needed.
"""

from typing import NamedTuple

from policies.router.promise import Promise

_MEMORY = 0.02  # of the newest cost, in the mean


def completion_due_s(arrival_s: float, ends_by_s: float, relative_cost: float) -> float:
    """By which it stands among those that are in time."""
    return arrival_s + (ends_by_s - arrival_s) * relative_cost


class MeanCost:
    """Of requests whose whole answers were promised, in any unit."""

    def __init__(self) -> None:
        self._mean, self._seen = 0.0, 0

    def relative(self, cost: float) -> float:
        """This one against the mean of those before it and itself; it counts from now on."""
        self._seen += 1
        self._mean += max(_MEMORY, 1.0 / self._seen) * (cost - self._mean)
        return cost / self._mean if self._mean > 0.0 else 1.0


class Due(NamedTuple):
    """Attributes:
    due_s: by which the request stands among those in time.
    starts_by_s: when its first token is due, so that all that was promised can be kept even where its answer is short;
        None where nothing is promised.
    """

    due_s: float | None
    starts_by_s: float | None


def due(arrival_s: float, promise: Promise, *, relative_cost: float = 1.0, short_s: float = 0.0) -> Due:
    """Args:
    relative_cost: of ``MeanCost``; does not count where no whole answer is promised.
    short_s: seconds that its tokens after the first take, where it is one of the shortest in ten.
    """
    first_s = None if promise.ttft_s is None else arrival_s + promise.ttft_s
    if promise.e2e_s is None:
        return Due(first_s, first_s)
    ends_by_s = arrival_s + promise.e2e_s
    own_s, starts_by_s = completion_due_s(arrival_s, ends_by_s, relative_cost), ends_by_s - short_s
    if first_s is None:
        return Due(own_s, starts_by_s)
    return Due(min(first_s, own_s), min(first_s, starts_by_s))
