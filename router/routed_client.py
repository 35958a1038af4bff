"""The routed engine client: stands where an engine's own client stands and spreads requests over the replicas.

A request is queued under a ticket, gets a replica from the shared state, travels to it over one kept-open connection,
and its tokens come back over the same one. The client knows nothing of the engine's structures but what `EngineCodec`
says. When a replica is lost, each request on it is queued again under the same id: from the start when nothing was sent
yet; resumed from prompt plus tokens sent when that continues the same answer; else replayed, with the tokens that were
already sent taken out of the new stream and compared. No request ends because a replica did.
"""

import asyncio
import logging
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from policies.checks import require_at_least, require_positive
from policies.errors import (
    AdmissionError,
    InputError,
    ReplicaLostError,
    SluiceError,
    StateStoreError,
)
from policies.router.admission import NO_LIMITS, QUEUE_REASONS, Limits, Quota, Refusal, predicted_wait_s
from policies.router.order import Band, banded
from policies.router.promise import NO_PROMISE, Promise
from predictor.learned import Foresight, Question
from router.admission import Door, Tenant
from router.background import BackgroundTasks
from router.cached_blocks import BlockChanges, BlockHashes, CachedBlocks
from router.classifier import Classified, TicketWriter
from router.clock import Clock, SharedClock
from router.codec import WHOLE, EngineCodec, Output, RequestSize
from router.connection import ReplicaConnection
from router.connections import Connections
from router.event_loop import CoreWait, look_for_core_wait, look_for_lag
from router.local_capacity import LocalCapacity
from router.metrics import ClassMetrics, RouterMetrics
from router.recent import RecentRequests
from router.retry_truth import RetryTruth
from router.settlements import Bill, Settlements
from router.state_store import Assignment, Recall, Snapshot, StateStore, Ticket
from router.timing import RequestTiming
from router.trail import Stay
from router.wire import Buffer

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")
OUTPUT_QUEUE_FRAMES = 1024
RECALL_TIMEOUT_S = 10.0
ENQUEUE_S = 1.0  # what stands still would else cost a new request all the time that a call has
MISSED_HEARTBEATS = 3  # make a replica lost, or this router cut off
LONG_PROMPT_TOKENS = 8192  # take a millisecond to hash, or more
FRESH_S = 0.005  # for which the time that an encoded request has left is good: less than an engine step


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedClientConfig:
    """How long and how much.

    Attributes:
        max_wait_s: the longest that a request may wait for a replica before it fails.
        max_moves: how often one request may be moved off a lost replica that it was sent to.
        max_recalls: how often one that fills idle capacity may lose its slot to a more urgent one.
        heartbeat_s, silence_s: how often this router beats, and the silence after which it is taken for dead.

    Raises:
        ConfigError: max_moves or max_recalls is below 0, or a time is not positive.
    """

    max_wait_s: float = 600.0
    max_moves: int = 3
    max_recalls: int = 3
    heartbeat_s: float = 1.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "max_moves", "max_recalls")
        require_positive(self, "max_wait_s", "heartbeat_s", "silence_s")


class Preparation(Protocol[RequestT]):
    """What is done elsewhere for a request before it is queued; what came of it goes along when it is first sent."""

    async def prepare(self) -> bool:
        """Ends in bounded time, and whatever came of it: the request is queued then.

        Returns whether its replica need not read the prompt.
        """

    def first_sending(self, request: RequestT) -> RequestT | None:
        """The request with what was prepared, before it is sent; None to send it as it is, as after the first time."""

    def answered(self, output: Output) -> None:
        """The first output came, and may be changed before it is passed on."""

    def ended(self, request: RequestT) -> None:
        """The request is over without an output: what was prepared is not wanted any more."""


@dataclass(slots=True, eq=False)
class Entry(Generic[RequestT]):
    """One request until its end: it is being queued, then waits in its bin, then goes to a replica, then runs there.

    Attributes:
        queueing: its ticket is on the way into the shared state.
        replica_id: where it goes or runs, None before.
        connection: the one over which it was sent, None before.
        continuations: how often it went on with a part of its answer sent.
        planned_key: its deadline key by the policies, where requests are served in another order.
        prompt_tokens: of the client's own prompt; that of a request that was moved holds a part of its answer too.
        foresight: what the learned predictor said of it, None where there is none.
        predicted_hit_tokens: of its prompt, what its replica was taken to have cached when it was sent; None once its
            engine has said what it had.
        encoded: as it will be sent at once; None where it has changed since.
        blocks: of its prompt, until it is sent; none where no replica tells what it has cached.
        bill: of its key's tokens, None where those have no limit.
        held_back: outputs of an answer in one piece that could not be resumed, until its end; None passes them on.
        preparation: None without one, and once its first output has come.
        preparing: the preparation while it goes on; the ticket comes after it.
        stay: of one that is traced, until the first output of the replica that it is on.
    """

    request: RequestT
    ticket: Ticket
    slo_class: str
    metrics: ClassMetrics
    timing: RequestTiming
    waiting_since_s: float
    prompt_tokens: int
    queueing: bool = True
    replica_id: str | None = None
    connection: ReplicaConnection | None = None
    sent: list[int] = field(default_factory=list)
    repeats: deque[int] = field(default_factory=deque)
    moves: int = 0
    recalls: int = 0
    continuations: int = 0
    planned_key: float | None = None
    foresight: Foresight | None = None
    predicted_hit_tokens: int | None = None
    encoded: Sequence[Buffer] | None = None
    blocks: BlockHashes = ()
    bill: Bill | None = None
    held_back: list[Output] | None = None
    preparation: Preparation[RequestT] | None = None
    preparing: "asyncio.Task[None] | None" = None
    stay: Stay | None = None

    @property
    def request_id(self) -> str:
        return self.ticket.request_id


