"""Which blocks of prompts the engines' prefix caches hold, as the engines tell it.

An engine names a block by a hash of its tokens and of all before it, and keeps it for each group of layers; blocks of
the first group have the hash itself as their name, those of others the hash with a mark of the group. Of a hash 8 bytes
travel and are kept: two blocks that share them cost a wrong guess of a hit and never a wrong answer, because the engine
itself looks up whole hashes; with a million blocks about one look-up in 2e13 meets such a pair. Bytes are in the
machine's order: routers and replicas run on little-endian machines.
"""

import logging
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice, takewhile

import msgspec

from policies.router.cached_prefix import LayerGroup, longest_hit
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


class BlockChanges(msgspec.Struct):
    """What has changed in one engine's prefix cache.

    Attributes:
        since: the sequence number to which this adds; None where it is all that the cache holds.
        sequence: what is known with it.
        added, removed: hashes, one after the other.
    """

    since: int | None
    sequence: int
    hashing: BlockHashing
    added: bytes = b""
    removed: bytes = b""

    @property
    def is_news(self) -> bool:
        return self.since is None or bool(self.added or self.removed)

    def __len__(self) -> int:
        """Blocks that were added or removed."""
        return (len(self.added) + len(self.removed)) // HASH_BYTES


class BlockSet:
    """The blocks of one engine's prefix cache."""

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.hashing: BlockHashing | None = None
        self.blocks: set[int] = set()

    def apply(self, changes: BlockChanges) -> bool:
        """False where changes before these are missing; nothing has changed then."""
        if changes.since is None:
            self.blocks, self.hashing = set(), changes.hashing
        elif changes.since != self.sequence:
            return False
        self.blocks.difference_update(memoryview(changes.removed).cast("Q"))
        self.blocks.update(memoryview(changes.added).cast("Q"))
        self.sequence = changes.sequence
        return True

    def whole(self) -> Iterator[BlockChanges]:
        """All of it, in pieces that fit into frames. Nothing before the first report."""
        if self.sequence is None or self.hashing is None:
            return
        hashes = array("Q", self.blocks).tobytes()
        for start in range(0, max(1, len(hashes)), PIECE_BYTES):
            since = self.sequence if start else None
            yield BlockChanges(since, self.sequence, self.hashing, hashes[start : start + PIECE_BYTES])


class _Replica:
    """What one replica holds, and what it will hold soon: it was sent within the last ON_THE_WAY_S, or twice that."""

    def __init__(self) -> None:
        self.told = BlockSet()
        self._sent: set[int] = set()
        self._sent_before: set[int] = set()
        self._turned_s = 0.0

    def sent(self, blocks: BlockHashes, now_s: float) -> None:
        self._forget_old(now_s)
        self._sent.update(blocks)

    def cached(self, prompt: "_Prompt", now_s: float) -> "_Cached":
        """What it has of a prompt, or will have soon: what was sent counts for all groups of layers."""
        self._forget_old(now_s)
        return _Cached(prompt, self.told.blocks, self._sent, self._sent_before)

    def _forget_old(self, now_s: float) -> None:
        if now_s - self._turned_s > ON_THE_WAY_S:
            is_recent = now_s - self._turned_s <= 2 * ON_THE_WAY_S
            self._sent_before, self._sent = (self._sent if is_recent else set()), set()
            self._turned_s = now_s


class _Prompt:
    """The names of a prompt's blocks, by group of layers."""

    def __init__(self, blocks: BlockHashes, groups: Sequence[LayerGroup]) -> None:
        hashes = list(blocks)  # once, for an array makes new integers each time
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

    def __init__(self, prompt: _Prompt, told: Set[int], sent: Set[int], sent_before: Set[int]) -> None:
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
        is_complete = replica.told.apply(changes)
        if not is_complete:
            self._metrics.block_gaps.inc()
            del self._replicas[replica_id]
        self._note_size()
        return is_complete

    def forget(self, replica_id: str) -> None:
        if self._replicas.pop(replica_id, None) is not None:
            self._note_size()

    def sent(self, replica_id: str, blocks: BlockHashes) -> None:
        """A replica was given a prompt of these blocks."""
        if (replica := self._replicas.get(replica_id)) is not None:
            replica.sent(blocks, self._clock.now())

    def hit_tokens(self, blocks: BlockHashes, prompt_tokens: int, hashing: BlockHashing) -> Mapping[str, int]:
        """Tokens of a prompt that each replica would not compute, 0 included; without those that cannot be told.

        As vLLM counts: whole blocks, and the last token of a prompt is always computed.

        Args:
            hashing: by which the blocks were hashed.
        """
        most, now_s = min(len(blocks), (prompt_tokens - 1) // hashing.block_tokens), self._clock.now()
        prompt = _Prompt(blocks, hashing.groups)

        def hit(replica: _Replica) -> int:
            found = longest_hit(hashing.groups, replica.cached(prompt, now_s), most, hashing.aligned_blocks)
            return max(0, found - hashing.dropped_blocks) * hashing.block_tokens

        replicas = list(self._replicas.items())
        return {replica_id: hit(replica) for replica_id, replica in replicas if replica.told.hashing == hashing}

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
