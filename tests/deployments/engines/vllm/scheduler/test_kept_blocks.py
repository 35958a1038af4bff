"""The order in which vLLM's real block pool gives up what it has cached."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from deployments.engines.vllm.request_metadata import RequestMetadata
from deployments.engines.vllm.scheduler import kept_blocks
from deployments.engines.vllm.scheduler.kept_blocks import KeptBlocks
from tests.fakes import ManualClock
from tests.virtual_engine import VirtualEngine

BLOCKS = 32


class Pool:
    """vLLM's pool with our queue in it."""

    def __init__(self, most: int) -> None:
        self.pool = BlockPool(BLOCKS, True, 16)
        self.clock = ManualClock()
        self.queue = KeptBlocks.put_into(self.pool, self.clock)
        self.queue.keep_at_most(most)
        self._hashes = 0

    def taken(self, count: int) -> list[KVCacheBlock]:
        """Blocks of a request, with something in them."""
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            self._hashes += 1
            self.pool._insert_block_hash(
                make_block_hash_with_group_id(self._hashes.to_bytes(32), 0), block, num_tokens=16
            )
        return blocks

    def free(self, blocks: Sequence[KVCacheBlock], *, keeps: bool = False) -> None:
        self.queue.keeps = keeps
        self.pool.free_blocks(reversed(blocks))
        self.queue.keeps = False

    def order(self) -> list[int]:
        """Ids of those with something in them, as they will be given up."""
        free = self.queue.get_all_free_blocks()
        assert free == list(self.queue.iter_blocks_after(None))
        assert len(free) == self.pool.get_num_free_blocks()
        return [block.block_id for block in free if block.block_hash is not None]


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_what_a_session_had_is_given_up_after_what_came_later() -> None:
    pool = Pool(most=16)
    session, once = pool.taken(3), pool.taken(3)
    pool.free(session, keeps=True)
    pool.free(once)
    assert pool.order() == [*ids(once)[::-1], *ids(session)[::-1]]
    assert pool.queue.kept == 3


def test_all_of_it_is_free_all_the_same() -> None:
    pool = Pool(most=16)
    pool.free(pool.taken(12), keeps=True)
    pool.free(pool.taken(12))
    assert len(pool.taken(BLOCKS - 1)) == BLOCKS - 1
    assert pool.pool.get_num_free_blocks() == pool.queue.kept == 0
    with pytest.raises(ValueError, match="No free blocks"):
        pool.queue.popleft()


def test_beyond_the_bound_the_longest_paused_goes_behind_the_others() -> None:
    pool = Pool(most=4)
    first, second, once = pool.taken(3), pool.taken(3), pool.taken(2)
    pool.free(once)
    pool.free(first, keeps=True)
    pool.free(second, keeps=True)
    tail, rest = ids(first)[:0:-1], ids(first)[:1]
    assert pool.order() == [*ids(once)[::-1], *tail, *rest, *ids(second)[::-1]]
    pool.queue.keep_at_most(0)
    assert pool.queue.kept == 0 and pool.order()[-3:] == ids(second)[::-1]


def test_a_block_that_is_used_again_leaves_either_part() -> None:
    pool = Pool(most=16)
    session, once = pool.taken(3), pool.taken(3)
    pool.free(session, keeps=True)
    pool.free(once)
    pool.pool.touch([session[0], once[0]])
    assert pool.queue.kept == 2
    pool.free([session[0]], keeps=True)
    pool.free([once[0]])
    assert pool.order() == [*ids(once)[::-1], session[2].block_id, session[1].block_id, session[0].block_id]


def test_a_walk_goes_on_behind_any_block() -> None:
    pool = Pool(most=16)
    pool.free(pool.taken(3), keeps=True)
    pool.free(pool.taken(3))
    free = pool.queue.get_all_free_blocks()
    for index, block in enumerate(free):
        assert list(pool.queue.iter_blocks_after(block)) == free[index + 1 :]


def test_what_is_given_up_next_is_worth_what_blocks_of_its_age_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_blocks, "_ONE_IN", 1)
    pool = Pool(most=0)
    assert pool.queue.return_chance == 0.0
    for turn in range(20):
        blocks = pool.taken(BLOCKS - 1)
        pool.free(blocks)
        pool.clock.advance_to(100.0 * turn + 20.0)
        pool.pool.touch(blocks[: BLOCKS // 2])
        pool.free(blocks[: BLOCKS // 2])
        fresh = pool.queue.return_chance
        pool.clock.advance_to(100.0 * (turn + 1))
    assert 0.0 < pool.queue.return_chance < fresh


def test_without_sessions_the_order_is_vllms() -> None:
    rng, plain = random.Random(3), BlockPool(BLOCKS, True, 16)
    ours = Pool(most=16)
    held: list[tuple[list[KVCacheBlock], list[KVCacheBlock]]] = []
    for step in range(2000):
        if held and (rng.random() < 0.5 or plain.get_num_free_blocks() < 5):
            mine, theirs = held.pop(rng.randrange(len(held)))
            ours.free(mine)
            plain.free_blocks(reversed(theirs))
        else:
            count = rng.randint(1, 4)
            theirs = plain.get_new_blocks(count)
            for number, block in enumerate(theirs):
                key = make_block_hash_with_group_id((step * 8 + number).to_bytes(32), 0)
                plain._insert_block_hash(key, block, num_tokens=16)
            held.append((ours.taken(count), theirs))
        assert ids(ours.queue.get_all_free_blocks()) == ids(plain.free_block_queue.get_all_free_blocks())


TOLD = {
    "told to come back": ({"extra_args": RequestMetadata(comes_back=True).as_extra_args()}, True),
    "told not to": ({"extra_args": RequestMetadata(comes_back=False).as_extra_args(), "session_id": "s"}, False),
    "of a session of vLLM's": ({"session_id": "s"}, True),
    "of none": ({}, False),
}


@pytest.mark.parametrize("settings", [{"mode": "mixed"}, {"mode": "mixed", "kept_fraction": 0.0}, {"mode": "stock"}])
@pytest.mark.parametrize("name", list(TOLD))
def test_a_session_finds_its_prompt_after_requests_that_never_return(name: str, settings: dict[str, Any]) -> None:
    told, comes_back = TOLD[name]
    engine = VirtualEngine(settings, blocks=100, enable_prefix_caching=True)
    prompt = list(range(1000, 1480))
    engine.add("first turn", 480, 4, prompt_token_ids=prompt, **told)
    engine.run()
    for number in range(10):
        engine.add(f"once {number}", 320, 4, prompt_token_ids=list(range(number * 320, number * 320 + 320)))
        engine.run()
    before = len(engine.log)
    engine.add("second turn", 500, 4, prompt_token_ids=[*prompt, *range(20)], **told)
    engine.run()
    keeps = comes_back and settings == {"mode": "mixed"}
    assert sum(step.prefill_tokens for step in engine.log[before:]) == (20 if keeps else 500)
    assert engine.all_free


def test_a_session_has_no_more_than_its_share_and_stock_gives_it_back() -> None:
    engine = VirtualEngine({"mode": "mixed", "kept_fraction": 0.25}, blocks=100, enable_prefix_caching=True)
    for number in range(4):
        prompt = list(range(number * 320, number * 320 + 320))
        engine.add(f"s{number}", 320, 4, prompt_token_ids=prompt, **TOLD["told to come back"][0])
        engine.run()
    assert engine.scheduler.status()["kept_blocks"] == 25
    engine.scheduler.control({"mode": "stock"})
    assert engine.scheduler.kept.kept == 0 and engine.all_free
