"""The routed engine client: stands where an engine's own client stands and spreads requests over the replicas.

The life of a request, and where each part of it stands:

1. `RoutedClient.submit`: it is classified, gets a ticket, and is encoded as it will be sent first.
2. `router.entrance` tells the limits under which it may queue, `router.queueing` brings its ticket into the shared
   state, or into a store of this router's own while that is away. An assignment to a replica comes out.
3. `router.sending` sends it there over one kept-open connection.
4. `router.outputs` passes its tokens on, which come back over the same one.
5. `router.recovery` takes it off a replica that is lost, or that wants its slot for another, and it is queued again.
6. `router.endings` ends it, `router.accounting` notes what it took.

In which state a request is, and which may follow, stands in `router.ledger`; which part knows which other, below in
`routed_client`. None of them knows more of the engine's structures than `EngineCodec` says.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from policies.errors import StateStoreError
from policies.live import Live
from policies.router.promise import NO_PROMISE, Promise
from policies.router.tickets import Recall
from predictor.learned import Foresight, Question
from router import wire
from router.accounting import Accounting
from router.admission import Tenant
from router.background import BackgroundTasks
from router.cached_blocks import CachedBlocks
from router.classifier import Classified, TicketWriter
from router.clock import Clock, SharedClock
from router.codec import EngineCodec, RequestSize
from router.connections import Connections
from router.endings import Endings
from router.entrance import Entrance
from router.event_loop import CoreWait, look_for_core_wait, look_for_lag
from router.ledger import Entry, Ledger, Preparation
from router.metrics import RouterMetrics
from router.outputs import Outputs
from router.prompt_caches import PromptCaches
from router.queueing import MISSED_HEARTBEATS, Queueing
from router.recovery import Recovery
from router.sending import Sending
from router.sessions import begin
from router.settlements import Bill, Settlements
from router.state_store import Snapshot, StateStore
from router.terms import RouterTerms
from router.timing import RequestTiming

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")
OUTPUT_QUEUE_FRAMES = 1024
OUT_OF_REACH = 0.8  # of the silence that makes a replica dead: with the time of a connect that is over by then


@dataclass(slots=True, eq=False, kw_only=True)
class RoutedClient(Generic[RequestT, OutputsT]):
    """One for each router process, made by `routed_client`; `start` before use, `close` after."""

    router_id: str
    store: StateStore
    codec: EngineCodec[RequestT, OutputsT]
    classifier: TicketWriter
    terms: Live[RouterTerms]
    clock: Clock
    metrics: RouterMetrics
    background: BackgroundTasks
    ledger: Ledger[RequestT]
    accounting: Accounting
    caches: PromptCaches[RequestT]
    connections: Connections
    entrance: Entrance
    queueing: Queueing[RequestT]
    sending: Sending[RequestT]
    recovery: Recovery[RequestT]
    endings: Endings[RequestT, OutputsT]
    outputs: "asyncio.Queue[OutputsT]"

    async def start(self) -> None:
        """Raises StateStoreError when the shared state cannot be reached."""
        await self.queueing.beat()
        subscribed = asyncio.Event()
        self.repeat(lambda: self._listen(subscribed), "listen")
        self.repeat(self._heartbeat, "heartbeat")
        self.repeat(self._exchange, "exchange")
        self.repeat(self._settle, "settle")
        self.repeat(self._ping, "ping", pause_s=wire.PING_S)
        self.repeat(partial(look_for_lag, self.metrics.loop_lag_s.observe), "event loop", pause_s=0)
        core_wait = partial(look_for_core_wait, CoreWait(), self.metrics.core_wait_s.inc)
        self.repeat(core_wait, "core wait", pause_s=0)
        silence_s = self.terms.now.config.silence_s
        try:
            async with asyncio.timeout(silence_s):
                await subscribed.wait()
        except TimeoutError as error:
            await self.background.close()
            raise StateStoreError(f"no subscription to notices within {silence_s} s") from error

    async def close(self) -> None:
        await self.background.close()
        self.connections.close()
        self.accounting.note_overdrafts(self.ledger.values())
        await self.accounting.settlements.close()
        try:
            await self.store.remove_router(self.router_id)
        except StateStoreError as error:
            logger.warning("left without a word to the shared state: %s", error)

    def repeat(self, call: Callable[[], Awaitable[None]], name: str, *, pause_s: float | None = None) -> None:
        """Call it for ever, until this client closes; without a pause as often as it beats. Failures are counted."""
        self.background.repeat(call, self.terms.now.config.heartbeat_s if pause_s is None else pause_s, name)

    # The life of a request

    async def submit(
        self,
        request: RequestT,
        *,
        slo_class: str,
        timing: RequestTiming,
        promise: Promise = NO_PROMISE,
        tenant: Tenant | None = None,
        question: Question | None = None,
        size: RequestSize | None = None,
        preparation: Preparation[RequestT] | None = None,
    ) -> None:
        """Queue a request; its outputs come through `next_outputs`.

        Args:
            promise: counts from when the request was received.
            size: as `PromptCaches.sized` told it, where that was asked already.
            preparation: comes first; limits and quotas count now, and once.

        Raises:
            InputError: a request of this id is not over yet, or it holds what no engine can be sent.
            AdmissionError: the limits of its class or the quotas of its tenant do not allow it.
            StateStoreError: the shared state cannot be reached, and no replica is connected.
        """
        arrival_s = self.queueing.arrival_s(timing)
        promise = begin(timing.session, self.classifier.sessions, arrival_s, promise)
        timing.promise, timing.key = promise, tenant.name if tenant else ""
        foresight = None if question is None else await self.classifier.foresee(question, promise)
        size = size or await self.caches.sized(request)
        replica_ids = self.connections.replica_ids
        classified = self.classifier.ticket(size, slo_class, self.router_id, arrival_s, replica_ids, foresight, promise)
        entry = self._entry(request, size, classified, timing, foresight)
        entry.bill, entry.preparation = Bill.of(tenant, classified.prompt_tokens, classified.tokens), preparation
        self.ledger.add(entry)
        try:
            limits = self.entrance.limits(classified, tenant)
            if preparation is None:
                refusal = await self.queueing.enqueue(entry, limits)
            else:
                refusal = await self.queueing.prepare(entry, preparation, limits)
        except BaseException as error:
            # Whatever failed, the call may have been obeyed; what it charged stands.
            self.endings.cancel([entry], "error" if isinstance(error, StateStoreError) else "cancelled")
            raise
        if refusal is not None:
            if not entry.has_ended:
                self.ledger.end(entry)
            raise self.accounting.refused(refusal, slo_class, timing, entry)
        if self.terms.now.door.refuses_late(slo_class):
            self.accounting.taken(slo_class)

    def _entry(
        self,
        request: RequestT,
        size: RequestSize,
        classified: Classified,
        timing: RequestTiming,
        foresight: Foresight | None,
    ) -> Entry[RequestT]:
        """Raises InputError: it holds what no engine can be sent."""
        ticket = replace(classified.ticket, api_key=timing.key)
        if (trail := timing.trail) is not None:
            trail.classified(ticket, size.prompt_tokens, size.max_output_tokens, self.clock.now())
            request = self.codec.with_trace(request, trail.headers)
        if ticket.fills_idle:
            recallable = self.terms.now.config.max_recalls > 0 and self.codec.resumable(request)
            ticket = replace(ticket, recallable=recallable)
        begins_anew = self.codec.in_one_piece(request) and not self.codec.resumable(request)
        return Entry(
            request=request,
            ticket=ticket,
            metrics=self.metrics.of(ticket.slo_class),
            timing=timing,
            waiting_since_s=self.clock.now(),
            prompt_tokens=size.prompt_tokens,
            planned_key=classified.planned_key,
            foresight=foresight,
            encoded=self.sending.encoded_at_first(request, ticket, timing),
            blocks=size.blocks,
            loads=size.loads,
            held_back=[] if begins_anew else None,
        )

    def check_room(self, slo_class: str, requests: int, timing: RequestTiming, tenant: Tenant | None = None) -> None:
        """As `Entrance.check_room`."""
        self.entrance.check_room(slo_class, requests, timing, tenant)

    async def next_outputs(self) -> OutputsT:
        """What one frame of a replica brought."""
        return await self.outputs.get()

    async def cancel(self, request_ids: Sequence[str], outcome: str) -> None:
        """Stop requests wherever they are; `outcome` is how they are counted. Unknown ids are ignored."""
        known = [self.ledger[each] for each in dict.fromkeys(request_ids) if each in self.ledger]
        self.endings.cancel(known, outcome)

    # In the background

    async def _listen(self, subscribed: asyncio.Event) -> None:
        async for notices in self.store.notices(self.router_id):
            subscribed.set()
            for notice in notices:
                if isinstance(notice, Recall):
                    self.recovery.recall(notice.request_id)
                else:
                    self.sending.place(notice)

    async def _heartbeat(self) -> None:
        self.queueing.fail_expired()
        await self.queueing.beat()
        for request_id in self.snapshot.recalled:  # the notice may have been lost
            self.recovery.recall(request_id)
        for connection in self.connections.missing(self.snapshot.replicas):
            await self.recovery.lost(connection)
        self.connections.try_again(self.snapshot.replicas)
        if self.caches.have_a_say:  # replicas tell what they have cached to those that are connected
            self.connections.begin(self.snapshot.replicas)
        await self.queueing.look_after_waiting()

    async def _ping(self) -> None:
        for connection in self.connections.all_open:
            connection.ping()

    async def _exchange(self) -> None:
        await self.classifier.exchange(self.store, self.clock.now())
        self.metrics.prefix_entries.set(self.classifier.prefixes.entries)
        self.metrics.note_sessions(self.classifier.sessions)
        await self.store.publish(self.router_id, self.accounting.pages(), self.terms.now.config.silence_s)

    async def _settle(self) -> None:
        self.accounting.note_overdrafts(self.ledger.values())
        await self.accounting.settlements.send()

    # What others ask

    @property
    def reaches_no_engine(self) -> bool:
        """It has requests, and all replicas that live have been out of reach for a while."""
        for_s = OUT_OF_REACH * self.terms.now.config.silence_s
        return bool(self.ledger) and self.connections.reaches_none(self.snapshot.replicas, for_s)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the shared state, as of the last heartbeat."""
        return self.queueing.snapshot

    def hits(self, size: RequestSize) -> Mapping[str, int]:
        """Tokens of its prompt that replicas are taken to have cached, by the id of those that have most."""
        return dict(self.caches.hits(size, self.connections.replica_ids))

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """As `Connections.statuses`."""
        return await self.connections.statuses()


