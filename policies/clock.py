"""Time as a thing that is handed in: live code reads a monotonic clock, simulators and tests move a manual one."""

from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; never decreases. Comparable only with readings of the same clock."""


class ManualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Raises ValueError for a time in the past."""
        if now_s < self._now_s:
            raise ValueError(f"now_s must not go back from {self._now_s} to {now_s}")
        self._now_s = now_s
