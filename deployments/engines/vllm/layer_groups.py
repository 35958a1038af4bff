"""The groups of layers of an engine's cache, as `policies.router.cached_prefix` counts hits by them."""

from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)

from policies.router.cached_prefix import LayerGroup


def layer_groups(coordinator: Any) -> tuple[LayerGroup, ...] | None:
    """None where hits hang on more than blocks: layers that keep a state, and several groups with a draft model, which
    takes back a block of each."""
    managers, hashed = coordinator.single_type_managers, coordinator.block_pool.hash_block_size
    if isinstance(coordinator, HybridKVCacheCoordinator):
        joint = [tuple(group.group_ids) for group in coordinator.attention_groups]
    else:
        joint = [(0,)]
    groups = [_layer_group(managers[ids[0]], ids, hashed) for ids in joint]
    known = [group for group in groups if group is not None]
    drops = any(managers[ids[0]].use_eagle for ids in joint)
    plain = len(known) == 1 and known[0] == LayerGroup()
    return tuple(known) if len(known) == len(groups) and (plain or not drops) else None


def _layer_group(manager: Any, ids: tuple[int, ...], hashed: int) -> LayerGroup | None:
    """Args:
    hashed: tokens of the blocks that are hashed.
    """
    scale = manager.block_size // hashed
    if type(manager) is FullAttentionManager:
        return LayerGroup(ids=ids, scale=scale)
    if type(manager) is SlidingWindowManager:
        return LayerGroup(ids=ids, scale=scale, window=-(-(manager.sliding_window - 1) // manager.block_size))
    if type(manager) is ChunkedLocalAttentionManager and manager.attention_chunk_size % hashed == 0:
        return LayerGroup(ids=ids, scale=scale, chunk=manager.attention_chunk_size // hashed)
    return None