def routed_client(
    *,
    router_id: str,
    store: StateStore,
    codec: EngineCodec[RequestT, OutputsT],
    classifier: TicketWriter,
    terms: Live[RouterTerms],
    clock: Clock,
    shared_clock: SharedClock,
    metrics: RouterMetrics,
    tls: ssl.SSLContext | None = None,
) -> RoutedClient[RequestT, OutputsT]:
    """A client with all its parts. Each knows parts that are made before it; what goes the other way is a lambda.

    Args:
        tls: of connections to replicas; None makes plain ones.
    """
    ledger, outputs = Ledger[RequestT](), asyncio.Queue[OutputsT](OUTPUT_QUEUE_FRAMES)
    background = BackgroundTasks(lambda task: metrics.task_failures.labels(task).inc())
    settlements = Settlements(router_id, store)
    accounting = Accounting(metrics=metrics, clock=clock, shared_clock=shared_clock, settlements=settlements)
    caches = PromptCaches(
        codec=codec,
        prefixes=classifier.prefixes,
        blocks=CachedBlocks(clock, metrics),
        prompt_token_s=classifier.prompt_token_s,
        metrics=metrics,
    )
    connections = Connections(
        router_id=router_id,
        engine_version=codec.engine_version,
        tls=tls,
        store=store,
        clock=clock,
        metrics=metrics,
        lost_after_looks=MISSED_HEARTBEATS,
        drop_after_s=MISSED_HEARTBEATS * terms.now.config.heartbeat_s,
        opened=lambda connection: background.spawn(reader.read(connection), "connection"),
        is_needed=ledger.needs,
        drop=lambda replica_id: queueing.drop(replica_id),
    )
    queueing = Queueing(
        router_id=router_id,
        store=store,
        clock=clock,
        shared_clock=shared_clock,
        terms=terms,
        ledger=ledger,
        accounting=accounting,
        caches=caches,
        connections=connections,
        background=background,
        place=lambda assignment: sending.place(assignment),
        fail=lambda entry, why: endings.fail(entry, why),
    )
    endings = Endings(
        codec=codec,
        outputs=outputs,
        ledger=ledger,
        accounting=accounting,
        classifier=classifier,
        queueing=queueing,
        background=background,
    )
    sending = Sending(
        codec=codec,
        clock=clock,
        ledger=ledger,
        accounting=accounting,
        caches=caches,
        connections=connections,
        queueing=queueing,
        endings=endings,
        background=background,
    )
    recovery = Recovery(
        codec=codec,
        clock=clock,
        terms=terms,
        metrics=metrics,
        ledger=ledger,
        caches=caches,
        connections=connections,
        queueing=queueing,
        endings=endings,
        background=background,
    )
    reader = Outputs(
        codec=codec,
        outputs=outputs,
        clock=clock,
        ledger=ledger,
        caches=caches,
        connections=connections,
        recovery=recovery,
        endings=endings,
    )
    entrance = Entrance(
        terms=terms, shared_clock=shared_clock, accounting=accounting, queueing=queueing, settlements=settlements
    )
    return RoutedClient(
        router_id=router_id,
        store=store,
        codec=codec,
        classifier=classifier,
        terms=terms,
        clock=clock,
        metrics=metrics,
        background=background,
        ledger=ledger,
        accounting=accounting,
        caches=caches,
        connections=connections,
        entrance=entrance,
        queueing=queueing,
        sending=sending,
        recovery=recovery,
        endings=endings,
        outputs=outputs,
    )