class RoutedClient(Generic[RequestT, OutputsT]):
    """One for each router process; `start` before use, `close` after."""

    def __init__(
        self,
        *,
        router_id: str,
        store: StateStore,
        codec: EngineCodec[RequestT, OutputsT],
        classifier: TicketWriter,
        door: Door,
        clock: Clock,
        shared_clock: SharedClock,
        metrics: RouterMetrics,
        config: RoutedClientConfig,
    ) -> None:
        self.router_id = router_id
        self.snapshot = Snapshot()
        self._mine_at_snapshot: dict[str, int] = {}
        self._beat_s = clock.now()
        self._store, self._codec, self._classifier, self._config = store, codec, classifier, config
        self._door, self._local = door, LocalCapacity(shared_clock.now)
        self._retries = RetryTruth(clock.now, metrics.note_retry)
        self._settlements = Settlements(router_id, store)
        self._recent = RecentRequests()
        self._clock, self._shared_clock, self._metrics = clock, shared_clock, metrics
        self._blocks = CachedBlocks(clock, metrics)
        self._entries: dict[str, Entry[RequestT]] = {}
        self._outputs: asyncio.Queue[OutputsT] = asyncio.Queue(OUTPUT_QUEUE_FRAMES)
        self._background = BackgroundTasks(lambda task: metrics.task_failures.labels(task).inc())
        self._connections = Connections(
            router_id=router_id,
            engine_version=codec.engine_version,
            store=store,
            clock=clock,
            metrics=metrics,
            lost_after_looks=MISSED_HEARTBEATS,
            drop_after_s=MISSED_HEARTBEATS * config.heartbeat_s,
            opened=lambda connection: self._background.spawn(self._read(connection), "connection"),
            is_needed=self._is_needed,
            drop=self._drop,
        )

    async def start(self) -> None:
        """Raises StateStoreError when the shared state cannot be reached."""
        await self._beat()
        subscribed = asyncio.Event()
        self._background.repeat(lambda: self._listen(subscribed), self._config.heartbeat_s, "listen")
        self._background.repeat(self._heartbeat, self._config.heartbeat_s, "heartbeat")
        self._background.repeat(self._exchange, self._config.heartbeat_s, "exchange")
        self._background.repeat(lambda: look_for_lag(self._metrics.loop_lag_s.observe), 0, "event loop")
        core_wait = CoreWait()
        self._background.repeat(lambda: look_for_core_wait(core_wait, self._metrics.core_wait_s.inc), 0, "core wait")
        self._background.repeat(self._settle, self._config.heartbeat_s, "settle")
        try:
            async with asyncio.timeout(self._config.silence_s):
                await subscribed.wait()
        except TimeoutError as error:
            await self._background.close()
            raise StateStoreError(f"no subscription to notices within {self._config.silence_s} s") from error

    def adopt(self, door: Door, config: RoutedClientConfig) -> None:
        """Go by other limits from now on; how often it beats stays."""
        self._door, self._config = door, config

    async def close(self) -> None:
        await self._background.close()
        self._connections.close()
        self._note_overdrafts()
        await self._settlements.close()
        try:
            await self._store.remove_router(self.router_id)
        except StateStoreError as error:
            logger.warning("left without a word to the shared state: %s", error)

    @property
    def bin_edges(self) -> tuple[float, ...]:
        """In force in this router, in predicted output tokens."""
        return self._classifier.bin_edges

    @property
    def bucket_edges(self) -> tuple[float, ...]:
        """In force in this router, in prompt tokens; none where prompts are not told apart."""
        return self._classifier.bucket_edges

    @property
    def prefix_entries(self) -> int:
        """(replica, block) pairs that this router remembers of prompts."""
        return self._classifier.prefix_entries

    def room(self, slo_class: str) -> float:
        """As of the last heartbeat: how many requests of this class the replicas could start, or its queue take.

        Infinite while the shared state is away: what is known of it is old then.
        """
        if self._local.in_use:
            return math.inf
        credit = sum(load.credit for load in self.snapshot.replicas.values())
        waiting = sum(count for (name, _), count in self.snapshot.lanes.items() if name == slo_class)
        return credit + max(0, self._door.max_waiting(slo_class) - waiting)

    def check_room(self, slo_class: str, requests: int, timing: RequestTiming, tenant: Tenant | None = None) -> None:
        """Before so many requests of one client are made: whether all of them could queue.

        Raises:
            AdmissionError: there is less `room`; counted as one refusal.
            StateStoreError: it `is_cut_off`; counted as one error.
        """
        timing.key = tenant.name if tenant else ""
        if self.is_cut_off:
            self._note_end(slo_class, 0, timing, "error")
            raise StateStoreError("the shared state does not answer")
        if (room := self.room(slo_class)) < requests:
            slowness = [load.slowness for load in self.snapshot.replicas.values()]
            wait_s = predicted_wait_s(self.snapshot.waiting_s, slowness)
            refusal = Refusal(f"room for {room} of {requests} requests", wait_s)
            raise self._refused(refusal, slo_class, 0, timing, counts_as="max_waiting")

    @property
    def is_alone(self) -> bool:
        """The shared state is away, and requests go to the replicas that are connected."""
        return self._local.in_use

    @property
    def context_tokens(self) -> float | None:
        """What a request of this router holds on its replica, on average; None while none runs."""
        running = [entry for entry in self._entries.values() if entry.connection is not None]
        held = sum(self._codec.size(entry.request).prompt_tokens + len(entry.sent) for entry in running)
        return held / len(running) if running else None

    @property
    def is_cut_off(self) -> bool:
        """The shared state has answered no heartbeat for a while, and no replica is connected without it."""
        silent = self._clock.now() - self._beat_s > MISSED_HEARTBEATS * self._config.heartbeat_s
        return silent and not self._connections.all_open

    async def next_outputs(self) -> OutputsT:
        return await self._outputs.get()

    def repeat(self, call: Callable[[], Awaitable[None]], name: str, *, pause_s: float | None = None) -> None:
        """Call it for ever, until this client closes; without a pause as often as it beats. Failures are counted."""
        self._background.repeat(call, self._config.heartbeat_s if pause_s is None else pause_s, name)

    # From the front end

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
            size: as `sized` told it, where it was asked already.
            preparation: comes first; limits and quotas count now, and once.

        Raises:
            InputError: a request of this id is not over yet, or it holds what no engine can be sent.
            AdmissionError: the limits of its class or the quotas of its tenant do not allow it.
            StateStoreError: the shared state cannot be reached, and no replica is connected.
        """
        timing.promise, timing.key = promise, tenant.name if tenant else ""
        foresight = None if question is None else await self._classifier.foresee(question)
        size = size or await self.sized(request)
        if size.request_id in self._entries:
            raise InputError(f"request {size.request_id} is not over yet: its input cannot be continued")
        arrival_s, replica_ids = self._arrival_s(timing), self._connections.replica_ids
        classified = self._classifier.ticket(
            size, slo_class, self.router_id, arrival_s, replica_ids, foresight, promise
        )
        entry = self._entry(request, size, classified, timing)
        entry.foresight, entry.preparation = foresight, preparation
        entry.bill = Bill.of(tenant, size.prompt_tokens, classified.tokens)
        self._entries[size.request_id] = entry
        try:
            limits = self._limits(classified, tenant)
            refusal = await (self._enqueue if preparation is None else self._admit)(entry, limits)
        except BaseException as error:
            # Whatever failed, the call may have been obeyed; what it charged stands.
            self._cancel([entry], "error" if isinstance(error, StateStoreError) else "cancelled")
            raise
        if refusal is not None:
            if self._lives(entry):
                del self._entries[entry.request_id]
            raise self._refused(refusal, slo_class, entry.ticket.bin_index, timing)
        if self._door.refuses_late(slo_class):
            self._retries.taken(slo_class)

    def _entry(
        self, request: RequestT, size: RequestSize, classified: Classified, timing: RequestTiming
    ) -> Entry[RequestT]:
        """Encoded as it is sent first. Raises InputError: it holds what no engine can be sent."""
        ticket = replace(classified.ticket, api_key=timing.key)
        if (trail := timing.trail) is not None:
            trail.classified(ticket, size.prompt_tokens, size.max_output_tokens, self._clock.now())
            request = self._codec.with_trace(request, trail.headers)
        if ticket.fills_idle:
            recallable = self._config.max_recalls > 0 and self._codec.resumable(request)
            ticket = replace(ticket, recallable=recallable)
        metrics = self._metrics.of(ticket.slo_class)
        entry = Entry(request, ticket, ticket.slo_class, metrics, timing, self._clock.now(), size.prompt_tokens)
        entry.planned_key, entry.blocks = classified.planned_key, size.blocks
        entry.encoded = self._encode(self._as_sent(entry))
        if self._codec.in_one_piece(request) and not self._codec.resumable(request):
            entry.held_back = []
        return entry

    async def sized(self, request: RequestT, known: RequestSize | None = None) -> RequestSize:
        """Its size, with the blocks of its prompt and what replicas have of them.

        Args:
            known: of the same prompt, as the client of other replicas told it: its blocks need not be hashed again.
        """
        size, hashing = self._codec.size(request), self._blocks.hashing
        if hashing is None or not self._classifier.knows_prefixes:
            return size

        def looked_up() -> RequestSize:
            is_hashed = known is not None and known.hashing == hashing
            blocks = known.blocks if known is not None and is_hashed else self._codec.block_hashes(request, hashing)
            hits = self._blocks.hit_tokens(blocks, size.prompt_tokens, hashing)
            return replace(size, blocks=blocks, hashing=hashing, hits=hits)

        return await asyncio.to_thread(looked_up) if size.prompt_tokens >= LONG_PROMPT_TOKENS else looked_up()

    def _limits(self, classified: Classified, tenant: Tenant | None) -> Limits:
        ticket, spare_s = classified.ticket, math.inf
        if ticket.deadline_s is not None:
            spare_s = ticket.deadline_s - self._shared_clock.now() - self._least_reading_s(ticket)
        return self._door.limits(ticket.slo_class, tenant, classified.tokens, spare_s)

    def _least_reading_s(self, ticket: Ticket) -> float:
        """Seconds of reading its prompt on the replica that needs least for it, by what they said last."""
        loads = self.snapshot.replicas.items()
        reading = (ticket.unread_at(each) * ticket.token_s(load.slowness, load.prompt_token_s) for each, load in loads)
        return min(reading, default=0.0)

    def hits(self, size: RequestSize) -> Mapping[str, int]:
        """Tokens of its prompt that replicas are taken to have cached, by the id of those that have most."""
        return dict(self._classifier.hits(size, self._connections.replica_ids))

    def _arrival_s(self, timing: RequestTiming) -> float:
        """On the clock that all routers share."""
        return self._shared_clock.now() - (self._clock.now() - timing.received_s)

    def _encode(self, request: RequestT) -> Sequence[Buffer]:
        """Before it is queued: whoever asks for what cannot be sent is told so, in place of a stream that ends."""
        try:
            return self._codec.encode_request(request)
        except (OverflowError, TypeError, ValueError) as error:
            raise InputError(f"it cannot be sent to an engine: {error}") from error

    async def charge(self, tenant: Tenant | None, tokens: float) -> None:
        """Take tokens out of a key's allowance for work that makes no request, before it is done.

        What is charged while the shared state is away counts when that is back.

        Raises:
            AdmissionError: the allowance is spent.
        """
        quota = tenant.token_quota(tokens) if tenant else None
        if quota is None:
            return
        if not self._local.in_use:
            try:
                refusal = await self._store.charge([quota])
            except StateStoreError as error:
                logger.warning("%s is charged when the shared state is back: %s", quota.name, error)
            else:
                if refusal is not None:
                    why = f"{refusal.reason} are spent, try again in {refusal.retry_after_s:.1f} s"
                    raise AdmissionError(why, refusal.retry_after_s)
                return
        self._settlements.add(quota, tokens)

    async def cancel(self, request_ids: Sequence[str], outcome: str) -> None:
        """Stop requests wherever they are; `outcome` is how they are counted. Unknown ids are ignored."""
        self._cancel([self._entries[i] for i in dict.fromkeys(request_ids) if i in self._entries], outcome)

    def _cancel(self, entries: Iterable[Entry[RequestT]], outcome: str) -> None:
        unsent: list[str] = []
        running: defaultdict[ReplicaConnection, list[str]] = defaultdict(list)
        for entry in entries:
            if not self._lives(entry):
                continue
            del self._entries[entry.request_id]
            self._count(entry, outcome)
            (unsent if entry.connection is None else running[entry.connection]).append(entry.request_id)
            self._end_locally(entry.request_id)
            if entry.preparing is not None:
                entry.preparing.cancel()
            if entry.preparation is not None:
                entry.preparation.ended(entry.request)
        for connection, ids in running.items():
            connection.abort(ids)
        if unsent and not self._local.in_use:  # else the shared state is told of all at once when it is back
            self._background.spawn(self._with_retries(lambda: self._store.cancel(unsent)), "cancel")

    def _fail(self, entry: Entry[RequestT], why: str) -> None:
        logger.error("request %s failed: %s", entry.request_id, why)
        self._cancel([entry], "error")
        self._background.spawn(self._outputs.put(self._codec.failed(entry.request_id)), "fail")

    def restart(self, request_id: str) -> bool:
        """Take a request back from where it was sent, before another token of it can come, and queue it again.

        No loss that would count against it. False where it was sent nowhere.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.connection is None:
            return False
        connection = entry.connection
        self._unplace(entry, "stalled")
        self._background.spawn(self._recall(entry, connection), "restart")
        return True

    def start_and_end(self, request: RequestT, request_id: str) -> None:
        """Let any connected replica start a request for what that does besides; its outputs are not read."""
        if connections := self._connections.all_open:
            connections[0].add(self._codec.encode_request(request))
            connections[0].abort([request_id])

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """As `Connections.statuses`."""
        return await self._connections.statuses()

    # Tickets

    async def _admit(self, entry: Entry[RequestT], limits: Limits) -> Refusal | None:
        """Its class's limits and its tenant's quotas count at arrival; it is prepared, and queued after that.

        Without a reply it is queued at once. It may have paid, so no quota counts again; what it takes of tokens does,
        in the end.
        """
        try:
            refusal = await self._store.admit(entry.ticket, limits)
        except StateStoreError:
            entry.preparation = None
            return await self._enqueue(entry, replace(limits, quotas=()))
        self._note_charge(entry, refusal, limits.quotas)
        if refusal is None and entry.preparation is not None and self._lives(entry):
            entry.preparing = self._background.spawn(self._queue_prepared(entry, entry.preparation), "prepare")
        return refusal

    async def _queue_prepared(self, entry: Entry[RequestT], preparation: Preparation[RequestT]) -> None:
        try:
            is_read = await preparation.prepare()
            entry.preparing = None
            unread_tokens = 0 if is_read else entry.ticket.unread_tokens
            # Nothing has overtaken what was not queued.
            entry.ticket = replace(entry.ticket, arrival_s=None, unread_tokens=unread_tokens)
            await self._enqueue(entry, NO_LIMITS)
        except Exception as error:  # of whatever kind: whoever waits must hear of it
            if self._lives(entry):
                entry.timing.unserved = error if isinstance(error, StateStoreError) else None
                self._fail(entry, repr(error))

    async def _enqueue(self, entry: Entry[RequestT], limits: Limits) -> Refusal | None:
        entry.queueing = True
        if entry.timing.trail is not None:
            entry.timing.trail.queued(self._clock.now())
        try:
            result = await self._ticket_into_a_store(entry, limits)
        finally:
            entry.queueing = False
        if isinstance(result, Refusal):
            return result
        for assignment in result:
            self._place(assignment)
        return None

    async def _ticket_into_a_store(self, entry: Entry[RequestT], limits: Limits) -> list[Assignment] | Refusal:
        """The shared one; while it is away our own, if a replica is connected: then it has less time to answer.

        Our own charges nothing, so that all that the request takes is settled: besides what the shared one charged,
        should it have obeyed without a reply.
        """
        if not self._local.in_use:
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
                self._note_charge(entry, result, limits.quotas)
                return result
        result = await self._local.enqueue(entry.ticket, limits)
        self._note_charge(entry, result, ())
        return result

    def _note_charge(self, entry: Entry[RequestT], result: object, quotas: Sequence[Quota]) -> None:
        """The first time that it was taken, for then it paid."""
        bill = entry.bill
        if bill is None or bill.charged_tokens is not None or isinstance(result, Refusal):
            return
        bill.charged_tokens = bill.quota.cost if bill.quota in quotas else 0.0
        if not self._lives(entry):  # it ended before this was known
            self._settle_up(bill, entry.timing)

    def _settle_up(self, bill: Bill | None, timing: RequestTiming, *, is_over: bool = True) -> None:
        """As often as one likes: what was settled is part of the bill."""
        if bill is not None:
            self._settlements.settle(bill, timing.output_tokens, is_over=is_over)

    async def _goes_on_alone(self) -> bool:
        """Takes to our own store what runs and what waits; False when no replica is connected."""
        if self._local.in_use:  # another request was first
            return True
        infos = [connection.info for connection in self._connections.all_open]
        if not infos:
            return False
        await self._local.begin(infos, self.snapshot, self._mine_at_snapshot, self._mine_by_replica())
        for entry in [entry for entry in self._entries.values() if self._waits(entry)]:
            await self._queue_again(entry)
        return True

    def _mine_by_replica(self) -> dict[str, list[str]]:
        mine: defaultdict[str, list[str]] = defaultdict(list)
        for entry in self._entries.values():
            if entry.replica_id is not None:
                mine[entry.replica_id].append(entry.request_id)
        return mine

    def _end_locally(self, request_id: str) -> None:
        """Its place in the queue or its slot goes to the next, while the shared state is away."""
        if self._local.in_use:
            self._background.spawn(self._place_next_locally(request_id), "local")

    async def _place_next_locally(self, request_id: str) -> None:
        for assignment in await self._local.ended(request_id, self.router_id):
            self._place(assignment)

    async def _queue_again(self, entry: Entry[RequestT]) -> None:
        """Back into its bin under its old key, or before all others if its client has a part of the answer and it does
        not fill idle capacity; unless it is over by now. Never refused: it was admitted once."""
        size = await self.sized(entry.request)
        if not self._lives(entry):
            return
        recallable = entry.ticket.recallable and entry.recalls < self._config.max_recalls
        prefixes, entry.blocks = self._classifier.hits(size, self._connections.replica_ids), size.blocks
        ticket = entry.ticket.of_prompt(size.prompt_tokens, prefixes)
        ticket = replace(ticket, arrival_s=None, recallable=recallable)
        if entry.timing.output_tokens and ticket.late_key is not None and not ticket.fills_idle:
            key = banded(Band.RESUMED, self._arrival_s(entry.timing))
            ticket = replace(ticket, deadline_key=key, late_key=None)
        entry.ticket = ticket
        try:
            await self._enqueue(entry, NO_LIMITS)
        except StateStoreError as error:
            logger.warning("request %s waits for the shared state: %s", entry.request_id, error)

    def _place(self, assignment: Assignment) -> None:
        """Send a request to the replica that it was given; at once when the connection stands."""
        entry = self._entries.get(assignment.request_id)
        replica_id = assignment.replica_id
        if entry is None or entry.replica_id not in (None, replica_id):  # over, or elsewhere: this slot is not taken
            ids = [assignment.request_id]
            self._background.spawn(self._with_retries(lambda: self._store.release(replica_id, ids)), "release")
            if entry is None:
                self._end_locally(assignment.request_id)
        elif entry.replica_id is None:  # else told twice
            entry.replica_id = replica_id
            self._note_planned(entry)
            if (connection := self._connections.get(replica_id)) is not None:
                self._send(entry, connection)
            else:
                self._background.spawn(self._connect_and_send(entry, replica_id), "place")

    async def _connect_and_send(self, entry: Entry[RequestT], replica_id: str) -> None:
        try:
            await self._connections.open(replica_id)
        except Exception as error:  # of whatever kind: the request must go on elsewhere
            logger.warning("request %s cannot reach replica %s: %s", entry.request_id, replica_id, error)
        if not self._is_placed(entry, replica_id):
            return
        if (connection := self._connections.get(replica_id)) is not None:
            self._send(entry, connection)
        else:  # no move: it was not on board, and a replica can stay out of reach for longer than any number of tries
            self._unplace(entry, "lost")
            await self._queue_again(entry)

    def _is_placed(self, entry: Entry[RequestT], replica_id: str) -> bool:
        """It was given this replica, and is neither sent nor over."""
        return self._lives(entry) and entry.replica_id == replica_id and entry.connection is None

    def _send(self, entry: Entry[RequestT], connection: ReplicaConnection) -> None:
        try:
            connection.add(self._encoded(entry))
        except Exception as error:  # too large, or beyond the codec: no other replica could take it either
            self._fail(entry, repr(error))
            return
        entry.connection = connection
        if (trail := entry.timing.trail) is not None:
            entry.stay = trail.sent(connection.info.replica_id, entry.timing.output_tokens, self._clock.now())
        if self._classifier.knows_prefixes:
            self._note_prefix(entry, connection.info.replica_id)
        if entry.timing.assigned_s is None:
            entry.timing.assigned_s = self._clock.now()
            entry.metrics.queue_wait_s.observe(entry.timing.assigned_s - entry.timing.received_s)

    def _note_prefix(self, entry: Entry[RequestT], replica_id: str) -> None:
        if unread_tokens := entry.ticket.unread_tokens:  # else it was read elsewhere, which makes no hits
            entry.predicted_hit_tokens = unread_tokens - entry.ticket.unread_at(replica_id)
            self._metrics.predicted_hit_tokens.labels(entry.slo_class, replica_id).inc(entry.predicted_hit_tokens)
        self._classifier.placed(replica_id, self._codec.size(entry.request))
        self._blocks.sent(replica_id, entry.blocks)
        entry.blocks = ()

    def _encoded(self, entry: Entry[RequestT]) -> Sequence[Buffer]:
        encoded, entry.encoded = entry.encoded, None
        if entry.preparation is not None:
            prepared = entry.preparation.first_sending(self._as_sent(entry))
            if prepared is not None:
                return self._codec.encode_request(prepared)
        if encoded is not None and self._clock.now() - entry.waiting_since_s < FRESH_S:
            return encoded
        return self._codec.encode_request(self._as_sent(entry))

    def _as_sent(self, entry: Entry[RequestT]) -> RequestT:
        """With the time that it has left now. What its client has seen a part of has no first token to come."""
        resumed, deadline_s = entry.timing.output_tokens > 0, entry.ticket.deadline_s
        left_s = None if resumed or deadline_s is None else deadline_s - self._shared_clock.now()
        return self._codec.with_ticket(entry.request, entry.ticket, ttft_left_s=left_s, resumed=resumed)

    async def _with_retries(self, call: Callable[[], Awaitable[object]]) -> None:
        """Until the store answers, for max_wait_s at most: after that its sweeps and leases will have done the same."""
        give_up_s = self._clock.now() + self._config.max_wait_s
        while self._clock.now() < give_up_s:
            try:
                await call()
                return
            except StateStoreError as error:
                logger.warning("waiting for the shared state: %s", error)
                await asyncio.sleep(self._config.heartbeat_s)

    def _note_planned(self, entry: Entry[RequestT]) -> None:
        """In shadow mode: whether the policies would have started another request of this router first."""
        if entry.planned_key is not None:
            waiting = (e.planned_key for e in self._entries.values() if e.replica_id is None and e.preparing is None)
            earlier = any(key is not None and key < entry.planned_key for key in waiting)
            self._metrics.shadow_starts.labels(entry.slo_class, "later" if earlier else "same").inc()

    # Replicas

    def _is_needed(self, replica_id: str) -> bool:
        """Requests were given to it."""
        return any(entry.replica_id == replica_id for entry in self._entries.values())

    async def _drop(self, replica_id: str) -> None:
        """Out of the tables. No request waits for a shared state that is away: requests can go on without it."""
        if self._local.in_use:
            await self._local.lost(replica_id)
        else:
            try:
                await self._store.drop_replica(replica_id)
                return
            except StateStoreError as error:
                logger.warning("replica %s is dropped when the shared state is back: %s", replica_id, error)
        self._background.spawn(self._with_retries(lambda: self._store.drop_replica(replica_id)), "drop")

    async def _read(self, connection: ReplicaConnection) -> None:
        try:
            await connection.run(self._on_outputs, self._on_blocks)
        except Exception:  # of whatever kind: its requests must go on elsewhere
            logger.exception("closing the connection to replica %s", connection.info.replica_id)
        await self._recover_from(connection, has_ended=True)

    async def _recover_from(self, connection: ReplicaConnection, *, has_ended: bool = False) -> None:
        """A replica is lost: everything on it goes back into the bins. Or it has left, if its connection has ended."""
        if not self._connections.forget(connection):
            return  # done already
        replica_id = connection.info.replica_id
        stranded = [entry for entry in self._entries.values() if entry.connection is connection]
        self._classifier.forget_replica(replica_id)
        self._blocks.forget(replica_id)
        self._metrics.forget_replica(replica_id)
        if stranded or not has_ended or not await self._has_left(replica_id):
            self._metrics.replicas_lost.inc()
            logger.warning("replica %s lost with %d requests on board", replica_id, len(stranded))
        movable = [entry for entry in stranded if self._take_back(entry)]
        await self._drop(replica_id)
        for entry in movable:
            self._background.spawn(self._queue_again(entry), "requeue")

    async def _has_left(self, replica_id: str) -> bool:
        """In good order: it drained before, or is out of the tables."""
        if self._local.in_use:
            return False
        try:
            load = (await self._store.snapshot()).replicas.get(replica_id)
        except StateStoreError:
            return False
        return load is None or load.slots == 0

    def _take_back(self, entry: Entry[RequestT]) -> bool:
        """Off a lost replica, ready to be queued again; False when it has been moved too often, and fails."""
        self._unplace(entry, "lost")
        entry.moves += 1
        if entry.moves > self._config.max_moves:
            self._fail(entry, f"it lost {entry.moves} replicas")
            return False
        self._metrics.recovered.labels(self._recover(entry)).inc()
        return True

    def _unplace(self, entry: Entry[RequestT], because: str) -> None:
        if entry.connection is not None:  # else it has waited all along
            entry.waiting_since_s = self._clock.now()
            if entry.timing.trail is not None:
                entry.timing.trail.left(entry.waiting_since_s, because)
        entry.connection = entry.replica_id = entry.encoded = entry.stay = None
        entry.queueing = True

    def _give_back(self, request_id: str) -> None:
        """Its slot, to a more urgent request; it waits again under its old key, to be continued where it stands."""
        entry = self._entries.get(request_id)
        if entry is None or entry.replica_id is None or self._local.in_use:
            return
        connection = entry.connection
        self._unplace(entry, "recalled")
        entry.recalls += 1
        self._metrics.recalled.labels(entry.slo_class).inc()
        self._recover(entry)
        self._background.spawn(self._recall(entry, connection), "recall")

    async def _recall(self, entry: Entry[RequestT], connection: ReplicaConnection | None) -> None:
        """Queued again only when nothing of it can come any more over a connection that it may be sent over again."""
        if connection is not None:
            try:
                packed = msgspec.msgpack.encode([entry.request_id])
                await connection.call("recall", packed, timeout_s=RECALL_TIMEOUT_S)
            except SluiceError as error:
                logger.warning("%s", error)
                connection.close()
        await self._queue_again(entry)

    def _recover(self, entry: Entry[RequestT]) -> str:
        """What to send to the next replica; returns the name of the way."""
        way = self._found_way(entry)
        if entry.timing.trail is not None:
            entry.timing.trail.goes_on(way)
        return way

    def _found_way(self, entry: Entry[RequestT]) -> str:
        if entry.held_back:  # the client has nothing of it
            entry.held_back, entry.sent, entry.timing.output_tokens = [], [], 0
        if not entry.sent:
            return "requeued"
        entry.continuations += 1
        recovery = self._codec.recover(entry.request, entry.sent)
        entry.request, entry.repeats = recovery.request, deque(recovery.repeats)
        if recovery.repeats:
            return "replayed"
        entry.sent = []
        return "resumed"

    # Outputs

    async def _on_outputs(self, connection: ReplicaConnection, parts: Sequence[Buffer]) -> None:
        batch = self._codec.decode_outputs(parts)
        outputs = self._codec.outputs(batch)
        now_s = self._clock.now()
        due = [self._account(connection, output, now_s) for output in outputs]
        if not all(len(each) == 1 for each in due):
            batch = self._codec.keep(batch, [output for each in due for output in each])
        if any(due):
            await self._outputs.put(batch)

    def _on_blocks(self, connection: ReplicaConnection, changes: BlockChanges) -> None:
        replica_id = connection.info.replica_id
        is_current = self._connections.get(replica_id) is connection
        if is_current and not self._blocks.apply(replica_id, changes):
            connection.ask_for_blocks()

    def _account(self, connection: ReplicaConnection, output: Output, now_s: float) -> Sequence[Output]:
        """Note what an output brings; returns what is to be passed on with it: nothing when no client waits for it."""
        entry = self._entries.get(output.request_id)
        if entry is None or entry.connection is not connection:
            return ()
        if entry.preparation is not None:
            entry.preparation.answered(output)
            entry.preparation = None
        if entry.stay is not None:
            entry.stay.first_s, entry.stay = now_s, None
        if entry.predicted_hit_tokens is not None:
            self._note_hits(entry, output)
        if entry.repeats and not self._take_repeats(entry, output):
            return ()
        if output.new_token_ids:
            entry.sent.extend(output.new_token_ids)
            self._note_tokens(entry, len(output.new_token_ids), now_s)
        if entry.held_back is not None:
            entry.held_back.append(output)
        if output.finish_reason is not None:
            del self._entries[output.request_id]
            self._count(entry, str(output.finish_reason))
            self._end_locally(entry.request_id)
            return entry.held_back or (output,)
        return (output,) if entry.held_back is None else ()

    def _note_hits(self, entry: Entry[RequestT], output: Output) -> None:
        hit_tokens = self._codec.cached_tokens(output)
        if hit_tokens is not None and entry.predicted_hit_tokens is not None:
            self._metrics.note_hits(entry.slo_class, entry.predicted_hit_tokens, hit_tokens)
            entry.predicted_hit_tokens = None

    def _take_repeats(self, entry: Entry[RequestT], output: Output) -> bool:
        """Take the tokens that the client has already out of a replayed stream; False when nothing new is left."""
        expected = list(islice(entry.repeats, len(output.new_token_ids)))
        too_short = output.finish_reason is not None and len(expected) < len(entry.repeats)
        if too_short or output.new_token_ids[: len(expected)] != expected:
            self._fail(entry, "its replay on another replica differs from what was sent already")
            return False
        for _ in expected:
            entry.repeats.popleft()
        self._codec.drop_first(output, len(expected))
        return bool(output.new_token_ids) or output.finish_reason is not None

    def _note_tokens(self, entry: Entry[RequestT], count: int, now_s: float) -> None:
        timing = entry.timing
        if timing.last_token_s is None:
            timing.first_token_s = now_s
            entry.metrics.ttft_s.observe(now_s - timing.received_s)
        else:
            entry.metrics.itl_s.observe(now_s - timing.last_token_s)
        timing.last_token_s = now_s
        timing.output_tokens += count

    def _note_end(self, slo_class: str, bin_index: int, timing: RequestTiming, outcome: str) -> None:
        timing.outcome = outcome
        self._metrics.requests.labels(slo_class, str(bin_index), outcome).inc()
        if timing.key:
            self._metrics.keys.ended(timing.key, outcome)
        if (kept := timing.kept) is not None:
            self._metrics.slo_requests.labels(slo_class, *("met" if each else "missed" for each in kept)).inc()

    def _refused(
        self, refusal: Refusal, slo_class: str, bin_index: int, timing: RequestTiming, counts_as: str | None = None
    ) -> AdmissionError:
        """For whoever asked; counted, unless the request was cancelled meanwhile."""
        if timing.outcome is None:
            self._note_end(slo_class, bin_index, timing, "refused")
            reason = refusal.reason if refusal.reason in QUEUE_REASONS else "quota"
            self._metrics.refused.labels(slo_class, counts_as or reason).inc()
        if refusal.reason == "late":
            self._retries.refused(slo_class, refusal.retry_after_s)
        why = f"class {slo_class} takes no more for now ({refusal.reason})"
        return AdmissionError(f"{why}, try again in {refusal.retry_after_s:.1f} s", refusal.retry_after_s)

    def _count(self, entry: Entry[RequestT], outcome: str) -> None:
        self._note_end(entry.slo_class, entry.ticket.bin_index, entry.timing, outcome)
        if entry.timing.trail is not None:
            entry.timing.trail.left(self._clock.now())
        self._note_recent(entry, outcome)
        self._note_usage(entry)
        self._settle_up(entry.bill, entry.timing)
        if outcome in WHOLE:
            entry.metrics.e2e_s.observe(self._clock.now() - entry.timing.received_s)
            is_cut = outcome == "length"
            self._classifier.observe(entry.slo_class, entry.timing.output_tokens, entry.foresight, is_cut=is_cut)

    def _note_recent(self, entry: Entry[RequestT], outcome: str) -> None:
        timing, ticket = entry.timing, entry.ticket
        predicted = ticket.predicted_output_tokens
        timing.ended = {
            "at": round(self._shared_clock.now(), 3),
            "request_id": entry.request_id,
            "slo_class": entry.slo_class,
            "bin": ticket.bin_index,
            "prompt_tokens": entry.prompt_tokens,
            "predicted_tokens": None if predicted is None else round(predicted, 1),
            "output_tokens": timing.output_tokens,
            "wait_s": _since(timing.received_s, timing.assigned_s),
            "ttft_s": _since(timing.received_s, timing.first_token_s),
            "replica": entry.replica_id,
            "moves": entry.moves,
            "recalls": entry.recalls,
            "resumed": entry.continuations,
            "outcome": outcome,
        }
        self._recent.note(timing.ended)

    def _note_usage(self, entry: Entry[RequestT]) -> None:
        """Once it has ended. What never came to a replica took nothing."""
        if entry.timing.assigned_s is None:
            return
        prompt_tokens, output_tokens = entry.prompt_tokens, entry.timing.output_tokens
        entry.metrics.prompt_tokens.inc(prompt_tokens)
        entry.metrics.output_tokens.inc(output_tokens)
        if entry.timing.key:
            self._metrics.keys.took(entry.timing.key, prompt_tokens, output_tokens)

    # In the background

    async def _listen(self, subscribed: asyncio.Event) -> None:
        async for notices in self._store.notices(self.router_id):
            subscribed.set()
            for notice in notices:
                if isinstance(notice, Recall):
                    self._give_back(notice.request_id)
                else:
                    self._place(notice)

    async def _heartbeat(self) -> None:
        self._fail_expired()
        try:
            await self._beat()
        except StateStoreError:
            if await self._goes_on_alone():
                for assignment in await self._local.due(self.router_id):
                    self._place(assignment)
            raise
        for request_id in self.snapshot.recalled:  # the notice may have been lost
            self._give_back(request_id)
        for connection in self._connections.missing(self.snapshot.replicas):
            await self._recover_from(connection)
        if self._classifier.knows_prefixes:
            self._connect_to_all()
        await self._look_after_waiting()

    def _connect_to_all(self) -> None:
        """They tell what they have cached to those that are connected."""
        for replica_id in self.snapshot.replicas.keys() - set(self._connections.replica_ids):
            self._background.spawn(self._connect(replica_id), "connect")

    async def _connect(self, replica_id: str) -> None:
        try:
            await self._connections.open(replica_id)
        except SluiceError as error:
            logger.warning("replica %s cannot be reached: %s", replica_id, error)

    async def _beat(self) -> None:
        asked_s = self._clock.now()
        store_s = await self._store.time_s()
        self._shared_clock.adjust(store_s, asked_s, self._clock.now())
        lost, routers = await self._store.beat_router(self.router_id, self._config.silence_s)
        if lost or routers:
            logger.warning("silent and dropped: replicas %s, routers %s", lost, routers)
        self.snapshot = await self._store.snapshot()
        self._mine_at_snapshot = {replica_id: len(ids) for replica_id, ids in self._mine_by_replica().items()}
        self._beat_s = self._clock.now()
        if self._local.in_use and (ended := self._local.end()):
            self._background.spawn(self._with_retries(lambda: self._store.cancel(ended)), "cancel")

    async def _exchange(self) -> None:
        await self._classifier.exchange(self._store, self._clock.now())
        self._metrics.prefix_entries.set(self.prefix_entries)
        pages = {"metrics": self._metrics.exposition(), "recent": self._recent.page()}
        await self._store.publish(self.router_id, pages, self._config.silence_s)

    async def _settle(self) -> None:
        self._note_overdrafts()
        await self._settlements.send()

    def _note_overdrafts(self) -> None:
        """Of what goes on beyond its charge: it may go on for long."""
        for entry in self._entries.values():
            self._settle_up(entry.bill, entry.timing, is_over=False)

    def _fail_expired(self) -> None:
        oldest_s = self._clock.now() - self._config.max_wait_s
        unsent = [entry for entry in self._entries.values() if entry.connection is None]
        self._metrics.note_waits(self._longest_waits(unsent))
        for entry in unsent:
            if entry.waiting_since_s < oldest_s:
                entry.timing.unserved = ReplicaLostError(f"no replica took it within {self._config.max_wait_s} s")
                self._fail(entry, str(entry.timing.unserved))

    def _longest_waits(self, unsent: Iterable[Entry[RequestT]]) -> dict[str, float]:
        """In seconds, by class."""
        now_s, longest_s = self._clock.now(), defaultdict[str, float](float)
        for entry in unsent:
            longest_s[entry.slo_class] = max(longest_s[entry.slo_class], now_s - entry.waiting_since_s)
        return longest_s

    async def _look_after_waiting(self) -> None:
        """Find out about requests that have waited a while: a notice may have been lost, or the tables with them."""
        oldest_s = self._clock.now() - self._config.heartbeat_s
        waiting = [entry for entry in self._entries.values() if self._waits(entry) and entry.waiting_since_s < oldest_s]
        if not waiting:
            return
        places = await self._store.locate([entry.request_id for entry in waiting])
        for entry, place in zip(waiting, places, strict=True):
            if not self._waits(entry):
                continue
            if place:
                self._place(Assignment(entry.request_id, place))
            elif place is None:
                entry.queueing = True
                self._background.spawn(self._queue_again(entry), "requeue")

    def _waits(self, entry: Entry[RequestT]) -> bool:
        """In its bin, as far as we know."""
        return self._lives(entry) and entry.replica_id is None and not entry.queueing

    def _lives(self, entry: Entry[RequestT]) -> bool:
        """Neither over nor cancelled: another of its id may have come since."""
        return self._entries.get(entry.request_id) is entry


def _since(start_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else round(then_s - start_s, 4)
