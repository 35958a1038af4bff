"""Prefill replicas, and the tickets by which they take prompts."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from policies.router.placement import PrefixIndex
from policies.router.prefill_decode import BucketOrder, PrefillDecode, PrefillOffer, padded_tokens
from policies.router.promise import NO_PROMISE, Promise
from policies.router.sessions import Sessions, Turn
from policies.router.tickets import Ticket
from predictor.learned import Foresight, Question
from router.classifier import Classified
from router.codec import EngineCodec, Output, RequestSize
from router.metrics import SplitMetrics
from router.prefix_hits import PrefixHits
from router.routed_client import RoutedClient
from router.state_store import StateStore
from router.timing import RequestTiming

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


class PrefillClassifier:
    """Tickets of the prefill pool: a lane for each bucket of prompt length, and the prefill's seconds as work.

    `prefixes` as of `PrefixHits`: a prompt goes where it is predicted to be read soonest, as in the decode pool.
    """

    def __init__(
        self, order: BucketOrder, policy: PrefillDecode, metrics: SplitMetrics, prefixes: PrefixIndex | None
    ) -> None:
        self.prefixes, self.sessions = PrefixHits(prefixes), Sessions()
        self._order, self._policy, self._metrics = order, policy, metrics

    @property
    def prompt_token_s(self) -> float:
        """As `router.classifier.TicketWriter`."""
        return self._policy.prompt_token_s

    async def foresee(self, question: Question, promise: Promise) -> Foresight | None:
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
        return Classified(ticket, size.prompt_tokens, size.prompt_tokens)

    def observe(
        self,
        slo_class: str,
        output_tokens: int,
        foresight: Foresight | None = None,
        *,
        is_cut: bool = False,
        turn: Turn | None = None,
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
