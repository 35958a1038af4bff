"""Policies that are simulated in order to compare with them, and never serve."""

from collections.abc import Callable, Mapping

from policies.router.placement import Offer, Placement, soonest_first_token
from policies.router.tickets import Ticket


class LeastWork:
    """Order by predicted seconds of engine time, least first. Nothing bounds how long a long request waits."""

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return estimated_work_s


class RoundRobin:
    """To each replica in turn."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
        ids = sorted(offers)
        self._last = next((each for each in ids if each > self._last), ids[0])
        return self._last


def most_credit(ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
    """Where most slots are free: a plain balancer by count of requests."""
    return min(offers, key=lambda each: (-offers[each].free_slots, each))


def least_work(ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
    """Where the least predicted work is outstanding, whatever is cached of this prompt; replicas are equally fast."""
    return min(offers, key=lambda each: (offers[each].work_s - ticket.work_at_s(each), each))


def session_affinity(ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
    """Where most of the prompt is cached, however long the queue; where nothing is, the least work."""
    return min(offers, key=lambda each: (ticket.unread_at(each), offers[each].work_s - ticket.work_at_s(each), each))


class LMetric:
    """Where the product of prompt tokens that would be read and of requests that run is the least.

    As a score that needs no weights: D. Zhang et al., LMetric, arXiv 2603.15202, 2026. Of the tokens those that wait to
    be read count too; replicas are equally fast and have equally many slots.
    """

    def __init__(self) -> None:
        self._slots = 0

    def __call__(self, ticket: Ticket, offers: Mapping[str, Offer]) -> str | None:
        self._slots = max(self._slots, max(offer.free_slots for offer in offers.values()))
        return min(offers, key=lambda each: (self._score(offers[each]), -offers[each].free_slots, each))

    def _score(self, offer: Offer) -> float:
        return (offer.ahead_s + offer.reading_s) * (1 + self._slots - offer.free_slots)


PLACEMENTS: Mapping[str, Callable[[], Placement]] = {
    "soonest_first_token": lambda: soonest_first_token,
    "most_credit": lambda: most_credit,
    "least_work": lambda: least_work,
    "session_affinity": lambda: session_affinity,
    "round_robin": RoundRobin,
    "lmetric": LMetric,
}
"""By name, with the one that serves; each call makes a new one."""
