"""Time as a thing that is handed in: live code reads a monotonic clock, tests move one by hand."""

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; never decreases. Comparable only with readings of the same clock."""
