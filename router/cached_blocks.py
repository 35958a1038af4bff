"""Which blocks of prompts the engines' prefix caches hold, as the engines tell it.

An engine names a block by a hash of its tokens and of all before it, and keeps it for each group of layers; blocks of
the first group have the hash itself as their name, those of others the hash with a mark of the group. Of a hash 8 bytes
travel and are kept: two blocks that share them cost a wrong guess of a hit and never a wrong answer, because the engine
itself looks up whole hashes; with a million blocks about one look-up in 2e13 meets such a pair. Bytes are in the
machine's order: routers and replicas run on little-endian machines.

Blocks may lie in tiers beyond the cache of the GPU as well: in memory of the host, on a disk, or in a store for all
replicas. Their names there have a mark of the tier, so one set holds all that one engine has anywhere.
"""

import logging
import sys
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import cache
from hashlib import blake2b
from itertools import islice, takewhile
from typing import NamedTuple

import msgspec

from policies.router.cached_prefix import LayerGroup, longest_hit
from policies.router.tiers import NOTHING, Load, Loadable, cheapest_load
from router.clock import Clock
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

BlockHashes = Sequence[int]
"""Hashes of a prompt's whole blocks, in order: unsigned integers of 8 bytes, in an `array` of type "Q"."""

HASH_BYTES = 8
INT_BYTES = 48  # of a Python integer that holds one, as its allocator rounds up
PIECE_BYTES = 1 << 19  # of hashes in one frame: applying it takes a router some milliseconds
ON_THE_WAY_S = 2.0  # about what a prompt waits in an engine, and a report takes
_MARK = 0x9E3779B97F4A7C15  # odd, and its bits look like chance


class BlockHashing(msgspec.Struct, frozen=True):
    """How an engine hashes prompts, and counts hits. Engines that differ in it cannot be compared.

    Attributes:
        block_tokens: of one block.
        algorithm: vLLM's name of it.
        root: the hash before the first block.
        dropped_blocks: of a hit, at its end, which the engine computes again all the same.
        aligned_blocks: hits are a multiple of so many.
        groups: of layers, those with full attention first.
    """

    block_tokens: int
    algorithm: str
    root: bytes
    dropped_blocks: int = 0
    aligned_blocks: int = 1
    groups: tuple[LayerGroup, ...] = (LayerGroup(),)


def group_mark(group_id: int) -> int:
    """What tells the blocks of a group of layers from those of others: their names differ in these bits."""
    return group_id * _MARK % (1 << 8 * HASH_BYTES)


@cache
def tier_mark(tier: str) -> int:
    """What tells the blocks of a tier from those of the GPU and of other tiers."""
    return int.from_bytes(blake2b(tier.encode(), digest_size=HASH_BYTES).digest(), "little")


class Tier(msgspec.Struct, frozen=True):
    """Where an engine keeps blocks beyond the cache of its GPU.

    Attributes:
        name: as vLLM calls the medium.
        token_s: seconds in which a token is loaded from there.
        waiting_s: seconds until all that it loads from there has come.
        chunk_blocks: so many blocks are kept and loaded as one, which goes by the name of its last block.
        is_shared: what one replica put there, all that share it can load.
    """

    name: str
    token_s: float
    waiting_s: float = 0.0
    chunk_blocks: int = 1
    is_shared: bool = False


class BlockChanges(msgspec.Struct):
    """What has changed in one engine's prefix cache.

    Attributes:
        since: the sequence number to which this adds; None where it is all that the cache holds.
        sequence: what is known with it.
        added, removed: hashes, one after the other.
        tiers: beyond the GPU, the nearest first; none where the engine has none.
        prompt_token_s: seconds in which the engine reads a prompt token; None where it does not know.
    """

    since: int | None
    sequence: int
    hashing: BlockHashing
    added: bytes = b""
    removed: bytes = b""
    tiers: tuple[Tier, ...] = ()
    prompt_token_s: float | None = None

    @property
    def is_news(self) -> bool:
        return self.since is None or bool(self.added or self.removed)

    def __len__(self) -> int:
        """Blocks that were added or removed."""
        return (len(self.added) + len(self.removed)) // HASH_BYTES


