"""When the first replica will be there, while none is: as long after the first request that comes as the last one took.

No paper of the five treats it.
"""

from dataclasses import dataclass
from math import floor


@dataclass(slots=True)
class Starts:
    """What is known of replicas that start.

    Attributes:
        took_s: seconds until the last one was there, in whole seconds; 0 before one was seen.
        since_s: since when one has been asked for, by a request that came while none was there; None while one is.
    """

    took_s: float = 0.0
    since_s: float | None = None

    def asked(self, now_s: float) -> float:
        """A request comes, and no replica is there. Returns the predicted seconds until one is."""
        if self.since_s is None:
            self.since_s = now_s
        return max(0.0, self.took_s - (now_s - self.since_s))

    def came(self, start_s: float, now_s: float) -> None:
        """A replica is there, which took `start_s` by its own word: what it takes to find it a place comes on top."""
        asked_s = 0.0 if self.since_s is None else now_s - self.since_s
        self.took_s, self.since_s = floor(max(start_s, asked_s)), None
