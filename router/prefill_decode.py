"""Prefill on one replica, decode on another: BucketServe's scheduler (002) for prompts where it pays.

    classify -> prefill store -> prefill replica (one token, thrown away) -> its KV cache's whereabouts
             -> decode store -> decode replica, which fetches the cache and streams

Both pools are plain routed clients over stores of their own, so queues, replicas lost and a Redis that is away are
theirs. To the decode replicas' client a prefill elsewhere is a `Preparation` of the request.
The decode replica gets the whole request and samples every token of the answer itself, the first one too: so nothing is
doubled or lost whatever the sampling, at the price of computing the last prompt token twice. All that can go wrong on
the way (no prefill replica, a queue too long, a replica lost, a cache that is gone) ends in the same place: the
decode replica reads the prompt itself. A cache is offered once: a later replica reads the prompt.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from policies.checks import require_positive
from policies.live import Live
from policies.router.placement import PrefixIndex
from policies.router.prefill_decode import (
    BucketOrder,
    PrefillDecode,
    PrefillOffer,
    SplitState,
    Why,
    padded_tokens,
)
from policies.router.promise import NO_PROMISE, Promise
from predictor.learned import Foresight, Question
from router.admission import Tenant
from router.classifier import Classified
from router.clock import Clock
from router.codec import EngineCodec, Output, RequestSize
from router.metrics import SplitMetrics
from router.prefix_hits import PrefixHits
from router.routed_client import RoutedClient
from router.state_store import Snapshot, StateStore, Ticket
from router.timing import RequestTiming
from router.trail import KVTransfer, Trail

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
        """A request of that id that ends at once, and tells the replica with the cache that it will not be fetched."""


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
    """Tickets of the prefill pool: a lane for each bucket of prompt length, and the prefill's seconds as work.

    `prefixes` as of `PrefixHits`: a prompt goes where it is predicted to be read soonest, as in the decode pool.
    """

    def __init__(
        self, order: BucketOrder, policy: PrefillDecode, metrics: SplitMetrics, prefixes: PrefixIndex | None
    ) -> None:
        self.prefixes = PrefixHits(prefixes)
        self._order, self._policy, self._metrics = order, policy, metrics

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
        prefixes = self.prefixes.hits(size, replica_ids)
        most = max((tokens for _, tokens in prefixes), default=0)
        ticket = Ticket(
            request_id=size.request_id,
            bin_index=bucket,
            deadline_key=self._order.key(arrival_s, bucket),
            work_s=self._policy.prefill_s(size.prompt_tokens - most),
            router_id=router_id,
            slo_class=slo_class,
            arrival_s=arrival_s,
            deadline_s=None if promise.ttft_s is None else arrival_s + promise.ttft_s,
            unread_tokens=size.prompt_tokens,
            prefixes=prefixes,
            prompt_token_s=self._policy.prompt_token_s,
            step_s=self._policy.step_s,
        )
        return Classified(ticket, size.prompt_tokens)

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
        self.client.repeat(self._read, "prefill outputs", pause_s=0)

    async def close(self) -> None:
        await self.client.close()

    @property
    def slowness(self) -> float:
        """The slowness of the slowest replica."""
        return max((load.slowness for load in self.client.snapshot.replicas.values()), default=1.0)

    def offers(self, size: RequestSize, mine_s: float) -> list[PrefillOffer]:
        """Offers of all replicas, each for when it has finished its work and its part of the queue.

        As of the last heartbeat; `mine_s` is what this router has given to the pool since, in any case.
        """
        loads, hits = self.client.snapshot.replicas, self.client.hits(size)
        pace = sum(1.0 / load.slowness for load in loads.values())
        return [
            PrefillOffer(
                wait_s=max(load.outstanding_s + self.client.snapshot.waiting_s / pace, mine_s / pace),
                hit_tokens=hits.get(replica_id, 0),
                slowness=load.slowness,
            )
            for replica_id, load in loads.items()
        ]

    def unread_tokens(self, size: RequestSize) -> int:
        """Unread tokens of a prompt on the replica that has most of it cached."""
        return size.prompt_tokens - max(self.client.hits(size).values(), default=0)

    async def prefill(
        self,
        request: RequestT,
        size: RequestSize,
        slo_class: str,
        promise: Promise,
        timeout_s: float,
        timing: RequestTiming,
    ) -> Cache | None:
        """Where the cache lies; None when the engine left none. `promise` counts from now, as `timing` does.

        Args:
            size: as this pool's client told it.

        Raises:
            TimeoutError: not within timeout_s; the pool has forgotten the request then.
            AdmissionError, StateStoreError: the pool did not take it.
        """
        done: asyncio.Future[Cache | None] = asyncio.get_running_loop().create_future()
        self._waiting[size.request_id] = size.prompt_tokens, done
        try:
            async with asyncio.timeout(timeout_s):
                prefill = self._codec.prefill_of(request)
                await self.client.submit(prefill, slo_class=slo_class, promise=promise, timing=timing, size=size)
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


class _KVTransfer(Generic[RequestT]):
    """One request's way from pool to pool: what the decode pool's client prepares it by.

    `size`: as the prefill pool's client told it.
    """

    def __init__(
        self,
        split: "SplitClient[RequestT, Any]",
        request: RequestT,
        size: RequestSize,
        slo_class: str,
        promise: Promise,
        timing: RequestTiming,
    ) -> None:
        self._split, self._request, self._slo_class = split, request, slo_class
        self._promise, self._timing = promise, timing
        self._request_id, self._size = size.request_id, size
        self._cache: Cache | None = None
        self._until_s = 0.0

    async def prepare(self) -> bool:
        split, began_s = self._split, self._split.clock.now()
        split.reading_s[self._request_id] = split.policy.prefill_s(split.pool.unread_tokens(self._size))
        try:
            self._cache = await self._read(began_s)
        finally:
            del split.reading_s[self._request_id]
            if (trail := self._timing.trail) is not None and trail.kv_transfer is not None:
                trail.kv_transfer.ended_s = split.clock.now()
        if self._cache is not None:
            now_s = split.clock.now()
            split.metrics.prefill_s.observe(now_s - began_s)
            self._until_s = now_s + split.config.now.cache_s
        return self._cache is not None

    async def _read(self, now_s: float) -> Cache | None:
        """None when the prompt is to be read by the decode replica."""
        pool = self._split.pool
        timeout_s = self._split.policy.patience_s(self._size.prompt_tokens, pool.slowness)
        ttft_s = self._promise.ttft_s
        left = Promise(ttft_s=None if ttft_s is None else ttft_s - (now_s - self._timing.received_s))
        timing = RequestTiming(received_s=now_s, submitted_s=now_s)
        if (trail := self._timing.trail) is not None:
            timing.trail = Trail(trail.headers)
            trail.kv_transfer = KVTransfer(now_s, timing.trail)
        try:
            cache = await pool.prefill(self._request, self._size, self._slo_class, left, timeout_s, timing)
        except Exception as error:  # of whatever kind: the decode replica can read it
            self._fall_back("late" if isinstance(error, TimeoutError) else "refused")
            return None
        if cache is None:
            self._fall_back("failed")
        return cache

    def _fall_back(self, reason: str) -> None:
        self._split.note_fall_back(self._request_id, reason)
        if (trail := self._timing.trail) is not None and trail.kv_transfer is not None:
            trail.kv_transfer.fell_back = reason

    def first_sending(self, request: RequestT) -> RequestT | None:
        self._split.offered.pop(self._request_id, None)
        cache, self._cache = self._cache, None
        if cache is None:
            return None
        now_s = self._split.clock.now()
        if now_s > self._until_s:
            self._fall_back("expired")
            self._let_go(request, cache)
            return None
        self._split.offered[self._request_id] = now_s, cache
        self._split.metrics.kv_transfers.inc()
        return self._split.codec.with_cache(request, cache)

    def answered(self, output: Output) -> None:
        if (offered := self._split.offered.pop(self._request_id, None)) is not None:
            self._split.codec.note_hits(output, offered[1])

    def ended(self, request: RequestT) -> None:
        self._split.offered.pop(self._request_id, None)
        if self._cache is not None:
            self._let_go(request, self._cache)

    def _let_go(self, request: RequestT, cache: Cache) -> None:
        """Tell the prefill replica, in the connector's way: through a replica that might have fetched the cache.

        Without one, and for a cache that came too late for its cancelled request, the time runs out by itself.
        """
        of_its_own = f"{self._request_id}!"
        ends_at_once = self._split.codec.without_fetching(request, of_its_own, cache)
        if connections := self._split.decoding.connections.all_open:
            connections[0].add(self._split.codec.encode_request(ends_at_once))
            connections[0].abort([of_its_own])


class SplitClient(Generic[RequestT, OutputsT]):
    """As the routed client of the decode replicas, but a prefill pool reads prompts where the policy says so.

    Attributes:
        reading_s: predicted seconds of the prefills that go on, by request id.
        offered: caches on their way to a decode replica that has sent nothing yet: since when, and which.
    """

    def __init__(
        self,
        *,
        decoding: RoutedClient[RequestT, OutputsT],
        pool: PrefillPool[RequestT, OutputsT],
        policy: PrefillDecode,
        codec: SplitCodec[RequestT, OutputsT],
        metrics: SplitMetrics,
        config: Live[SplitConfig],
        clock: Clock,
    ) -> None:
        self.decoding, self.pool, self.policy, self.codec = decoding, pool, policy, codec
        self.metrics, self.config, self.clock = metrics, config, clock
        self.reading_s: dict[str, float] = {}
        self.offered: dict[str, tuple[float, Cache]] = {}
        self.context_tokens: float | None = None
        # The prefill pool has no part in these.
        self.cancel, self.check_room, self.next_outputs = decoding.cancel, decoding.check_room, decoding.next_outputs

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot of the decode pool."""
        return self.decoding.snapshot

    async def start(self) -> None:
        """Raises StateStoreError when the shared state cannot be reached."""
        await self.decoding.start()
        self.decoding.repeat(self._look_after, "KV transfers")
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.close()
        await self.decoding.close()

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """Statuses of both pools, asked at once: engines that hang in both cost one wait."""
        answering, reading = await asyncio.gather(self.decoding.statuses(), self.pool.client.statuses())
        return {**answering, **reading}

    async def submit(
        self,
        request: RequestT,
        *,
        slo_class: str,
        timing: RequestTiming,
        promise: Promise = NO_PROMISE,
        tenant: Tenant | None = None,
        question: Question | None = None,
    ) -> None:
        """As `RoutedClient.submit`."""
        size = await self.decoding.caches.sized(request)
        why, size_there = await self._why(request, size, slo_class)
        self.metrics.decisions.labels(why).inc()
        kv_transfer = None
        if why is Why.SPLIT:
            kv_transfer = _KVTransfer(self, request, size_there, slo_class, promise, timing)
        await self.decoding.submit(
            request,
            slo_class=slo_class,
            promise=promise,
            timing=timing,
            tenant=tenant,
            question=question,
            size=size,
            preparation=kv_transfer,
        )

    def note_fall_back(self, request_id: str, reason: str) -> None:
        """A decode replica reads a prompt that was to be read elsewhere."""
        self.metrics.fallbacks.labels(reason).inc()
        logger.warning("request %s is read by its decode replica: %s", request_id, reason)

    async def _why(self, request: RequestT, size: RequestSize, slo_class: str) -> tuple[Why, RequestSize]:
        """And its size for the prefill pool, where that was asked."""
        if self.decoding.queueing.is_alone or size.max_output_tokens == 1 or not self.codec.splits(request):
            return Why.OFF, size
        hit_tokens = max(self.decoding.hits(size).values(), default=0)
        if size.prompt_tokens - hit_tokens < self.policy.config.min_prompt_tokens:
            return Why.SHORT, size  # most requests, and the other pool need not be looked at
        size_there = await self.pool.client.caches.sized(request, size)
        loads = self.snapshot.replicas.values()
        why = self.policy.choose(
            SplitState(
                prompt_tokens=size.prompt_tokens,
                hit_tokens=hit_tokens,
                itl_target_s=self.config.now.itl_targets_s.get(slo_class),
                offers=self.pool.offers(size_there, sum(self.reading_s.values())),
                decode_batch=sum(load.running for load in loads) / max(1, len(loads)),
                context_tokens=self.context_tokens,
                slowness=max((load.slowness for load in loads), default=1.0),
            )
        )
        return why, size_there

    async def _look_after(self) -> None:
        self._restart_stalled()
        # What this router's requests hold on replicas stands for what all routers' do.
        self.context_tokens = self.decoding.context_tokens or self.context_tokens

    def _restart_stalled(self) -> None:
        """Requests whose cache does not arrive: a transfer from a replica that has died need not end by itself."""
        oldest_s = self.clock.now() - self.config.now.stalled_s
        for request_id in [name for name, (since_s, _) in self.offered.items() if since_s < oldest_s]:
            del self.offered[request_id]
            if self.decoding.recovery.restart(request_id):
                self.note_fall_back(request_id, "stalled")


EngineClient = RoutedClient[RequestT, OutputsT] | SplitClient[RequestT, OutputsT]
"""What stands where an engine's own client stands."""
