"""Whether the time after which refused requests were told to come again was true."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Told:
    """A refusal: when there was to be room, and whether another came after that."""

    due_s: float
    refused_since: bool = False


class RetryTruth:
    """Watches one refusal of each class at a time, until the next request of the class is taken.

    Only who asks finds out whether there is room. So one that is taken before the time says by how much it was too long
    at least, one that is taken after another was refused by how much it was too short at most, and else it was right.
    """

    def __init__(self, now: Callable[[], float], note: Callable[[str, float], None]) -> None:
        """Args:
        note: gets the class and the seconds by which there was room later than told; below 0 it was sooner.
        """
        self._now, self._note = now, note
        self._told: dict[str, _Told] = {}

    def refused(self, slo_class: str, retry_after_s: float) -> None:
        if (told := self._told.get(slo_class)) is None:
            self._told[slo_class] = _Told(self._now() + retry_after_s)
        elif self._now() > told.due_s:
            told.refused_since = True

    def taken(self, slo_class: str) -> None:
        if (told := self._told.pop(slo_class, None)) is None:
            return
        later_s = self._now() - told.due_s
        self._note(slo_class, later_s if later_s < 0.0 or told.refused_since else 0.0)
