"""The event loop: a heap of (time, rank of the kind, sequence), and actions that return further events.

Ranks settle what happens first at one instant, the sequence what was planned first, so a run is a function of its
inputs alone.
"""

from collections.abc import Callable, Iterable
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple


class Kind(IntEnum):
    """Rank at equal times: the world changes before the engines look at it."""

    FLEET = 0
    ARRIVAL = 1
    TIMER = 2
    STEP = 3


class Event(NamedTuple):
    """Something that happens at a time: ``action(time_s)`` returns what follows from it, now or later."""

    time_s: float
    kind: Kind
    action: "Action"


Action = Callable[[float], Iterable[Event]]


class EventLoop:
    """Runs events in order until none is left.

    Attributes:
        now_s: time of the last event.
        events: how many have run.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, Kind, int, Action]] = []
        self._sequence = 0

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            assert event.time_s >= self.now_s, f"event at {event.time_s} in the past of {self.now_s}"
            self._sequence += 1
            heappush(self._heap, (event.time_s, event.kind, self._sequence, event.action))

    def run(self) -> None:
        while self._heap:
            self.now_s, _, _, action = heappop(self._heap)
            self.events += 1
            self.add(action(self.now_s))
