"""Whose request goes next: keys share alike, and each key's batch whose window ends first comes first.

Shares come before windows, or a key that asks for short windows would have everything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A batch that has a request to send.

    Attributes:
        key: whose it is; "" where there are no keys.
        expires_at_s: when its window ends, in seconds on any clock that all share.
    """

    batch_id: str
    key: str
    expires_at_s: float


def choose(waiting: Sequence[Waiting], in_flight: Mapping[str, int]) -> Waiting:
    """Returns the batch that expires first among those of the key with the fewest requests in flight.

    Args:
        waiting: not empty.
        in_flight: requests by key; 0 for a key that is missing.
    """
    return min(waiting, key=lambda each: (in_flight.get(each.key, 0), each.expires_at_s, each.batch_id))
