"""Prefill on one replica, decode on another: BucketServe's scheduler (002) for prompts where it pays.

    classify -> prefill store -> prefill replica (one token, thrown away) -> its KV cache's whereabouts
             -> decode store -> decode replica, which fetches the cache and streams

Both pools are plain routed clients over stores of their own, so queues, replicas lost and a Redis that is away are
theirs.
The decode replica gets the whole request and samples every token of the answer itself, the first one too: so nothing is
doubled or lost whatever the sampling, at the price of computing the last prompt token twice. All that can go wrong on
the way (no prefill replica, a queue too long, a replica lost, a cache that is gone) ends in the same place: the
decode replica reads the prompt itself. A cache is offered once: whoever gets the request after that reads the prompt.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from policies.checks import require_positive
from policies.errors import InputError, StateStoreError
from policies.router.admission import Refusal
from policies.router.prefill_decode import BucketOrder, PrefillDecode, SplitState, Why, padded_tokens
from policies.router.promise import NO_PROMISE, Promise
from predictor.learned import Foresight, Question
from router.admission import Tenant
from router.classifier import Classified
from router.codec import EngineCodec, Output, RequestSize
from router.connection import ReplicaConnection
from router.metrics import SplitMetrics
from router.routed_client import Entry, RoutedClient
from router.settlements import Bill
from router.state_store import StateStore, Ticket
from router.timing import RequestTiming
from router.wire import Buffer

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")
Cache = Mapping[str, Any]
"""Where a KV cache lies, in the words of the engines' connector."""


class SplitCodec(EngineCodec[RequestT, OutputsT], Protocol[RequestT, OutputsT]):
    """What splitting needs of the engine's structures besides."""

    def splits(self, request: RequestT) -> bool:
        """Whether its prefill can be computed elsewhere."""

    def prefill_of(self, request: RequestT) -> RequestT:
        """A request for one token of the same prompt that leaves its KV cache to be fetched."""

    def cache_of(self, output: Output) -> Cache | None:
        """Where the cache of a finished prefill lies; None when it left none."""

    def with_cache(self, request: RequestT, cache: Cache) -> RequestT:
        """The request, to be decoded from that cache."""

    def note_hits(self, output: Output, cache: Cache) -> None:
        """Let its first output say of how much of the prompt the prefill replica had a cache: it was given all."""

    def without_fetching(self, request: RequestT, request_id: str, cache: Cache) -> RequestT:
        """A request of that id that ends at once, and tells whoever keeps the cache that nobody will fetch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConfig:
    """How long a cache is waited for and good for.

    Attributes:
        cache_s: how long after its prefill a cache may still be offered: well below the time for which the prefill
            replica keeps it for one that has not begun to fetch it.
        stalled_s: a decode replica that has yielded nothing for so long after it was offered a cache starts anew.
        itl_targets_s: by class, what the policy goes by.

    Raises:
        ConfigError: a time is not positive.
    """

    cache_s: float = 15.0
    stalled_s: float = 20.0
    itl_targets_s: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive(self, "cache_s", "stalled_s")


class PrefillClassifier:
    """Tickets of the prefill pool: a lane for each bucket of prompt length, and the prefill's seconds as work."""

    def __init__(self, order: BucketOrder, policy: PrefillDecode, metrics: SplitMetrics) -> None:
        self._order, self._policy, self._metrics = order, policy, metrics

    @property
    def bin_edges(self) -> tuple[float, ...]:
        """The buckets', in prompt tokens."""
        return self._order.edges

    @property
    def bucket_edges(self) -> tuple[float, ...]:
        """None besides."""
        return ()

    async def foresee(self, question: Question) -> Foresight | None:
        return None

    def ticket(
        self,
        size: RequestSize,
        slo_class: str,
        router_id: str,
        arrival_s: float,
        replica_ids: Iterable[str] = (),
        foresight: Foresight | None = None,
        promise: Promise = NO_PROMISE,
    ) -> Classified:
        bucket = self._order.assign(size.prompt_tokens)
        self._metrics.bucket_requests.labels(bucket).inc()
        ticket = Ticket(
            request_id=size.request_id,
            bin_index=bucket,
            deadline_key=self._order.key(arrival_s, bucket),
            work_s=self._policy.prefill_s(size.prompt_tokens),
            router_id=router_id,
            slo_class=slo_class,
            arrival_s=arrival_s,
            deadline_s=None if promise.ttft_s is None else arrival_s + promise.ttft_s,
        )
        return Classified(ticket, size.prompt_tokens)

    knows_prefixes = False

    def placed(self, replica_id: str, prompt_token_ids: Sequence[int]) -> None:
        """Prefixes are not told apart here."""

    def forget_replica(self, replica_id: str) -> None:
        """Nothing is known of it."""

    def observe(
        self, slo_class: str, output_tokens: int, foresight: Foresight | None = None, *, is_cut: bool = False
    ) -> None:
        """One token each: nothing to learn."""

    async def exchange(self, store: StateStore, now_s: float) -> None:
        """Nothing to tell."""


