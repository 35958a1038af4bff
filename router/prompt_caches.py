"""What replicas have in their prefix caches: as their engines tell it, else by what they were sent."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from policies.router.tiers import NOTHING
from router.cached_blocks import BlockChanges, CachedBlocks
from router.codec import EngineCodec, Output, RequestSize
from router.ledger import Entry
from router.metrics import RouterMetrics
from router.prefix_hits import PrefixHits

RequestT = TypeVar("RequestT")
LONG_PROMPT_TOKENS = 8192  # take a millisecond to hash, or more


class PromptCaches(Generic[RequestT]):
    """Attributes:
    blocks: what engines tell.
    """

    def __init__(
        self,
        *,
        codec: EngineCodec[RequestT, Any],
        prefixes: PrefixHits,
        blocks: CachedBlocks,
        prompt_token_s: float,
        metrics: RouterMetrics,
    ) -> None:
        """Args:
        prompt_token_s: seconds in which a prompt token is read, where a replica does not know: against that a load is
            weighed.
        """
        self._codec, self._prefixes, self.blocks, self._metrics = codec, prefixes, blocks, metrics
        self._prompt_token_s = prompt_token_s

    @property
    def have_a_say(self) -> bool:
        """As `PrefixHits.have_a_say`."""
        return self._prefixes.have_a_say

    async def sized(self, request: RequestT, known: RequestSize | None = None) -> RequestSize:
        """Its size, with the blocks of its prompt and what replicas have of them.

        Args:
            known: of the same prompt, as the client of other replicas told it: its blocks need not be hashed again.
        """
        size, hashing = self._codec.size(request), self.blocks.hashing
        if hashing is None or not self.have_a_say:
            return size

        def looked_up() -> RequestSize:
            is_hashed = known is not None and known.hashing == hashing
            blocks = known.blocks if known is not None and is_hashed else self._codec.block_hashes(request, hashing)
            hits = self.blocks.hit_tokens(blocks, size.prompt_tokens, hashing)
            loads = self.blocks.loads(blocks, size.prompt_tokens, hashing, hits, self._prompt_token_s)
            worth = {replica_id: hits[replica_id] + load.saved_tokens for replica_id, load in loads.items()}
            return replace(size, blocks=blocks, hashing=hashing, hits={**hits, **worth}, loads=loads)

        return await asyncio.to_thread(looked_up) if size.prompt_tokens >= LONG_PROMPT_TOKENS else looked_up()

    def hits(self, size: RequestSize, replica_ids: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """As `PrefixHits.hits`."""
        return self._prefixes.hits(size, replica_ids)

    def told(self, replica_id: str, changes: BlockChanges) -> bool:
        """An engine's word of its cache. False at a gap: it is to be asked for the whole."""
        return self.blocks.apply(replica_id, changes)

    def sent(self, entry: Entry[RequestT], replica_id: str) -> None:
        """A replica was given this request: it has what its ticket says, and soon all of its prompt."""
        if not self.have_a_say:
            return
        entry.load = NOTHING
        if unread_tokens := entry.ticket.unread_tokens:  # else it was read elsewhere, which makes no hits
            saved_tokens = unread_tokens - entry.ticket.unread_at(replica_id)
            entry.load = entry.loads.get(replica_id, NOTHING) if saved_tokens else NOTHING
            entry.predicted_hit_tokens = min(saved_tokens + entry.load.read_tokens, unread_tokens - 1)
            self._metrics.predicted_hit_tokens.labels(entry.slo_class, replica_id).inc(entry.predicted_hit_tokens)
        self._prefixes.placed(replica_id, self._codec.size(entry.request))
        self.blocks.sent(replica_id, entry.blocks, entry.load)
        entry.blocks, entry.loads = (), {}

    def found(self, entry: Entry[RequestT], output: Output) -> None:
        """Its engine may say with this output how much of its prompt it had."""
        hit_tokens = self._codec.cached_tokens(output)
        if hit_tokens is not None and entry.predicted_hit_tokens is not None:
            self._metrics.note_hits(entry.slo_class, entry.predicted_hit_tokens, hit_tokens)
            self._metrics.note_loads(entry.slo_class, entry.load, self._codec.loaded_tokens(output))
            entry.predicted_hit_tokens = None
            if entry.trail is not None:
                entry.trail.found(hit_tokens)

    def forget(self, replica_id: str) -> None:
        """A replica is gone, and what counts by it."""
        self._prefixes.forget(replica_id)
        self.blocks.forget(replica_id)
        self._metrics.forget_replica(replica_id)
