"""Where the tickets of one router's requests wait: in the shared state, or here while that is away."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from policies.errors import ReplicaLostError, StateStoreError
from policies.live import Live
from policies.router.admission import NO_LIMITS, Foreseen, Limits, Refusal
from policies.router.order import Band, banded
from policies.router.tickets import Assignment
from router.accounting import Accounting
from router.background import BackgroundTasks
from router.clock import Clock, SharedClock
from router.connections import Connections
from router.ledger import Entry, Ledger, Preparation, State
from router.local_capacity import LocalCapacity
from router.prompt_caches import PromptCaches
from router.state_store import Queued, Snapshot, StateStore
from router.terms import RouterTerms
from router.timing import RequestTiming

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
ENQUEUE_S = 2.0  # its own answer and those of two heartbeats are missing then: what is slow is not away
MISSED_HEARTBEATS = 3  # make a replica lost, or this router cut off


class Queueing(Generic[RequestT]):
    """Puts tickets into a store, and hands on the assignments that come out.

    Attributes:
        snapshot: of the shared state, as of the last heartbeat.
    """

    def __init__(
        self,
        *,
        router_id: str,
        store: StateStore,
        clock: Clock,
        shared_clock: SharedClock,
        terms: Live[RouterTerms],
        ledger: Ledger[RequestT],
        accounting: Accounting,
        caches: PromptCaches[RequestT],
        connections: Connections,
        background: BackgroundTasks,
        place: Callable[[Assignment], None],
        fail: Callable[[Entry[RequestT], str], None],
    ) -> None:
        """Args:
        place: is called with each assignment.
        fail: ends a request that cannot be served, with the reason.
        """
        self._router_id, self._store, self._clock, self._shared_clock = router_id, store, clock, shared_clock
        self._terms, self._ledger, self._accounting, self._caches = terms, ledger, accounting, caches
        self._connections, self._background, self._place, self._fail = connections, background, place, fail
        self._local = LocalCapacity(shared_clock.now)
        self.snapshot = Snapshot()
        self._mine_at_snapshot: dict[str, int] = {}
        self._beat_s = clock.now()

    @property
    def is_alone(self) -> bool:
        """The shared state is away, and requests go to the replicas that are connected."""
        return self._local.in_use

    @property
    def is_cut_off(self) -> bool:
        """The shared state has answered no heartbeat for a while, and no replica is connected without it."""
        silent = self._clock.now() - self._beat_s > MISSED_HEARTBEATS * self._terms.now.config.heartbeat_s
        return silent and not self._connections.all_open

    def arrival_s(self, timing: RequestTiming) -> float:
        """On the clock that all routers share."""
        return self._shared_clock.now() - (self._clock.now() - timing.received_s)

    # Into a queue

    async def prepare(
        self, entry: Entry[RequestT], preparation: Preparation[RequestT], limits: Limits
    ) -> Refusal | None:
        """Limits and quotas count at arrival; then the request is prepared, and queued after that.

        Without a reply it is queued at once. It may have paid, so no quota counts again; what it takes of tokens does,
        in the end.
        """
        try:
            refusal = await self._store.admit(entry.ticket, limits)
        except StateStoreError:
            entry.preparation = None
            return await self.enqueue(entry, replace(limits, quotas=()))
        if refusal is not None:
            self._foresee(entry, refusal.foreseen)
        else:
            self._accounting.charged(entry, limits.quotas)
            if not entry.has_ended:
                entry.move(State.PREPARING)
                entry.preparing = self._background.spawn(self._enqueue_prepared(entry, preparation), "prepare")
        return refusal

    async def _enqueue_prepared(self, entry: Entry[RequestT], preparation: Preparation[RequestT]) -> None:
        try:
            is_read = await preparation.prepare()
            entry.preparing = None
            entry.move(State.QUEUEING)
            unread_tokens = 0 if is_read else entry.ticket.unread_tokens
            # Nothing has overtaken what was not queued.
            entry.ticket = replace(entry.ticket, arrival_s=None, unread_tokens=unread_tokens)
            await self.enqueue(entry, NO_LIMITS)
        except Exception as error:  # of any kind: its client must hear of it
            if not entry.has_ended:
                entry.timing.unserved = error if isinstance(error, StateStoreError) else None
                self._fail(entry, repr(error))

    async def enqueue(self, entry: Entry[RequestT], limits: Limits) -> Refusal | None:
        """Raises StateStoreError: the shared state cannot be reached, and no replica is connected."""
        if entry.trail is not None:
            entry.trail.queued(self._clock.now())
        if entry.ticket.avoids != (avoids := self._connections.out_of_reach):
            entry.ticket = replace(entry.ticket, avoids=avoids)
        try:
            result = await self._into_a_store(entry, limits)
        finally:
            if entry.state is State.QUEUEING:  # else a notice was faster, or it was cancelled
                entry.move(State.WAITING)
        self._foresee(entry, result.foreseen)
        if isinstance(result, Refusal):
            return result
        for assignment in result.assignments:
            self._place(assignment)
        return None

    def _foresee(self, entry: Entry[RequestT], foreseen: Foreseen | None) -> None:
        """The first time counts. Where requests start as they came, nothing is known of a first token: it is at
        infinity."""
        if entry.has_arrived or foreseen is None:
            return
        entry.has_arrived = True
        if math.isfinite(foreseen.first_token_s):
            serving = sum(each.info.takes(entry.slo_class) for each in self._connections.all_open)
            entry.foreseen = foreseen._replace(replicas=serving)
        self._accounting.arrived(entry)

    async def _into_a_store(self, entry: Entry[RequestT], limits: Limits) -> Queued | Refusal:
        """The shared one; while it is away our own, if a replica is connected: then it has less time to answer.

        Our own charges nothing, so that all that the request takes is settled: besides what the shared one charged,
        should it have obeyed without a reply.
        """
        while not self.is_alone:  # also when it was for a moment, in which the shared one came back
            try:
                async with asyncio.timeout(ENQUEUE_S if self._connections.all_open else None):
                    result = await self._store.enqueue(entry.ticket, limits)
            except StateStoreError:
                if not await self._goes_on_alone():
                    raise
            except TimeoutError as error:
                if not await self._goes_on_alone():  # the replica has left meanwhile
                    raise StateStoreError("the shared state does not answer") from error
            else:
                if not isinstance(result, Refusal):
                    self._accounting.charged(entry, limits.quotas)
                return result
        result = await self._local.enqueue(entry.ticket, limits)
        if not isinstance(result, Refusal):
            self._accounting.charged(entry)
        return result

    async def queue_again(self, entry: Entry[RequestT]) -> None:
        """Back into its bin under its old key, or before all others if its client has a part of the answer and it does
        not fill idle capacity. Never refused: it was admitted once. Nothing is done if it has ended or was placed."""
        if not entry.may_queue_again:
            return
        entry.move(State.QUEUEING)
        size = await self._caches.sized(entry.request)
        if entry.state is not State.QUEUEING:
            return
        recallable = entry.ticket.recallable and entry.recalls < self._terms.now.config.max_recalls
        prefixes = self._caches.hits(size, self._connections.replica_ids)
        entry.blocks, entry.loads = size.blocks, size.loads
        ticket = entry.ticket.of_prompt(size.prompt_tokens, prefixes)
        ticket = replace(ticket, arrival_s=None, recallable=recallable)
        if entry.timing.output_tokens and ticket.late_key is not None and not ticket.fills_idle:
            key = banded(Band.RESUMED, self.arrival_s(entry.timing))
            ticket = replace(ticket, deadline_key=key, late_key=None)
        entry.ticket = ticket
        try:
            await self.enqueue(entry, NO_LIMITS)
        except StateStoreError as error:
            logger.warning("request %s waits for the shared state: %s", entry.request_id, error)

    async def give_back(self, entry: Entry[RequestT]) -> None:
        """It was given to a replica that is out of reach, since no other had a slot: others may have that one, and it
        is queued again a heartbeat later."""
        if not self.is_alone:
            try:
                await self._store.cancel([entry.request_id])
            except StateStoreError as error:
                logger.warning("request %s holds a slot that it cannot use: %s", entry.request_id, error)
        await asyncio.sleep(self._terms.now.config.heartbeat_s)
        await self.queue_again(entry)

    # Out of a queue, or off a replica

    def ended(self, request_id: str) -> None:
        """Its place in the queue or its slot goes to the next, while the shared state is away."""
        if self.is_alone:
            self._background.spawn(self._place_next_locally(request_id), "local")

    async def _place_next_locally(self, request_id: str) -> None:
        for assignment in await self._local.ended(request_id, self._router_id):
            self._place(assignment)

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Take tickets of requests that were not sent out of the shared state."""
        if request_ids and not self.is_alone:  # else it is told of all at once when it is back
            self._background.spawn(self._with_retries(lambda: self._store.cancel(request_ids)), "cancel")

    def release(self, replica_id: str, request_id: str) -> None:
        """Give a slot back that its request does not take."""
        release = self._with_retries(lambda: self._store.release(replica_id, [request_id]))
        self._background.spawn(release, "release")

    async def drop(self, replica_id: str) -> None:
        """Out of the tables. No request waits for a shared state that is away: requests can go on without it."""
        if self.is_alone:
            await self._local.lost(replica_id)
        else:
            try:
                await self._store.drop_replica(replica_id)
                return
            except StateStoreError as error:
                logger.warning("replica %s is dropped when the shared state is back: %s", replica_id, error)
        self._background.spawn(self._with_retries(lambda: self._store.drop_replica(replica_id)), "drop")

    async def has_left(self, replica_id: str) -> bool:
        """Whether a replica left in good order: it drained before, or is out of the tables."""
        if self.is_alone:
            return False
        try:
            load = (await self._store.snapshot()).replicas.get(replica_id)
        except StateStoreError:
            return False
        return load is None or load.slots == 0

    async def _with_retries(self, call: Callable[[], Awaitable[object]]) -> None:
        """Until the store answers, for max_wait_s at most: after that its sweeps and leases will have done the same."""
        give_up_s = self._clock.now() + self._terms.now.config.max_wait_s
        while self._clock.now() < give_up_s:
            try:
                await call()
                return
            except StateStoreError as error:
                logger.warning("waiting for the shared state: %s", error)
                await asyncio.sleep(self._terms.now.config.heartbeat_s)

    # The shared state at every heartbeat

    async def beat(self) -> None:
        """Raises StateStoreError: the shared state does not answer. This router goes on alone then, if it can."""
        try:
            await self._beat()
        except StateStoreError:
            if await self._goes_on_alone():
                for assignment in await self._local.due(self._router_id):
                    self._place(assignment)
            raise

    async def _beat(self) -> None:
        asked_s = self._clock.now()
        store_s = await self._store.time_s()
        self._shared_clock.adjust(store_s, asked_s, self._clock.now())
        lost, routers = await self._store.beat_router(self._router_id, self._terms.now.config.silence_s)
        if lost or routers:
            logger.warning("silent and dropped: replicas %s, routers %s", lost, routers)
        self.snapshot = await self._store.snapshot()
        self._mine_at_snapshot = {replica_id: len(ids) for replica_id, ids in self._ledger.by_replica().items()}
        self._beat_s = self._clock.now()
        if self.is_alone:
            self.cancel(self._local.end())

    async def _goes_on_alone(self) -> bool:
        """Takes to our own store what runs and what waits; False when no replica is connected."""
        if self.is_alone:  # another request was first
            return True
        infos = [connection.info for connection in self._connections.all_open]
        if not infos:
            return False
        await self._local.begin(infos, self.snapshot, self._mine_at_snapshot, self._ledger.by_replica())
        for entry in self._ledger.in_state(State.WAITING):
            await self.queue_again(entry)
        return True

    def fail_expired(self) -> None:
        max_wait_s = self._terms.now.config.max_wait_s
        oldest_s = self._clock.now() - max_wait_s
        unsent = [entry for entry in self._ledger.values() if entry.state is not State.RUNNING]
        self._accounting.waits(unsent)
        for entry in unsent:
            if entry.waiting_since_s < oldest_s:
                entry.timing.unserved = ReplicaLostError(
                    f"no replica took it within {self._terms.now.config.max_wait_s} s"
                )
                self._fail(entry, str(entry.timing.unserved))

    async def look_after_waiting(self) -> None:
        """Find out about requests that have waited a while: a notice may have been lost, or the tables with them."""
        oldest_s = self._clock.now() - self._terms.now.config.heartbeat_s
        waiting = [entry for entry in self._ledger.in_state(State.WAITING) if entry.waiting_since_s < oldest_s]
        if not waiting:
            return
        places = await self._store.locate([entry.request_id for entry in waiting])
        for entry, place in zip(waiting, places, strict=True):
            if entry.state is not State.WAITING:
                continue
            if place:
                self._place(Assignment(entry.request_id, place))
            elif place is None:
                self._background.spawn(self.queue_again(entry), "requeue")
