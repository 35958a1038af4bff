"""Which cached blocks vLLM gives up first: those of sessions that come back are given up last, within a share.

vLLM (0.32, `FreeKVCacheBlockQueue`) gives up the block that was used least recently. An agent pauses while a tool runs,
and requests that never return push out what it had computed. Pauses are so spread that among sessions the one that
paused longest is the one least likely to return soon, so among them least recently used stays the rule; what vLLM
cannot know is who returns at all. Hence two queues, each by least recent use: requests first, then sessions. It is the
segmented LRU of Karedla et al. (Computer 27(3), 1994), but for what lets a block into the second segment: a session's
name instead of a hit, for a session's first pause is no shorter than its others.
"""

from array import array
from collections.abc import Iterable, Iterator

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from policies.engine.returns import EMPTY_BLOCKS, RETURN_S, Returns
from router.clock import Clock

_ONE_IN = 16  # blocks, whose times are learned from


class KeptBlocks(FreeKVCacheBlockQueue):
    """Stands in the place of vLLM's queue of free blocks. All of them are free: no request waits for a kept block.

    Attributes:
        keeps: blocks that are freed now belong to a session that comes back.
        most: blocks that are kept at once; what was kept longest goes behind the others then.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock], pool_blocks: int, clock: Clock) -> None:
        """Args:
        blocks: that are free, in the order in which they are given up.
        pool_blocks: of the whole pool.
        clock: tells for how long blocks lie unused.
        """
        self._kept = FreeKVCacheBlockQueue([])
        self._is_kept = bytearray(pool_blocks)
        self._others = 0
        self.returns, self._clock = Returns(), clock
        self._freed_s = array("d", bytes(8 * pool_blocks))
        super().__init__(list(blocks))
        self.keeps, self.most = False, 0

    @classmethod
    def put_into(cls, pool: BlockPool, clock: Clock) -> "KeptBlocks":
        """In the place of the pool's own queue, with what is free."""
        queue = cls(pool.free_block_queue.get_all_free_blocks(), pool.num_gpu_blocks, clock)
        pool.free_block_queue = queue
        return queue

    @property
    def num_free_blocks(self) -> int:
        return self._others + self._kept.num_free_blocks

    @num_free_blocks.setter
    def num_free_blocks(self, count: int) -> None:
        """vLLM's own methods count what they add to their queue and take out of it."""
        self._others = count - self._kept.num_free_blocks

    @property
    def kept(self) -> int:
        return self._kept.num_free_blocks

    @property
    def return_chance(self) -> float:
        """That what is given up next would be used again soon if it stayed; 0 as long as much is empty."""
        for empty, block in enumerate(self.iter_blocks_after(None)):
            if block.block_hash is not None:
                return self.returns.chance(self._clock.now() - self._freed_s[block.block_id], RETURN_S)
            if empty >= EMPTY_BLOCKS:
                break
        return 0.0

    def keep_at_most(self, blocks: int) -> None:
        self.most = blocks
        self._shrink()

    def _shrink(self) -> None:
        while self._kept.num_free_blocks > self.most:
            block = self._kept.popleft()
            self._is_kept[block.block_id] = False
            super().append(block)

    # What vLLM calls

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0] if self.num_free_blocks else super().popleft()

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        first = super().popleft_n(min(n, self._others))
        if (more := n - len(first)) > 0:
            last = self._kept.popleft_n(more)
            for block in last:
                self._is_kept[block.block_id] = False
            first += last
        for block in first:
            if block.block_hash is not None and block.block_id % _ONE_IN == 0:
                self.returns.given_up(self._clock.now() - self._freed_s[block.block_id])
        return first

    def remove(self, block: KVCacheBlock) -> None:
        if block.block_id % _ONE_IN == 0:
            self.returns.returned(self._clock.now() - self._freed_s[block.block_id])
        if self._is_kept[block.block_id]:
            self._is_kept[block.block_id] = False
            self._kept.remove(block)
        else:
            super().remove(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        now_s = self._clock.now()
        for block in blocks:
            self._freed_s[block.block_id] = now_s
        if not (self.keeps and self.most):
            super().append_n(blocks)
            return
        for block in blocks:
            self._is_kept[block.block_id] = True
        self._kept.append_n(blocks)
        self._shrink()

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [*super().get_all_free_blocks(), *self._kept.get_all_free_blocks()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        if cursor is None or not self._is_kept[cursor.block_id]:
            yield from super().iter_blocks_after(cursor)
            cursor = None
        yield from self._kept.iter_blocks_after(cursor)