class PrefillPool(Generic[RequestT, OutputsT]):
    """Prefill replicas behind a routed client of their own; `start` before use, `close` after."""

    def __init__(
        self, client: RoutedClient[RequestT, OutputsT], codec: SplitCodec[RequestT, OutputsT], metrics: SplitMetrics
    ) -> None:
        self.client = client
        self._codec, self._metrics = codec, metrics
        self._waiting: dict[str, tuple[int, asyncio.Future[Cache | None]]] = {}

    async def start(self) -> None:
        """Raises StateStoreError when the shared state cannot be reached."""
        await self.client.start()
        self.client.repeat(self._read, "prefill outputs")

    async def close(self) -> None:
        await self.client.close()

    @property
    def replicas(self) -> int:
        return len(self.client.snapshot.replicas)

    def wait_s(self, mine_s: float) -> float:
        """Predicted seconds until the least loaded replica is through with what it has and what waits.

        As of the last heartbeat; `mine_s` is what this router has given to the pool since, in any case.
        """
        loads = self.client.snapshot.replicas.values()
        if not loads:
            return 0.0
        pace = sum(1.0 / load.slowness for load in loads)
        known_s = min(load.outstanding_s for load in loads) + self.client.snapshot.waiting_s / pace
        return max(known_s, mine_s / pace)

    async def prefill(
        self, request: RequestT, slo_class: str, promise: Promise, timeout_s: float, now_s: float
    ) -> Cache | None:
        """Where the cache lies; None when the engine left none. `promise` counts from now.

        Raises:
            TimeoutError: not within timeout_s; the pool has forgotten the request then.
            AdmissionError, StateStoreError: the pool did not take it.
        """
        size = self._codec.size(request)
        done: asyncio.Future[Cache | None] = asyncio.get_running_loop().create_future()
        self._waiting[size.request_id] = size.prompt_tokens, done
        try:
            async with asyncio.timeout(timeout_s):
                timing = RequestTiming(received_s=now_s, submitted_s=now_s)
                prefill = self._codec.prefill_of(request)
                await self.client.submit(prefill, slo_class=slo_class, promise=promise, timing=timing)
                return await done
        finally:
            if self._waiting.pop(size.request_id, None) is not None:
                await self.client.cancel([size.request_id], "cancelled")

    async def _read(self) -> None:
        """What one step of a prefill replica ended."""
        outputs = self._codec.outputs(await self.client.next_outputs())
        lengths = [tokens for output in outputs if (tokens := self._ended(output)) is not None]
        if lengths:
            self._metrics.prefill_tokens.inc(sum(lengths))
            self._metrics.padding_tokens.inc(padded_tokens(lengths))

    def _ended(self, output: Output) -> int | None:
        """Prompt tokens of a prefill that this output ends."""
        if output.finish_reason is None or output.request_id not in self._waiting:
            return None
        tokens, done = self._waiting.pop(output.request_id)
        if not done.done():
            done.set_result(self._codec.cache_of(output))
        return tokens


