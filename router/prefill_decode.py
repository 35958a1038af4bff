"""Prefill on one replica, decode on another: BucketServe's scheduler (002) for prompts where it pays.

    classify -> prefill store -> prefill replica (one token, thrown away) -> its KV cache's whereabouts
             -> decode store -> decode replica, which fetches the cache and streams

Both pools are plain routed clients over stores of their own, so queues, replicas lost and a Redis that is away are
theirs. To the decode replicas' client a prefill elsewhere is a `Preparation` of the request.
The decode replica gets the whole request and samples every token of the answer itself, the first one too: so nothing is
doubled or lost, however it samples, at the price of computing the last prompt token twice. All that can go wrong on
the way (no prefill replica, a queue too long, a replica lost, a cache that is gone) ends in the same place: the
decode replica reads the prompt itself. A cache is offered once: a later replica reads the prompt.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from policies.checks import require_positive
from policies.live import Live
from policies.router.prefill_decode import (
    PrefillDecode,
    SplitState,
    Why,
)
from policies.router.promise import NO_PROMISE, Promise
from predictor.learned import Question
from router.admission import Tenant
from router.clock import Clock
from router.codec import Output, RequestSize
from router.ledger import State
from router.metrics import SplitMetrics
from router.prefill_pool import Cache, PrefillPool, SplitCodec
from router.routed_client import RoutedClient
from router.state_store import Snapshot
from router.timing import RequestTiming
from router.trail import KVTransfer, Trail

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")


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
        except Exception as error:  # of any kind: the decode replica can read it
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
        context_tokens: what a request of this router holds on its replica, on average; None before the first runs.
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
        if running := self.decoding.ledger.in_state(State.RUNNING):
            held = (self.codec.size(entry.request).prompt_tokens + len(entry.sent) for entry in running)
            self.context_tokens = sum(held) / len(running)

    def _restart_stalled(self) -> None:
        """Requests whose cache does not arrive: a transfer from a replica that has died need not end by itself."""
        oldest_s = self.clock.now() - self.config.now.stalled_s
        for request_id in [name for name, (since_s, _) in self.offered.items() if since_s < oldest_s]:
            del self.offered[request_id]
            if self.decoding.recovery.restart(request_id):
                self.note_fall_back(request_id, "stalled")


EngineClient = RoutedClient[RequestT, OutputsT] | SplitClient[RequestT, OutputsT]
"""What stands where an engine's own client stands."""
