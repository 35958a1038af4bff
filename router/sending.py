"""From an assignment to its replica: at once where a connection stands, else when it is open."""

import logging
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from policies.errors import InputError
from policies.router.tickets import Assignment, Ticket
from router.accounting import Accounting
from router.background import BackgroundTasks
from router.clock import Clock
from router.codec import EngineCodec
from router.connection import ReplicaConnection
from router.connections import Connections
from router.endings import Endings
from router.ledger import Entry, Ledger, State
from router.prompt_caches import PromptCaches
from router.queueing import Queueing
from router.timing import RequestTiming
from router.wire import Buffer

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
FRESH_S = 0.005  # for which the time that an encoded request has left is good: less than an engine step


class Sending(Generic[RequestT]):
    def __init__(
        self,
        *,
        codec: EngineCodec[RequestT, Any],
        clock: Clock,
        ledger: Ledger[RequestT],
        accounting: Accounting,
        caches: PromptCaches[RequestT],
        connections: Connections,
        queueing: Queueing[RequestT],
        endings: Endings[RequestT, Any],
        background: BackgroundTasks,
    ) -> None:
        self._codec, self._clock, self._ledger = codec, clock, ledger
        self._accounting, self._caches, self._connections = accounting, caches, connections
        self._queueing, self._endings, self._background = queueing, endings, background

    def place(self, assignment: Assignment) -> None:
        """Send a request to the replica that it was given. A slot that it does not take goes back."""
        entry, replica_id = self._ledger.get(assignment.request_id), assignment.replica_id
        if entry is None:  # over
            self._queueing.release(replica_id, assignment.request_id)
            self._queueing.ended(assignment.request_id)
        elif entry.state in (State.QUEUEING, State.WAITING):
            entry.assign(replica_id)
            if entry.planned_key is not None:
                unplaced = self._ledger.in_state(State.QUEUEING, State.WAITING, State.RECALLED)
                self._accounting.planned(entry, entry.planned_key, (other.planned_key for other in unplaced))
            if (connection := self._connections.get(replica_id)) is not None:
                self._send(entry, connection)
            elif replica_id in self._connections.out_of_reach:
                self._give_back(entry)
            else:
                self._background.spawn(self._connect_and_send(entry, replica_id), "place")
        elif entry.state is not State.RECALLED and entry.replica_id != replica_id:  # elsewhere; else told twice
            self._queueing.release(replica_id, assignment.request_id)

    async def _connect_and_send(self, entry: Entry[RequestT], replica_id: str) -> None:
        try:
            await self._connections.open(replica_id)
        except Exception as error:  # of any kind: the request must go on elsewhere
            logger.warning("request %s cannot reach replica %s: %s", entry.request_id, replica_id, error)
        if entry.state is not State.ASSIGNED or entry.replica_id != replica_id:
            return
        if (connection := self._connections.get(replica_id)) is not None:
            self._send(entry, connection)
        else:
            self._give_back(entry)

    def _give_back(self, entry: Entry[RequestT]) -> None:
        """No move: it was not on board, and a replica can stay out of reach for longer than any number of tries."""
        entry.take_back("lost", self._clock.now())
        self._background.spawn(self._queueing.give_back(entry), "give back")

    def _send(self, entry: Entry[RequestT], connection: ReplicaConnection) -> None:
        try:
            connection.add(self._encoded(entry))
        except Exception as error:  # too large, or beyond the codec: no other replica could take it either
            self._endings.fail(entry, repr(error))
            return
        entry.run(connection, self._clock.now())
        self._caches.sent(entry, connection.info.replica_id)
        self._accounting.started(entry)

    def _encoded(self, entry: Entry[RequestT]) -> Sequence[Buffer]:
        encoded, entry.encoded = entry.encoded, None
        if entry.preparation is not None:
            prepared = entry.preparation.first_sending(self._as_sent(entry.request, entry.ticket, entry.timing))
            if prepared is not None:
                return self._codec.encode_request(prepared)
        if encoded is not None and self._clock.now() - entry.waiting_since_s < FRESH_S:
            return encoded
        return self._codec.encode_request(self._as_sent(entry.request, entry.ticket, entry.timing))

    def encoded_at_first(self, request: RequestT, ticket: Ticket, timing: RequestTiming) -> Sequence[Buffer]:
        """Before it is queued: a client is told that its request cannot be sent, instead of getting a stream that ends.

        Raises:
            InputError: it holds what no engine can be sent.
        """
        try:
            return self._codec.encode_request(self._as_sent(request, ticket, timing))
        except (OverflowError, TypeError, ValueError) as error:
            raise InputError(f"it cannot be sent to an engine: {error}") from error

    def _as_sent(self, request: RequestT, ticket: Ticket, timing: RequestTiming) -> RequestT:
        """With the time that it has left now. What its client has seen a part of has no first token to come."""
        resumed, left = timing.output_tokens > 0, timing.promise.left(self._clock.now() - timing.received_s)
        return self._codec.with_ticket(
            request,
            ticket,
            ttft_left_s=None if resumed else left.ttft_s,
            e2e_left_s=left.e2e_s,
            resumed=resumed,
        )
