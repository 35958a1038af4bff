"""KV blocks for what policies count, tokens, where layers of several kinds share one pool (vLLM's hybrid caches).

A group of layers with full attention takes a block of each request for every so many tokens. One with a window takes
them as far as the window, one with a state (Mamba, cross attention) the same few of every request. So a batch is
counted in two ways, either of which is safe: as if windows had no end, exact as long as requests are shorter; and as
if every request filled its windows. The way that leaves more room holds.
"""

from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from policies.types import RunningRequests


class Group(NamedTuple):
    """Of layers that share a block table.

    Attributes:
        block_size: tokens per block.
        most: blocks that one request holds, however long it is; None grows with every token.
        in_flight: blocks besides that steps on their way hold, of all requests together.
        windowed: it grows with every token until then.
    """

    block_size: int
    most: int | None = None
    in_flight: int = 0
    windowed: bool = False


class PoolShare:
    """What of the pool is there for tokens, in blocks of those groups that grow.

    Attributes:
        block_size: tokens per block.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        growing = [group for group in groups if group.most is None]
        self.block_size = max(group.block_size for group in growing or groups)
        bounded = [group for group in groups if group.most is not None] if growing else []
        states = [group for group in bounded if not group.windowed]
        # Each way: groups taken to grow, and groups taken to be filled.
        self._ways = [(growing or list(groups), bounded)]
        if len(states) < len(bounded):
            self._ways.append(([group for group in groups if group not in states], states))

    def count(self, free: int, total: int, running: RunningRequests, coming: int) -> tuple[int, int]:
        """Free and total blocks, as policies count them.

        Args:
            free, total: of the whole pool.
            coming: requests that may start in this step.
        """
        return max((self._counted(way, free, total, running, coming) for way in self._ways), key=lambda found: found[1])

    def _counted(
        self, way: tuple[list[Group], list[Group]], free: int, total: int, running: RunningRequests, coming: int
    ) -> tuple[int, int]:
        growing, filled = way
        shares = sum(self.block_size / group.block_size for group in growing)
        kept = held = 0
        for group in filled:
            most = group.most or 0
            kept += (len(running) + coming) * most + group.in_flight
            tokens = running.prompt_tokens + running.output_tokens - running.prefill_tokens_left
            held += int(np.minimum(-(-tokens // group.block_size), most).sum())
        left, used = max(0, total - kept), max(0, total - free - held)
        return int(max(0, left - used) / shares), int(left / shares)


def pool_share(scheduler: Scheduler) -> PoolShare:
    cache, config = scheduler.kv_cache_manager, scheduler.vllm_config
    managers = cache.coordinator.single_type_managers
    return PoolShare(tuple(_group(each, config) for each in managers if each.block_pool is cache.block_pool))


def _group(manager: Any, config: Any) -> Group:
    spec = manager.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    size = manager.block_size
    if isinstance(spec, FullAttentionSpec):
        return Group(size)
    windowed = manager.max_admission_blocks_per_request is not None
    if not windowed:
        return Group(size, spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
    longest = config.model_config.max_model_len
    most = spec.max_admission_blocks_per_request(max_in_flight_tokens=0, max_model_len=longest)
    return Group(size, most, -(-config.max_in_flight_tokens // size), windowed=True)
