"""Microseconds a cached block that the plug-in's order of free blocks costs, beside vLLM's own queue.

Not collected by default; run with `pytest bench/deployments/test_speed_of_free_blocks.py -s`. vLLM's real pool is full
of cached blocks. A request finds some of them, takes others, which are given up for it, and frees both; each side does
the same in turn, and the medians of the thread's own time are compared.
"""

import statistics
import time
from collections.abc import Callable

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from deployments.engines.vllm.scheduler.kept_blocks import KeptBlocks
from router.clock import MonotonicClock

BLOCKS, FOUND, TAKEN, ROUNDS = 8192, 256, 256, 400


class Side:
    """A pool, and what requests did to it: seconds of each call."""

    def __init__(self, kept_fraction: float | None) -> None:
        """None leaves vLLM's own queue."""
        self.pool, self.numbers = BlockPool(BLOCKS, True, 16), 0
        self.queue: KeptBlocks | None = None
        if kept_fraction is not None:
            self.queue = KeptBlocks.put_into(self.pool, MonotonicClock())
            self.queue.keep_at_most(int(kept_fraction * BLOCKS))
        self.took_s: dict[str, list[float]] = {"take": [], "find": [], "free": []}
        self.before = self._taken(BLOCKS - 1)
        self.pool.free_blocks(reversed(self.before))

    def _taken(self, count: int) -> list[KVCacheBlock]:
        blocks = self._timed("take", lambda: self.pool.get_new_blocks(count))
        for block in blocks:
            self.numbers += 1
            key = make_block_hash_with_group_id(self.numbers.to_bytes(32), 0)
            self.pool._insert_block_hash(key, block, num_tokens=16)
        return blocks

    def _timed(self, name: str, call: Callable[[], list[KVCacheBlock]]) -> list[KVCacheBlock]:
        began_s = time.thread_time()
        blocks = call()
        self.took_s[name].append(time.thread_time() - began_s)
        return blocks

    def request(self, *, comes_back: bool) -> None:
        """One that finds what the one before it took."""
        found = self.before[-FOUND:]
        self._timed("find", lambda: self.pool.touch(found) or found)
        self.before = self._taken(TAKEN)
        if self.queue is not None:
            self.queue.keeps = comes_back
        ended = [*found, *self.before]
        self._timed("free", lambda: self.pool.free_blocks(reversed(ended)) or ended)
        if self.queue is not None:
            self.queue.keeps = False

    def us_a_block(self, name: str) -> float:
        count = {"take": TAKEN, "find": FOUND, "free": FOUND + TAKEN}[name]
        return 1e6 * statistics.median(self.took_s[name][-ROUNDS:]) / count


@pytest.mark.parametrize("named", [False, True], ids=["without sessions", "every other request of a session"])
def test_what_the_order_of_free_blocks_costs(named: bool) -> None:
    plain, ours = Side(None), Side(0.75)
    for number in range(ROUNDS):
        for side in (plain, ours) if number % 2 else (ours, plain):
            side.request(comes_back=named and number % 4 < 2)
    for name in plain.took_s:
        vllm_us, ours_us = plain.us_a_block(name), ours.us_a_block(name)
        print(f"\n{name}: vLLM {vllm_us:.3f} us a block, with the plug-in's order {ours_us:.3f} us", end="")
    statuses = []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        assert ours.queue is not None and ours.queue.return_chance >= 0.0
        statuses.append(time.thread_time() - began_s)
    print(f"\nchance of return of what goes next: {1e6 * statistics.median(statuses):.1f} us a status")
