"""In the engine-core process of a replica: what vLLM keeps beyond the cache of the GPU, as its own KV events tell it.

A connector of vLLM (0.32) that offloads says in events where a block lies: BlockStored and BlockRemoved with the medium
CPU or STORAGE, and whether the storage is another machine's. Its events are complete, unlike those of the GPU's cache
(see `cached_blocks`): a tier holds a block once. They have no tokens, and need none, for the hash is the block's name.
Files and stores tell what came, and not what went; so of each tier the oldest beyond MOST_BLOCKS are forgotten.
Mooncake's store says cpu in small letters, and means a store for all.
"""

import math
import sys
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed import kv_events
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    KVEventBatch,
)

from router.cached_blocks import HASH_BYTES, PIECE_BYTES, Stored, Tier, group_mark, tier_mark

STORE = "STORE"
NEAREST_FIRST = (MEDIUM_CPU, MEDIUM_STORAGE, STORE)
# Until loads are measured: PCI Express 5.0 has 63 GB/s a direction on the 16 lanes of an H100, of which copies get four
# fifths; a fast disk has 7 GB/s, and a network of 100 Gbit/s 12.5 GB/s.
BYTES_PER_S: Mapping[str, float] = {MEDIUM_CPU: 50e9, MEDIUM_STORAGE: 5e9, STORE: 10e9}
MOST_BLOCKS = 1 << 20  # of a tier
MOST_NOTED = PIECE_BYTES // HASH_BYTES  # what has changed beyond is told with all the rest
_SPEED_MEMORY_S = 60.0  # of loads, after which what was measured has lost two thirds of its weight
# What vLLM's offloading counts: loads into the GPU's cache, and reads of further tiers by the number and name of each.
_LOADED = ("vllm:kv_offload_load_bytes", "vllm:kv_offload_load_time")
_READ = ("vllm:kv_offload_tiering_read_bytes", "vllm:kv_offload_tiering_read_time")


def tier_of(event: BlockStored | BlockRemoved) -> str | None:
    """None of the GPU's cache."""
    medium = event.medium
    if medium is None or medium == MEDIUM_GPU:
        return None
    return STORE if event.locality == "REMOTE" or medium == MEDIUM_CPU.lower() else medium


def block_name(block_hash: bytes | int, group_id: int, tier: str) -> int:
    """By which routers know a block: vLLM makes integers of its hashes' last 8 bytes, or leaves them whole."""
    whole = block_hash.to_bytes(HASH_BYTES, "big") if isinstance(block_hash, int) else block_hash[-HASH_BYTES:]
    return int.from_bytes(whole, sys.byteorder) ^ group_mark(group_id) ^ tier_mark(tier)


class LoadSpeed:
    """Bytes per second of one tier's loads."""

    def __init__(self, bytes_per_s: float) -> None:
        """Args:
        bytes_per_s: until one was measured.
        """
        self._bytes, self._seconds, self._expected = 0.0, 0.0, bytes_per_s

    def observe(self, loaded_bytes: float, seconds: float) -> None:
        kept = math.exp(-seconds / _SPEED_MEMORY_S)
        self._bytes, self._seconds = kept * self._bytes + loaded_bytes, kept * self._seconds + seconds

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds if self._bytes > 0.0 and self._seconds > 0.0 else self._expected


