"""Tickets that wait, in lanes: one for each service class, bin of answer length and bucket of prompt length.

Tickets of one lane may go to the same replicas, so that only the first of each lane matters to the decision which
ticket starts. What is counted here by class is what admission goes by.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import chain
from typing import NamedTuple

from policies.router.ledger import Place
from policies.router.order import BAND_S, Band
from policies.router.tickets import Ticket


class LaneName(NamedTuple):
    slo_class: str
    bin_index: int
    bucket: int


class Lanes:
    """In each lane the least key goes first, and of equal keys the least id.

    Attributes:
        waiting: tickets that wait, by class.
        ahead_s: their predicted seconds, by class.
        of_key: tickets that wait, by class and API key.
    """

    def __init__(self) -> None:
        self._lanes: dict[LaneName, list[Place]] = {}
        self.waiting, self.of_key = Counter[str](), Counter[tuple[str, str]]()
        self.ahead_s: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def __iter__(self) -> Iterator[Place]:
        return chain.from_iterable(self._lanes.values())

    def items(self) -> Iterator[tuple[LaneName, Sequence[Place]]]:
        return iter(self._lanes.items())

    def add(self, place: Place) -> None:
        ticket = place.ticket
        insort(self._lanes.setdefault(_name(ticket), []), place, key=_rank)
        self.waiting[ticket.slo_class] += 1
        self.of_key[ticket.slo_class, ticket.api_key] += 1
        self.ahead_s[ticket.slo_class] = self.ahead_s.get(ticket.slo_class, 0.0) + ticket.work_s

    def remove(self, place: Place) -> None:
        ticket, lane = place.ticket, self._lanes[_name(place.ticket)]
        del lane[bisect_left(lane, _rank(place), key=_rank)]
        if not lane:
            del self._lanes[_name(ticket)]
        self.waiting[ticket.slo_class] -= 1
        self.of_key[ticket.slo_class, ticket.api_key] -= 1
        self.ahead_s[ticket.slo_class] -= ticket.work_s
        if not self.waiting[ticket.slo_class]:  # nothing is left of the sum, so that rounding never piles up
            del self.waiting[ticket.slo_class], self.ahead_s[ticket.slo_class]

    def change(self, place: Place, ticket: Ticket) -> None:
        """Another key, bin or bucket for a ticket that waits."""
        self.remove(place)
        place.ticket = ticket
        self.add(place)

    def first_like(self, ticket: Ticket) -> Place | None:
        """The first of the lane of this ticket; None where nothing of it waits."""
        lane = self._lanes.get(_name(ticket))
        return lane[0] if lane else None

    def late_like(self, ticket: Ticket) -> list[Place]:
        """The late ones beside this ticket, the oldest first: of its class and API key, without a key of its lane."""
        if ticket.api_key:
            of_class = self.in_band(Band.LATE, ticket.slo_class)
            return sorted((each for each in of_class if each.ticket.api_key == ticket.api_key), key=_rank)
        lane = self._lanes.get(_name(ticket), [])
        first, end = (bisect_left(lane, edge * BAND_S, key=_key) for edge in (Band.LATE, Band.LATE + 1))
        return lane[first:end]

    def heads(self) -> list[Place]:
        """The first of each lane, the most urgent first."""
        return sorted([lane[0] for lane in self._lanes.values()], key=_urgency)

    def by_urgency(self) -> Iterator[Place]:
        """All of them."""
        return merge(*self._lanes.values(), key=_urgency)

    def first_behind(self) -> list[Place]:
        """The first ticket of each lane that stands behind those in time."""
        lanes, behind = self._lanes.values(), Band.NO_TARGET * BAND_S
        found = ((lane, bisect_left(lane, behind, key=_key)) for lane in lanes if _key(lane[-1]) >= behind)
        return [lane[index] for lane, index in found]

    def in_band(self, band: Band, slo_class: str | None = None) -> Iterator[Place]:
        """What waits in one band of the order; None is any class."""
        for name, lane in self._lanes.items():
            if slo_class is None or name.slo_class == slo_class:
                first, end = (bisect_left(lane, edge * BAND_S, key=_key) for edge in (band, band + 1))
                yield from lane[first:end]

    def earlier(self, key: float) -> dict[str, int]:
        """How many go no later than this key, by class in order of their names."""
        counts = Counter[str]()
        for name, lane in sorted(self._lanes.items()):
            counts[name.slo_class] += bisect_right(lane, key, key=_key)
        return counts

    def mean_work_s(self, slo_class: str) -> float:
        return self.ahead_s[slo_class] / self.waiting[slo_class]


def _name(ticket: Ticket) -> LaneName:
    return LaneName(ticket.slo_class, ticket.bin_index, ticket.bucket)


def _key(place: Place) -> float:
    return place.ticket.deadline_key


def _rank(place: Place) -> tuple[float, str]:
    return place.ticket.deadline_key, place.ticket.request_id


def _urgency(place: Place) -> tuple[float, int, int, str, str]:
    ticket = place.ticket
    return ticket.deadline_key, ticket.bin_index, ticket.bucket, ticket.slo_class, ticket.request_id
