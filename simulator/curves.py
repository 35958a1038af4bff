"""What a run's requests took, as shares of those that came: the curves of its plots."""

from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from policies.types import FloatArray
from simulator.cluster import Run
from simulator.report import Target, by_class, target_of

# What is read off a request, and off the target of its class.
_KINDS = {
    "time to first token": (attrgetter("ttft_s"), attrgetter("ttft_s")),
    "time per output token": (attrgetter("tpot_s"), attrgetter("tpot_s")),
    "latency": (attrgetter("latency_s"), None),
}


class Curve(NamedTuple):
    """What a class's requests took.

    Attributes:
        values: seconds of those that were served, shape (n,), ascending.
        came: how many there were; what was refused keeps the curve below 1.
        target: seconds that were promised; None, or infinite, where nothing was.
    """

    values: FloatArray
    came: int
    target: float | None = None

    @property
    def shares(self) -> FloatArray:
        """The share of all requests that took at most each value, shape (n,)."""
        return np.arange(1, len(self.values) + 1) / self.came


def curves(finished: Run, targets: Mapping[str, Target]) -> dict[str, dict[str, Curve]]:
    """By kind of time and class."""
    drawn: dict[str, dict[str, Curve]] = {kind: {} for kind in _KINDS}
    for name, requests in by_class(finished).items():
        target = target_of(name, targets)
        for kind, (taken, promised) in _KINDS.items():
            values = [taken(request) for request in requests if request.finished_s is not None]
            known = np.sort([value for value in values if value is not None])
            # An answer of one token has no time per token, and is not missed.
            came = len(requests) - len(values) + len(known)
            drawn[kind][name] = Curve(known, came, promised(target) if promised and target else None)
    return drawn