class TierTable:
    """The names of the blocks in all tiers of one engine, and which of them have changed since they were last told."""

    def __init__(self) -> None:
        self._held: defaultdict[str, OrderedDict[int, None]] = defaultdict(OrderedDict)
        self._touched: dict[int, str] = {}
        self.speeds = {tier: LoadSpeed(bytes_per_s) for tier, bytes_per_s in BYTES_PER_S.items()}

    def note(self, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """What a step of the engine has changed, in order.

        Of a cache that is reset as a whole vLLM tells the GPU's part alone; what the tiers still have is forgotten too.
        """
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear()
            elif (tier := tier_of(event)) is not None and tier in BYTES_PER_S:
                names = [block_name(each, event.group_idx or 0, tier) for each in event.block_hashes]
                self._store(tier, names) if isinstance(event, BlockStored) else self._remove(tier, names)

    def _store(self, tier: str, names: Iterable[int]) -> None:
        held = self._held[tier]
        for name in names:
            held[name] = None
            held.move_to_end(name)
            self._note(name, tier)
        while len(held) > MOST_BLOCKS:
            self._note(held.popitem(last=False)[0], tier)

    def _remove(self, tier: str, names: Iterable[int]) -> None:
        for name in names:
            if self._held[tier].pop(name, self) is None:
                self._note(name, tier)

    def _clear(self) -> None:
        for tier, held in self._held.items():
            for name in held:
                self._note(name, tier)
        self._held.clear()

    def _note(self, name: int, tier: str) -> None:
        if len(self._touched) < MOST_NOTED:
            self._touched[name] = tier

    @property
    def has_changed(self) -> bool:
        return bool(self._touched)

    @property
    def is_noted(self) -> bool:
        """Whether all that has changed was noted."""
        return len(self._touched) < MOST_NOTED

    def whole(self) -> bytes:
        """All names, one after the other."""
        return b"".join(array("Q", held).tobytes() for held in self._held.values())

    def changes(self) -> tuple[bytes, bytes]:
        """What came and what went, likewise."""
        came, went = array("Q"), array("Q")
        for name, tier in self._touched.items():
            (came if name in self._held[tier] else went).append(name)
        return came.tobytes(), went.tobytes()

    def told(self) -> None:
        self._touched.clear()

    def stored(self, tiers: Iterable[Tier]) -> list[Stored]:
        return [Stored(tier, [self._held[tier.name]], tier.waiting_s) for tier in tiers]

    def measured(self, stats: Mapping[str, Any]) -> None:
        """What loads took, from the numbers of vLLM's offloading."""
        counts: Mapping[str, Mapping[tuple[str, ...], float]] = stats.get("data", {})
        loaded, seconds = (sum(counts.get(name, {}).values()) for name in _LOADED)
        if loaded and seconds:
            self.speeds[MEDIUM_CPU].observe(loaded, seconds)
        for label, read in counts.get(_READ[0], {}).items():
            if seconds := counts.get(_READ[1], {}).get(label, 0.0):
                self.speeds[MEDIUM_STORAGE].observe(read, seconds)

    def tiers(self, scheduler: Any) -> tuple[Tier, ...]:
        """Those that hold anything, with what a load from there takes."""
        token_bytes, chunk_blocks = _token_bytes(scheduler), _chunk_blocks(scheduler)
        loading = _loading_tokens(scheduler)
        found = []
        for name in NEAREST_FIRST:
            token_s = token_bytes / self.speeds[name].bytes_per_s
            if self._held[name]:
                waiting_s = loading * token_s if name == MEDIUM_CPU else 0.0
                found.append(Tier(name, token_s, waiting_s, chunk_blocks, name == STORE))
        return tuple(found)


class NotingPublisher(EventPublisher):
    """Notes what the events say of tiers, and passes them on.

    Attributes:
        tiers: of the engine.
    """

    def __init__(self, publisher: EventPublisher) -> None:
        self.tiers = TierTable()
        self._publisher = publisher

    def publish(self, events: KVEventBatch) -> None:
        self.tiers.note(events.events)
        self._publisher.publish(events)

    def shutdown(self) -> None:
        self._publisher.shutdown()

    def get_publisher_config(self) -> Any:
        return self._publisher.get_publisher_config()


def note_tiers() -> None:
    """From now on for every scheduler that vLLM makes with KV events."""
    create = kv_events.EventPublisherFactory.create

    def create_noting(config: Any, data_parallel_rank: int = 0) -> EventPublisher:
        publisher = create(config, data_parallel_rank)
        tells = config is not None and config.enable_kv_cache_events
        return NotingPublisher(publisher) if tells else publisher

    kv_events.EventPublisherFactory.create = create_noting


def tier_table(scheduler: Any) -> TierTable | None:
    """None where nothing tells of tiers."""
    publisher = scheduler.kv_event_publisher
    return publisher.tiers if isinstance(publisher, NotingPublisher) else None


def _token_bytes(scheduler: Any) -> float:
    """Of the cache, in one worker."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
        for group in groups
    )


def _chunk_blocks(scheduler: Any) -> int:
    """Blocks that are offloaded as one."""
    transfer = scheduler.vllm_config.kv_transfer_config
    given = transfer.kv_connector_extra_config if transfer is not None else {}
    tokens = int(given.get("block_size", 0))
    return int(given.get("blocks_per_chunk", 0)) or max(1, tokens // scheduler.block_size)


def _loading_tokens(scheduler: Any) -> int:
    """Of requests whose caches are being loaded."""
    known = (request.prefill_stats for request in scheduler.kv_holding_waiting)
    return sum(stats.num_external_cached_tokens for stats in known if stats is not None)
