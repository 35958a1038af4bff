"""Time as a thing that is handed in: live code reads a monotonic clock, tests move one by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; never decreases. Comparable only with readings of the same clock."""


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


class SharedClock:
    """The store's time, so that deadline keys of different routers compare.

    Follows the local monotonic clock plus an offset that `adjust` measures at every heartbeat; between two heartbeats
    the clocks drift apart by microseconds. Before the first measurement it is the local clock.
    """

    def __init__(self) -> None:
        self._offset_s = 0.0

    def now(self) -> float:
        return time.monotonic() + self._offset_s

    def adjust(self, store_time_s: float, asked_s: float, answered_s: float) -> None:
        """The store said store_time_s somewhere between two local monotonic readings."""
        self._offset_s = store_time_s - (asked_s + answered_s) / 2
