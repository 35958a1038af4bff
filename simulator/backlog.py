"""Requests of batches beside others: as many in the system as the policy lets, while the others come."""

from collections.abc import Callable, Iterable, Sequence

from policies.batches.in_flight import InFlight, InFlightConfig, Load
from simulator.core import Event, Kind
from simulator.requests import Request
from simulator.router import Router

SLO_CLASS = "offline"
LOOK_S = 1.0


class Backlog:
    """Does what the live runner of batches does; its requests are promised nothing.

    Attributes:
        begun: the requests that were handed out, in their order.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        config: InFlightConfig,
        router: Router,
        slots: Callable[[], int],
        busy: Callable[[], bool],
    ) -> None:
        """Args:
        slots: of all replicas, now.
        busy: whether others are still to come or end: it stops with them.
        """
        self.begun: list[Request] = []
        self._requests, self._router, self._slots, self._busy = requests, router, slots, busy
        self._own = set(requests)
        for request in requests:
            request.slo_class = SLO_CLASS
        self._policy = InFlight(config)
        self._in_flight, self._missed = 0, 0

    def start(self) -> list[Event]:
        return [Event(0.0, Kind.TIMER, self._look)] if self._requests else []

    def _look(self, now_s: float) -> Iterable[Event]:
        if not self._busy():
            return []
        idle = self._router.waiting_of(SLO_CLASS)
        promised = self._router.waiting - idle
        load = Load(slots=self._slots(), waiting_idle=idle, waiting_promised=promised, missed=self._missed)
        self._policy.observe(load, self._in_flight)
        return [*self._fill(now_s), Event(now_s + LOOK_S, Kind.TIMER, self._look)]

    def _fill(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self._busy() and self._in_flight < self._policy.limit and len(self.begun) < len(self._requests):
            request = self._requests[len(self.begun)]
            request.arrival_s = now_s
            self.begun.append(request)
            self._in_flight += 1
            events += self._router.arrive(request, now_s)
        return events

    def others(self, requests: Iterable[Request]) -> int:
        """How many of them are none of these."""
        return sum(request not in self._own for request in requests)

    def ended(self, requests: Iterable[Request], now_s: float) -> list[Event]:
        """Requests have ended; those of others tell it whether they kept their promises."""
        for request in requests:
            if request in self._own:
                self._in_flight -= 1
            else:
                self._missed += request.missed_a_promise
        return self._fill(now_s)