@dataclass(slots=True, eq=False)
class _Split(Generic[RequestT]):
    """A request while its prompt is read elsewhere."""

    request: RequestT
    request_id: str
    prompt_tokens: int
    slo_class: str
    promise: Promise
    timing: RequestTiming
    tenant: Tenant | None
    question: Question | None
    bill: Bill | None = None
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True)
class _Offer:
    """A cache for a request that waits for a decode replica; `until_s` on the router's clock."""

    cache: Cache
    until_s: float


class SplitClient(RoutedClient[RequestT, OutputsT]):
    """The routed client of the decode replicas, which lets a prefill pool read prompts where the policy says so."""

    def __init__(
        self,
        *,
        pool: PrefillPool[RequestT, OutputsT],
        policy: PrefillDecode,
        split_codec: SplitCodec[RequestT, OutputsT],
        split_metrics: SplitMetrics,
        split_config: SplitConfig,
        **routed: Any,
    ) -> None:
        super().__init__(codec=split_codec, **routed)
        self.pool = pool
        self._policy, self._split_codec = policy, split_codec
        self._split_metrics, self._split_config = split_metrics, split_config
        self._splits: dict[str, _Split[RequestT]] = {}
        self._offers: dict[str, _Offer] = {}
        self._offered: dict[str, tuple[ReplicaConnection, float, Cache]] = {}
        self._context_tokens: float | None = None

    async def start(self) -> None:
        await super().start()
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.close()
        await super().close()

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """Of both pools at once: an engine that hangs in each is waited for once."""
        mine, theirs = await asyncio.gather(super().statuses(), self.pool.client.statuses())
        return {**mine, **theirs}

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
        admitted: bool = False,
        bill: Bill | None = None,
    ) -> None:
        size = self._codec.size(request)
        if size.request_id in self._splits:
            raise InputError(f"request {size.request_id} is not over yet: its input cannot be continued")
        why = self._why(request, size, slo_class)
        self._split_metrics.decisions.labels(why).inc()
        split = _Split(request, size.request_id, size.prompt_tokens, slo_class, promise, timing, tenant, question, bill)
        splits = why is Why.SPLIT
        if splits and not await self._passes_the_door(split, size):
            # It may have paid, though no reply came: as while the shared state is away, quotas do not count. What it
            # takes of tokens does, in the end.
            splits, tenant = False, None
        if not splits:
            await super().submit(
                request,
                slo_class=slo_class,
                promise=promise,
                timing=timing,
                tenant=tenant,
                question=question,
                admitted=admitted,
                bill=split.bill,
            )
            return
        self._splits[size.request_id] = split
        split.task = self._background.spawn(self._read_elsewhere(split), "prefill")

    def _why(self, request: RequestT, size: RequestSize, slo_class: str) -> Why:
        if self._local.in_use or size.max_output_tokens == 1 or not self._split_codec.splits(request):
            return Why.OFF
        if size.prompt_tokens < self._policy.config.min_prompt_tokens:
            return Why.SHORT  # most requests, and the pools need not be looked at
        loads = self.snapshot.replicas.values()
        replicas = max(1, len(loads))
        mine_s = sum(self._policy.prefill_s(split.prompt_tokens) for split in self._splits.values())
        return self._policy.choose(
            SplitState(
                prompt_tokens=size.prompt_tokens,
                itl_target_s=self._split_config.itl_targets_s.get(slo_class),
                prefill_replicas=self.pool.replicas,
                prefill_wait_s=self.pool.wait_s(mine_s),
                decode_batch=sum(load.running for load in loads) / replicas,
                context_tokens=self._context_tokens,
                slowness=max((load.slowness for load in loads), default=1.0),
            )
        )

    async def _passes_the_door(self, split: _Split[RequestT], size: RequestSize) -> bool:
        """As if it were to be decoded now: its class's limits and its tenant's quotas count at arrival, and once.

        The store knows them only as part of queueing, so a ticket of another name goes in and comes out again. It wants
        no slot yet, so none is called back for it, and nothing of it is to be read. False while the store is away.

        Raises:
            AdmissionError: they do not allow it.
        """
        name = f"{size.request_id}?"
        probe = replace(size, request_id=name, prompt_token_ids=())
        arrival_s = self._arrival_s(split.timing)
        classified = self._classifier.ticket(probe, split.slo_class, self.router_id, arrival_s, promise=split.promise)
        limits = self._limits(classified, split.tenant)
        split.bill = Bill.of(split.tenant, split.prompt_tokens, classified.tokens)
        api_key = split.tenant.name if split.tenant else ""
        ticket = replace(classified.ticket, fills_idle=True, api_key=api_key, late_key=None, unread_tokens=0)
        try:
            result = await self._store.enqueue(ticket, limits)
        except StateStoreError:
            return False
        finally:  # whatever happened, the call may have been obeyed
            self._background.spawn(self._with_retries(lambda: self._store.cancel([name])), "cancel")
        if isinstance(result, Refusal):
            raise self._refused(result, split.slo_class, classified.ticket.bin_index, split.timing)
        if split.bill is not None:
            split.bill.charged_tokens = split.bill.quota.cost
        for assignment in result:
            if assignment.request_id != name:
                self._place(assignment)
        return True

    async def cancel(self, request_ids: Sequence[str], outcome: str) -> None:
        for request_id in request_ids:
            if (split := self._splits.pop(request_id, None)) is not None:
                if request_id not in self._entries:  # else it is counted, and its offer taken back, as any other
                    self._note_end(split.slo_class, 0, split.timing, outcome)
                    self._settle_up(split.bill, split.timing)
                    if (offer := self._offers.pop(request_id, None)) is not None:
                        self._let_go(split.request, request_id, offer)
                if split.task is not None:
                    split.task.cancel()
        await super().cancel(request_ids, outcome)

    # The prefill, and the way from there

    async def _read_elsewhere(self, split: _Split[RequestT]) -> None:
        began_s = self._clock.now()
        cache = await self._cache(split, began_s)
        now_s = self._clock.now()
        if self._splits.get(split.request_id) is not split:
            return  # cancelled meanwhile
        if cache is not None:
            self._split_metrics.prefill_s.observe(now_s - began_s)
            self._offers[split.request_id] = _Offer(cache, now_s + self._split_config.cache_s)
        await self._decode(split)

    async def _cache(self, split: _Split[RequestT], now_s: float) -> Cache | None:
        """None when the prompt is to be read by the decode replica."""
        slowness = max((load.slowness for load in self.pool.client.snapshot.replicas.values()), default=1.0)
        timeout_s = self._policy.patience_s(split.prompt_tokens, slowness)
        ttft_s = split.promise.ttft_s
        left = Promise(ttft_s=None if ttft_s is None else ttft_s - (now_s - split.timing.received_s))
        try:
            cache = await self.pool.prefill(split.request, split.slo_class, left, timeout_s, now_s)
        except Exception as error:  # of whatever kind: the decode replica can read it
            self._fall_back(split.request_id, "late" if isinstance(error, TimeoutError) else "refused")
            return None
        if cache is None:
            self._fall_back(split.request_id, "failed")
        return cache

    def _fall_back(self, request_id: str, reason: str) -> None:
        self._split_metrics.fallbacks.labels(reason).inc()
        logger.warning("request %s is read by its decode replica: %s", request_id, reason)

    async def _decode(self, split: _Split[RequestT]) -> None:
        request_id = split.request_id
        try:
            await super().submit(
                split.request,
                slo_class=split.slo_class,
                promise=split.promise,
                timing=split.timing,
                tenant=split.tenant,
                question=split.question,
                admitted=True,
                bill=split.bill,
            )
        except Exception as error:  # of whatever kind: whoever waits must hear of it
            logger.error("request %s failed: %r", request_id, error)
            if isinstance(error, StateStoreError):
                split.timing.unserved = error
            if split.timing.outcome is None:
                self._note_end(split.slo_class, 0, split.timing, "error")
            self._settle_up(split.bill, split.timing)
            self._offers.pop(request_id, None)
            await self._outputs.put(self._codec.failed(request_id))
        finally:
            if self._splits.get(request_id) is split:
                del self._splits[request_id]

    def _is_read_already(self, request_id: str) -> bool:
        return request_id in self._offers

    def _encoded(self, entry: Entry[RequestT], connection: ReplicaConnection) -> Sequence[Buffer]:
        """With the cache that was got for it, the first time that it is sent."""
        offer = self._offers.pop(entry.request_id, None)
        self._offered.pop(entry.request_id, None)
        if offer is None:
            return super()._encoded(entry, connection)
        now_s = self._clock.now()
        if now_s > offer.until_s:
            self._fall_back(entry.request_id, "expired")
            self._let_go(entry.request, entry.request_id, offer)
            return super()._encoded(entry, connection)
        self._offered[entry.request_id] = connection, now_s, offer.cache
        self._split_metrics.hand_overs.inc()
        return self._codec.encode_request(self._split_codec.with_cache(self._as_sent(entry), offer.cache))

    def _account(self, connection: ReplicaConnection, output: Output, now_s: float) -> Sequence[Output]:
        if self._offered and (offered := self._offered.get(output.request_id)) and offered[0] is connection:
            del self._offered[output.request_id]
            self._split_codec.note_hits(output, offered[2])
        return super()._account(connection, output, now_s)

    def _cancel(self, entries: Iterable[Entry[RequestT]], outcome: str) -> None:
        ended = list(entries)
        for entry in ended:
            if (offer := self._offers.pop(entry.request_id, None)) is not None:
                self._let_go(entry.request, entry.request_id, offer)
        super()._cancel(ended, outcome)

    def _let_go(self, request: RequestT, request_id: str, offer: _Offer) -> None:
        """Tell the prefill replica, in the connector's way: through a replica that might have fetched the cache.

        Without one, and for a cache that came too late for its cancelled request, the time runs out by itself.
        """
        if connections := self._connections.all_open:
            of_its_own = f"{request_id}!"
            ends_at_once = self._split_codec.without_fetching(request, of_its_own, offer.cache)
            connections[0].add(self._codec.encode_request(ends_at_once))
            connections[0].abort([of_its_own])

    # In the background

    async def _heartbeat(self) -> None:
        self._restart_stalled()
        self._note_context()
        await super()._heartbeat()

    def _note_context(self) -> None:
        """What this router's requests hold on replicas stands for what all routers' do."""
        running = [entry for entry in self._entries.values() if entry.connection is not None]
        if running:
            prompts = sum(self._codec.size(entry.request).prompt_tokens for entry in running)
            self._context_tokens = (prompts + sum(len(entry.sent) for entry in running)) / len(running)

    def _restart_stalled(self) -> None:
        """Requests whose cache does not arrive: a transfer from a replica that has died need not end by itself."""
        oldest_s = self._clock.now() - self._split_config.stalled_s
        for request_id, (connection, offered_s, _) in list(self._offered.items()):
            entry = self._entries.get(request_id)
            if entry is None or entry.connection is not connection:
                del self._offered[request_id]
            elif offered_s < oldest_s:
                del self._offered[request_id]
                self._fall_back(request_id, "stalled")
                # At once, before a token of it can come. No loss that would count against it: this happens only once.
                self._unplace(entry)
                self._background.spawn(self._recall(entry, connection), "restart")
