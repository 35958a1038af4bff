"""KV blocks for what policies count, tokens, where layers of several kinds share one pool (vLLM's hybrid caches).

A group of layers with full attention takes a block for every `block_size` tokens of a request. One with a window takes
blocks up to the window, one with a state (Mamba, cross attention) the same few for every request. So a batch is
counted in two ways, either of which is safe: as if windows had no end, exact as long as requests are shorter; and as
if every request filled its windows. The way that leaves more room holds.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from policies.types import RequestView, RunningRequests


class Group(NamedTuple):
    """A group of layers that share a block table.

    Attributes:
        block_size: tokens per block.
        most: blocks that one request holds, however long it is; None grows with every token.
        in_flight: further blocks that steps in flight hold, all requests together.
        windowed: it grows with every token until then.
    """

    block_size: int
    most: int | None = None
    in_flight: int = 0
    windowed: bool = False


class _Reading(NamedTuple):
    """One of the ways to count: the share of those groups that are taken to grow, and those taken to be filled."""

    shares: float
    filled: tuple[tuple[Group, int], ...]


class PoolShare:
    """What of the pool is there for tokens, in blocks of those groups that grow, and how many requests it has room for.

    Attributes:
        block_size: tokens per block.
    """

    def __init__(self, groups: tuple[Group, ...]) -> None:
        growing = [group for group in groups if group.most is None]
        windows = [group for group in groups if group.windowed]
        states = [group for group in groups if group.most is not None and not group.windowed]
        self.block_size = max(group.block_size for group in growing or groups)
        self._states = sum(group.most or 0 for group in states)
        self._others = [*growing, *windows]
        if growing:
            self._windows_filled = self._reading(growing, [*windows, *states])
            self._windows_endless = self._reading(self._others, states) if windows else None
        else:  # counted whole
            self._windows_filled, self._windows_endless = self._reading(groups, ()), None

    def _reading(self, growing: Sequence[Group], filled: Sequence[Group]) -> _Reading:
        shares = sum(self.block_size / group.block_size for group in growing)
        return _Reading(shares, tuple((group, group.most or 0) for group in filled))

    def slots(self, slots: int, free: int, running: RunningRequests, begun: int) -> int:
        """How many of these slots can have a request: each that starts takes its states, however short it is.

        Policies count tokens alone, so what is kept for states must not be kept for requests that tokens hold back
        anyway: there is room for as many more as would fit if they were like those that run. One more may come wherever
        it could start at all. Without states the slots are as given.

        Args:
            free: blocks of the whole pool.
            begun: requests that wait, may start, and hold theirs already.
        """
        if not self._states:
            return slots
        least = self._states + len(self._others)
        room = max(free // self._mean_blocks(running), int(free >= least))
        return max(1, min(slots, len(running) + begun + room))

    def _mean_blocks(self, running: RunningRequests) -> int:
        """Mean blocks of a running request."""
        return self._blocks(running.total_tokens // len(running) if len(running) else 0)

    def _blocks(self, tokens: int) -> int:
        """Blocks of a request with these tokens: its states, and at least a block of every other group."""
        blocks = self._states
        for group in self._others:
            grown = 1 + tokens // group.block_size
            blocks += grown if group.most is None else min(grown, group.most)
        return blocks

    def count(self, free: int, total: int, running: RunningRequests, coming: Sequence[RequestView]) -> tuple[int, int]:
        """Free and total blocks, as policies count them.

        Args:
            free, total: of the whole pool.
            coming: requests that may start in this step and hold nothing yet. What windows and states take is kept for
                as many of them as there is room for with answers as long as those that run have by now, and for one
                more: kept for a whole queue it would leave nothing for tokens.
        """
        count = len(coming)
        if count and self._windows_filled.filled:
            answered = running.output_tokens.mean() if len(running) else 0.0
            mean = sum([request.prompt_tokens for request in coming]) / count + answered
            count = min(count, free // self._blocks(int(mean)) + 1)
        found = self._counted(self._windows_filled, free, total, running, count)
        if self._windows_endless is None:
            return found
        return max(found, self._counted(self._windows_endless, free, total, running, count), key=itemgetter(1))

    def _counted(
        self, reading: _Reading, free: int, total: int, running: RunningRequests, coming: int
    ) -> tuple[int, int]:
        kept = held = 0
        for group, most in reading.filled:
            kept += (len(running) + coming) * most + group.in_flight
            tokens = running.prompt_tokens + running.output_tokens - running.prefill_tokens_left
            held += int(np.minimum(-(-tokens // group.block_size), most).sum())
        left, used = max(0, total - kept), max(0, total - free - held)
        return int(max(0, left - used) / reading.shares), int(left / reading.shares)


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