class BlockSet:
    """The blocks of one engine's prefix cache, and of its tiers."""

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.hashing: BlockHashing | None = None
        self.blocks: set[int] = set()
        self.tiers: tuple[Tier, ...] = ()
        self.prompt_token_s: float | None = None

    def apply(self, changes: BlockChanges) -> bool:
        """False where changes before these are missing; nothing has changed then."""
        if changes.since is None:
            self.blocks, self.hashing = set(), changes.hashing
        elif changes.since != self.sequence:
            return False
        self.blocks.difference_update(memoryview(changes.removed).cast("Q"))
        self.blocks.update(memoryview(changes.added).cast("Q"))
        self.sequence = changes.sequence
        self.tiers, self.prompt_token_s = changes.tiers, changes.prompt_token_s
        return True

    def whole(self) -> Iterator[BlockChanges]:
        """All of it, in pieces that fit into frames. Nothing before the first report."""
        if self.sequence is None or self.hashing is None:
            return
        hashes = array("Q", self.blocks).tobytes()
        for start in range(0, max(1, len(hashes)), PIECE_BYTES):
            since, piece = self.sequence if start else None, hashes[start : start + PIECE_BYTES]
            yield BlockChanges(since, self.sequence, self.hashing, piece, b"", self.tiers, self.prompt_token_s)


class _Replica:
    """What one replica holds, and what it will hold soon: it was sent within the last ON_THE_WAY_S, or twice that.

    Attributes:
        loaded_s: until when its loads from each tier take.
    """

    def __init__(self) -> None:
        self.told = BlockSet()
        self.loaded_s: dict[str, float] = {}
        self._sent: set[int] = set()
        self._sent_before: set[int] = set()
        self._turned_s = 0.0

    def sent(self, blocks: BlockHashes, load: Load, now_s: float) -> None:
        self._forget_old(now_s)
        self._sent.update(blocks)
        for part in load.parts:
            self.loaded_s[part.tier] = max(now_s, self.loaded_s.get(part.tier, 0.0)) + part.tokens * part.token_s

    def apply(self, changes: BlockChanges, now_s: float) -> bool:
        """As `BlockSet.apply`. Its own word of what it loads counts, for others send it requests as well."""
        self.loaded_s = {tier.name: now_s + tier.waiting_s for tier in changes.tiers}
        return self.told.apply(changes)

    def cached(self, prompt: "PromptBlocks", now_s: float) -> "_Cached":
        """What it has of a prompt, or will have soon: what was sent counts for all groups of layers."""
        self._forget_old(now_s)
        return _Cached(prompt, self.told.blocks, self._sent, self._sent_before)

    def _forget_old(self, now_s: float) -> None:
        if now_s - self._turned_s > ON_THE_WAY_S:
            is_recent = now_s - self._turned_s <= 2 * ON_THE_WAY_S
            self._sent_before, self._sent = (self._sent if is_recent else set()), set()
            self._turned_s = now_s


class PromptBlocks:
    """The names of a prompt's blocks, by group of layers.

    Attributes:
        blocks: how many are hashed.
    """

    def __init__(self, blocks: BlockHashes, groups: Sequence[LayerGroup]) -> None:
        hashes = list(blocks)  # once, for an array makes new integers each time
        self.blocks = len(hashes)
        self.hashes = {group.scale: hashes[group.scale - 1 :: group.scale] for group in groups}
        self.names = {
            group_id: [each ^ mark for each in self.hashes[group.scale]]
            if (mark := group_mark(group_id))
            else self.hashes[group.scale]
            for group in groups
            for group_id in group.ids
        }


