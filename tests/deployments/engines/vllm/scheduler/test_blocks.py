"""How much of a pool that layers of several kinds share is there for tokens."""

import numpy as np
import pytest

from deployments.engines.vllm.scheduler.blocks import Group, PoolShare
from policies.types import RequestView, RunningRequests

pytestmark = pytest.mark.slow

FULL = Group(16)
WINDOW = Group(16, most=9, in_flight=32, windowed=True)
STATE = Group(16_384, most=1)


def running(*tokens: int) -> RunningRequests:
    return RunningRequests.of(prompt_tokens=tokens, output_tokens=np.zeros(len(tokens)))


def coming(count: int, tokens: int = 1) -> list[RequestView]:
    return [RequestView(request_id=f"w{n}", arrival_s=0.0, prompt_tokens=tokens) for n in range(count)]


def test_groups_that_grow_share_the_pool_evenly() -> None:
    assert PoolShare((FULL,)).count(700, 1000, running(100), coming(3)) == (700, 1000)
    assert PoolShare((FULL, FULL)).count(700, 1000, running(100), coming(3)) == (350, 500)
    small = PoolShare((FULL, Group(8)))
    assert (small.block_size, small.count(600, 900, running(), coming(0))) == (16, (200, 300))


def test_long_requests_leave_what_their_windows_do_not_take() -> None:
    share = PoolShare((FULL, WINDOW))
    # Two requests hold 100 blocks each, and 9 of the window; a third may come.
    assert share.count(1000 - 218, 1000, running(1600, 1600), coming(1)) == (941 - 200, 1000 - 3 * 9 - 32)


def test_short_requests_count_alike_in_every_group() -> None:
    share = PoolShare((FULL, WINDOW))
    assert share.count(1000 - 200, 1000, running(*[16] * 100), coming(50)) == (400, 500)


def test_a_state_is_the_same_for_every_request_however_long() -> None:
    share = PoolShare((FULL, STATE, STATE))
    assert share.block_size == 16, "and not the least that all blocks divide"
    assert share.count(1000 - 110 - 20, 1000, running(1600, 32, *[1] * 8), coming(5)) == (970 - 110, 1000 - 15 * 2)


def test_a_pool_whose_requests_have_windows_or_states_alone_is_counted_whole() -> None:
    assert PoolShare((STATE,)).count(90, 100, running(5), coming(10)) == (90, 100)
    assert PoolShare((WINDOW,)).count(90, 100, running(5), coming(10)) == (90, 100)


def test_windows_and_states_are_kept_for_as_many_as_there_is_room_for_and_not_for_a_whole_queue() -> None:
    share = PoolShare((FULL, WINDOW, STATE))
    # Ten that hold 20 blocks of tokens, 9 of the window and a state each: 200 free ones are room for six and one more.
    batch, queue = running(*[319] * 10), coming(200, tokens=319)
    assert share.count(200, 500, batch, queue) == share.count(200, 500, batch, queue[:7])
    assert share.count(200, 500, batch, queue) == (298 - 200, 500 - 17 * 10 - 32)
    short = share.count(200, 500, batch, coming(200, tokens=16))
    assert short == share.count(200, 500, batch, coming(200 // 5 + 1, tokens=16)), "room for more of the short"
    assert share.count(200, 500, batch, queue[:2])[1] == 500 - 12 * 10 - 32


def test_states_bound_the_slots_and_leave_tokens_a_share_of_the_pool() -> None:
    share = PoolShare((FULL, STATE, STATE, STATE))
    assert share.slots(256, 500, running(), 0) == 125, "three states and a block of tokens each"
    assert share.slots(100, 500, running(), 0) == 100
    assert share.count(500, 500, running(), coming(125))[1] == 500 - 3 * 125
    # Ten that hold four blocks of tokens each: only so many like them may follow.
    assert share.slots(256, 430, running(*[60] * 10), 0) == 10 + 430 // 7
    assert share.slots(256, 430, running(*[60] * 10), 2) == 12 + 430 // 7


def test_one_more_may_start_as_long_as_its_states_fit() -> None:
    share = PoolShare((FULL, WINDOW, STATE))
    assert share.slots(256, 3, running(3200), 0) == 2, "a short one fits beside a long one"
    assert share.slots(256, 2, running(3200), 0) == 1
    assert share.slots(256, 0, running(), 0) == 1, "and never none"


def test_states_alone_bound_the_slots_too() -> None:
    assert PoolShare((STATE, STATE)).slots(256, 100, running(*[500] * 5), 0) == 55


def test_without_states_the_slots_are_as_given() -> None:
    assert PoolShare((FULL, WINDOW)).slots(256, 0, running(16, 16), 0) == 256
