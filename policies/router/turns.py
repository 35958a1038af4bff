"""Whose turn it is among API keys where not all requests can be in time.

By deadlines alone a key that sends ten times what the replicas can serve gets nearly all starts. So among late
requests, and among those in time of a class of which late ones wait, the key that was served least goes next, and
within a key the order's first. What a key was served is the predicted work of what it started, halved once a minute:
who took much a while ago is not held back for ever, and one that took nothing saves nothing up.

Bound. Let two keys have requests that take turns with each other all the while, and let no request's work exceed w. A
key starts one only while it was served no more than the other, and a start adds w at most. So once what they were
served differs by no more than w, it never differs by more, whatever each of them sends, and between two halvings their
starts differ by 2 w at most. A greater difference from before shrinks with every start and every halving.

Source: the least counter first is VTC (Sheng et al. 2024, "Fairness in Serving Large Language Models"). It lifts the
counter of one that comes back, and lowers none. Here all are halved, so that the last minutes decide.
"""

from math import inf

from policies.router.order import BAND_S, Band

HALF_LIFE_S = 60.0
"""Long enough to hold many requests of a key, short enough that a burst is forgotten after some minutes."""
FORGOTTEN_S = 0.001
"""A key that was served less is not kept: it is less than a request's work."""


def band_of(key: float, late_key: float | None) -> Band | None:
    """In which keys take turns, of a request with these keys of its order; None where they do not."""
    has_bands = late_key is not None
    return next((band for band in (Band.IN_TIME, Band.LATE) if has_bands and key // BAND_S == band), None)


class Turns:
    """What each API key was served.

    Attributes:
        served_s: predicted seconds of what it started, by API key, halved once in a half-life.
    """

    def __init__(self) -> None:
        self.served_s: dict[str, float] = {}
        self._halve_at_s = -inf

    def started(self, api_key: str, work_s: float) -> None:
        """A request of this key; those without one take no turns."""
        if api_key:
            self.served_s[api_key] = self.served_s.get(api_key, 0.0) + work_s

    def note_time(self, now_s: float) -> None:
        """Halve what keys were served, if it is time."""
        if now_s >= self._halve_at_s:
            halves = {key: seconds / 2 for key, seconds in self.served_s.items()}
            self.served_s = {key: seconds for key, seconds in halves.items() if seconds >= FORGOTTEN_S}
            self._halve_at_s = now_s + HALF_LIFE_S