class _Cached:
    """A `policies.router.cached_prefix.CachedPrompt` of one replica."""

    def __init__(self, prompt: PromptBlocks, told: Set[int], sent: Set[int], sent_before: Set[int]) -> None:
        self._prompt, self._told, self._sent, self._sent_before = prompt, told, sent, sent_before

    def has(self, group: LayerGroup, block: int) -> bool:
        names, told = self._prompt.names, self._told
        if all(names[group_id][block] in told for group_id in group.ids):
            return True
        known = self._prompt.hashes[group.scale][block]
        return known in self._sent or known in self._sent_before

    def leading(self, group: LayerGroup, most: int) -> int:
        names, known = self._prompt.names, most
        for group_id in group.ids:  # mostly all: the rest looks at each in Python
            known = len(list(takewhile(self._told.__contains__, islice(names[group_id], known))))
        while known < most and self.has(group, known):
            known += 1
        return known


class Stored(NamedTuple):
    """What is known of one tier.

    Attributes:
        tier: where.
        names: sets that have the names of its blocks.
        wait_s: seconds until what is being loaded from there has come.
    """

    tier: Tier
    names: Collection[Collection[int]]
    wait_s: float


class _Beyond:
    """A `policies.router.cached_prefix.CachedPrompt`: what the GPU has, and what some tiers have behind it."""

    def __init__(self, prompt: PromptBlocks, hit_blocks: int, tiers: Sequence[Stored]) -> None:
        self._prompt, self._hit_blocks, self._tiers = prompt, hit_blocks, tiers

    def has(self, group: LayerGroup, block: int) -> bool:
        is_hit = (block + 1) * group.scale <= self._hit_blocks
        return is_hit or any(self._lies_in(stored, group, block) for stored in self._tiers)

    def _lies_in(self, stored: Stored, group: LayerGroup, block: int) -> bool:
        mark, chunk_blocks = tier_mark(stored.tier.name), stored.tier.chunk_blocks
        last = block - block % chunk_blocks + chunk_blocks - 1
        names = (self._prompt.names[group_id] for group_id in group.ids)
        return all(last < len(each) and any(each[last] ^ mark in known for known in stored.names) for each in names)

    def leading(self, group: LayerGroup, most: int) -> int:
        known = min(most, self._hit_blocks // group.scale)
        while known < most and self.has(group, known):
            known += 1
        return known


def loadable(
    prompt: PromptBlocks, prompt_tokens: int, hashing: BlockHashing, hit_tokens: int, tiers: Sequence[Stored]
) -> list[Loadable]:
    """What tiers have of a prompt behind the hit of the GPU, in whole blocks up to the end of the prompt, as vLLM's
    offloading counts (0.32), which loads no less than a chunk.

    Args:
        tiers: the nearest first.
    """
    hit_blocks, have, found = hit_tokens // hashing.block_tokens, hit_tokens, list[Loadable]()
    most = min(prompt.blocks, prompt_tokens // hashing.block_tokens)
    for count, (tier, _, wait_s) in enumerate(tiers, start=1):
        beyond = _Beyond(prompt, hit_blocks, tiers[:count])
        end = longest_hit(hashing.groups, beyond, most, hashing.aligned_blocks) * hashing.block_tokens
        if end - hit_tokens >= tier.chunk_blocks * hashing.groups[0].scale * hashing.block_tokens and end > have:
            found.append(Loadable(tier=tier.name, tokens=end - have, token_s=tier.token_s, wait_s=wait_s))
            have = end
    return found


class CachedBlocks:
    """The blocks of all replicas that tell theirs, bounded by their caches.

    One set for each replica: it goes away with its replica in one step, and takes less than one table of all blocks
    with the replicas of each. Prompts may be looked up in a thread while the event loop changes the sets.
    """

    def __init__(self, clock: Clock, metrics: RouterMetrics) -> None:
        self._clock, self._metrics = clock, metrics
        self._replicas: dict[str, _Replica] = {}

    @property
    def hashing(self) -> BlockHashing | None:
        """How prompts are hashed: as by the replica that is known longest; None while none is known."""
        return next((replica.told.hashing for replica in self._replicas.values()), None)

    def apply(self, replica_id: str, changes: BlockChanges) -> bool:
        """False at a gap: the replica is not known any more until it tells the whole, for which it is to be asked."""
        self._metrics.block_changes.inc(len(changes))
        if changes.since is None:
            self._warn_of_another(replica_id, changes.hashing)
            self._replicas.setdefault(replica_id, _Replica())
        replica = self._replicas.get(replica_id)
        if replica is None:  # it has been asked
            return True
        is_complete = replica.apply(changes, self._clock.now())
        if not is_complete:
            self._metrics.block_gaps.inc()
            del self._replicas[replica_id]
        self._note_size()
        return is_complete

    def forget(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None) is not None:
            self._note_size()

    def sent(self, replica_id: str, blocks: BlockHashes, load: Load = NOTHING) -> None:
        """A replica was given a prompt of these blocks, for which it is taken to load these tokens."""
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.sent(blocks, load, self._clock.now())

    def hit_tokens(self, blocks: BlockHashes, prompt_tokens: int, hashing: BlockHashing) -> Mapping[str, int]:
        """Tokens of a prompt that each replica would not compute, 0 included; without those that cannot be told.

        As vLLM counts: whole blocks, and the last token of a prompt is always computed.

        Args:
            hashing: by which the blocks were hashed.
        """
        most, now_s = min(len(blocks), (prompt_tokens - 1) // hashing.block_tokens), self._clock.now()
        prompt = PromptBlocks(blocks, hashing.groups)

        def hit(replica: _Replica) -> int:
            found = longest_hit(hashing.groups, replica.cached(prompt, now_s), most, hashing.aligned_blocks)
            return max(0, found - hashing.dropped_blocks) * hashing.block_tokens

        replicas = list(self._replicas.items())
        return {replica_id: hit(replica) for replica_id, replica in replicas if replica.told.hashing == hashing}

    def loads(
        self,
        blocks: BlockHashes,
        prompt_tokens: int,
        hashing: BlockHashing,
        hits: Mapping[str, int],
        prompt_token_s: float,
    ) -> Mapping[str, Load]:
        """What replicas had best load of a prompt; without those that have no tiers, or had better read it.

        Args:
            hits: as of `hit_tokens`.
            prompt_token_s: seconds in which a prompt token is read, where a replica does not know.
        """
        replicas = [each for each in list(self._replicas.items()) if each[0] in hits and each[1].told.tiers]
        if not replicas:
            return {}
        prompt, now_s, found = PromptBlocks(blocks, hashing.groups), self._clock.now(), dict[str, Load]()
        everywhere = [replica.told.blocks for replica in list(self._replicas.values())]
        for replica_id, replica in replicas:
            told = replica.told
            stored = [
                Stored(
                    tier,
                    everywhere if tier.is_shared else [told.blocks],
                    max(0.0, replica.loaded_s.get(tier.name, 0.0) - now_s),
                )
                for tier in told.tiers
            ]
            parts = loadable(prompt, prompt_tokens, hashing, hits[replica_id], stored)
            load = cheapest_load(parts, told.prompt_token_s or prompt_token_s)
            if load.parts:
                found[replica_id] = load
        return found

    def __len__(self) -> int:
        return sum(len(replica.told.blocks) for replica in self._replicas.values())

    @property
    def nbytes(self) -> int:
        """Bytes of sets and hashes."""
        tables = sum(sys.getsizeof(replica.told.blocks) for replica in self._replicas.values())
        return tables + INT_BYTES * len(self)

    def _warn_of_another(self, replica_id: str, theirs: BlockHashing) -> None:
        ours = self.hashing
        if ours is not None and ours != theirs:
            logger.warning(
                "replica %s hashes blocks of %d tokens with %s from %s, the others blocks of %d tokens with %s from "
                "%s: what its prefix cache holds does not count. Give all engines of a model the same --block-size, "
                "--prefix-caching-hash-algo and PYTHONHASHSEED",
                replica_id,
                *(theirs.block_tokens, theirs.algorithm, theirs.root[:4].hex()),
                *(ours.block_tokens, ours.algorithm, ours.root[:4].hex()),
            )

    def _note_size(self) -> None:
        self._metrics.cached_blocks.set(len(self))
        self._metrics.cached_blocks_bytes.set(self.nbytes)
