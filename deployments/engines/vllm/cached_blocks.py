"""In the engine-core process of a replica: what its prefix cache holds, for its routers; and their side of the hashes.

vLLM (0.32) can publish events of its cache, and they do not say what it holds: of two blocks with one hash the first
that goes is told as removed, while the other is still found. Events cost a copy of the block's tokens besides. So the
table that the cache itself looks up notes which of its hashes have changed; what it holds of those is read when asked.
What tiers beyond the GPU hold is told with it (`cached_tiers`). Of a hash the last 8 bytes are kept, of which vLLM's
events make their integers.
"""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from itertools import count
from typing import Any

import msgspec
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from deployments.engines.features import IN_WORDS, Feature, why_off
from deployments.engines.vllm.cached_tiers import TierTable, note_tiers, tier_table
from deployments.engines.vllm.causes import causes_of_scheduler
from deployments.engines.vllm.layer_groups import layer_groups
from policies.types import Paced
from router.cached_blocks import HASH_BYTES, PIECE_BYTES, BlockHashes, BlockHashing, group_mark

_GROUP_BYTES, _FIRST_GROUP = 4, bytes(4)  # which end a key of vLLM's table
MAX_NOTED = PIECE_BYTES // HASH_BYTES  # what has changed beyond is told with all the rest
NO_TIERS = TierTable()
_sequences = count(1)  # one series for all tables: a reset makes a new one, which continues none


class NotingBlocks(BlockHashToBlockMap):
    """vLLM's table from hashes to blocks, which notes the hashes that were touched since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self._touched: set[bytes] = set()
        self._sequence = next(_sequences)

    def insert(self, key: Any, block: Any) -> None:
        super().insert(key, block)
        self._note(key)

    def pop(self, key: Any, block_id: int) -> Any:
        self._note(key)
        return super().pop(key, block_id)

    def _note(self, key: bytes) -> None:
        if len(self._touched) < MAX_NOTED:
            self._touched.add(key)

    def changes(self, since: int | None, tiers: TierTable) -> dict[str, Any]:
        """Since that sequence number, or all; of `router.cached_blocks.BlockChanges` what is known of blocks."""
        added: Iterable[bytes]
        removed: Iterable[bytes]
        if since != self._sequence or len(self._touched) >= MAX_NOTED or not tiers.is_noted:
            since, added, removed, stored, dropped = None, self._cache, (), tiers.whole(), b""
        else:
            added = [key for key in self._touched if key in self._cache]
            removed = [key for key in self._touched if key not in self._cache]
            stored, dropped = tiers.changes()
        packed = _packed(added) + stored, _packed(removed) + dropped
        if self._touched or tiers.has_changed or since is None:
            self._touched, self._sequence = set(), next(_sequences)
            tiers.told()
        return {"since": since, "sequence": self._sequence, "added": packed[0], "removed": packed[1]}


def _packed(keys: Iterable[bytes]) -> bytes:
    return b"".join(
        _last_bytes(key) if key[-_GROUP_BYTES:] == _FIRST_GROUP else _marked(_last_bytes(key), key[-_GROUP_BYTES:])
        for key in keys
    )


def _last_bytes(key: bytes) -> bytes:
    """Of the hash in a key."""
    return key[-_GROUP_BYTES - HASH_BYTES : -_GROUP_BYTES]


def _marked(block: bytes, group: bytes) -> bytes:
    mark = group_mark(int.from_bytes(group, "big"))
    return (int.from_bytes(block, sys.byteorder) ^ mark).to_bytes(HASH_BYTES, sys.byteorder)


def note_cached_blocks() -> None:
    """From now on in every prefix cache that vLLM makes."""
    block_pool.BlockHashToBlockMap = NotingBlocks
    note_tiers()


def core_blocks(core: Any, since: int | None) -> dict[str, Any] | str:
    """Engine-core utility `sluice_blocks`: a `router.cached_blocks.BlockChanges`, or why there is none."""
    if why := why_off(Feature.EXACT_HITS, causes_of_scheduler(core.scheduler)):
        return ", ".join(IN_WORDS[each] for each in why)
    cache, beyond = core.scheduler.kv_cache_manager, tier_table(core.scheduler)
    hashing = block_hashing(cache.coordinator, core.vllm_config.cache_config.prefix_caching_hash_algo)
    table = cache.block_pool.cached_block_hash_to_block
    if beyond is None:
        return {**table.changes(since, NO_TIERS), "hashing": hashing}
    changes, tiers = (
        table.changes(since, beyond),
        [msgspec.structs.asdict(tier) for tier in beyond.tiers(core.scheduler)],
    )
    return {**changes, "hashing": hashing, "tiers": tiers, "prompt_token_s": _pace_s(core.scheduler)}


def _pace_s(scheduler: Any) -> float | None:
    """Seconds in which it reads a prompt token, as far as its policy knows."""
    planner = getattr(scheduler, "planner", None)
    policy = None if planner is None else planner.policy
    return policy.seconds_per_prompt_token if isinstance(policy, Paced) else None


def block_hashing(coordinator: Any, algorithm: str) -> dict[str, Any]:
    """A `router.cached_blocks.BlockHashing`."""
    hashed_tokens = coordinator.block_pool.hash_block_size
    return {
        "block_tokens": hashed_tokens,
        "algorithm": algorithm,
        "root": bytes(kv_cache_utils.NONE_HASH),
        "dropped_blocks": int(coordinator.single_type_managers[0].use_eagle),
        "aligned_blocks": coordinator.scheduler_block_size // hashed_tokens,
        "groups": [asdict(group) for group in layer_groups(coordinator) or ()],
    }


def request_block_hashes(asked: EngineCoreRequest, hashing: BlockHashing) -> BlockHashes:
    """As `router.codec.EngineCodec.block_hashes`: by vLLM's own functions, adapter, salt and media included.

    The first block is hashed from the root that the engine has, for vLLM's own of this process may be another.
    """
    request = Request.from_engine_core_request(asked, None)
    if request.num_tokens < hashing.block_tokens or request.skip_reading_prefix_cache:
        return array("Q")
    hash_function = get_hash_fn_by_name(hashing.algorithm)
    extra_keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, hashing.block_tokens, 0)
    tokens = request.all_token_ids[: hashing.block_tokens]
    request.block_hashes.append(kv_cache_utils.hash_block_tokens(hash_function, hashing.root, tokens, extra_keys))
    rest = kv_cache_utils.get_request_block_hasher(hashing.block_tokens, hash_function)(request)
    return array("Q", b"".join(each[-HASH_BYTES:] for each in (request.block_hashes[0], *rest)))
