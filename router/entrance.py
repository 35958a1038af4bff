"""What is asked before a request is queued: whether there is room for it, and what its key has to pay."""

import math
from typing import Any

from policies.errors import AdmissionError, StateStoreError
from policies.live import Live
from policies.router.admission import Limits, Refusal, predicted_wait_s
from policies.router.tickets import Ticket
from router.accounting import Accounting
from router.admission import Tenant
from router.classifier import Classified
from router.clock import Clock
from router.queueing import Queueing
from router.settlements import Settlements
from router.terms import RouterTerms
from router.timing import RequestTiming


class Entrance:
    """A driver: the rules are `policies.router.admission`'s."""

    def __init__(
        self,
        *,
        terms: Live[RouterTerms],
        shared_clock: Clock,
        accounting: Accounting,
        queueing: Queueing[Any],
        settlements: Settlements,
    ) -> None:
        self._terms, self._shared_clock, self._accounting = terms, shared_clock, accounting
        self._queueing, self._settlements = queueing, settlements

    def limits(self, classified: Classified, tenant: Tenant | None) -> Limits:
        """Under which a request may queue now."""
        ticket, spare_s = classified.ticket, math.inf
        if ticket.deadline_s is not None:
            spare_s = ticket.deadline_s - self._shared_clock.now() - self._least_reading_s(ticket)
        return self._terms.now.door.limits(ticket.slo_class, tenant, classified.tokens, spare_s)

    def _least_reading_s(self, ticket: Ticket) -> float:
        """Seconds of reading its prompt on the replica that needs least for it, by what they said last."""
        loads = self._queueing.snapshot.replicas.items()
        reading = (ticket.unread_at(each) * ticket.token_s(load.slowness, load.prompt_token_s) for each, load in loads)
        return min(reading, default=0.0)

    def room(self, slo_class: str) -> float:
        """As of the last heartbeat: how many requests of this class the replicas could start, or its queue take.

        Infinite while the shared state is away: what is known of it is old then.
        """
        if self._queueing.is_alone:
            return math.inf
        snapshot = self._queueing.snapshot
        credit = sum(load.credit for load in snapshot.replicas.values())
        waiting = sum(count for (name, _), count in snapshot.lanes.items() if name == slo_class)
        return credit + max(0, self._terms.now.door.max_waiting(slo_class) - waiting)

    def check_room(self, slo_class: str, requests: int, timing: RequestTiming, tenant: Tenant | None = None) -> None:
        """Whether all requests of one client could queue, before they are made.

        Raises:
            AdmissionError: there is less `room`; counted as one refusal.
            StateStoreError: the shared state has been away for a while; counted as one error.
        """
        timing.key = tenant.name if tenant else ""
        if self._queueing.is_cut_off:
            self._accounting.note_end(slo_class, 0, timing, "error")
            raise StateStoreError("the shared state does not answer")
        if (room := self.room(slo_class)) < requests:
            snapshot = self._queueing.snapshot
            wait_s = predicted_wait_s(snapshot.waiting_s, [load.slowness for load in snapshot.replicas.values()])
            refusal = Refusal(f"room for {room} of {requests} requests", wait_s)
            raise self._accounting.refused(refusal, slo_class, timing)

    async def charge(self, tenant: Tenant | None, tokens: float) -> None:
        """Take tokens out of a key's allowance for work that makes no request, before it is done.

        What is charged while the shared state is away counts when that is back.

        Raises:
            AdmissionError: the allowance is spent.
        """
        if (quota := tenant.token_quota(tokens) if tenant else None) is None:
            return
        if self._queueing.is_alone:
            self._settlements.add(quota, tokens)
        elif (refusal := await self._settlements.charge(quota)) is not None:
            why = f"{refusal.reason} are spent, try again in {refusal.retry_after_s:.1f} s"
            raise AdmissionError(why, refusal.retry_after_s)
