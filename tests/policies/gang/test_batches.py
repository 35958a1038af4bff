import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.gang.batches import (
    GangConfig,
    LaneView,
    formed_key,
    memory_safe_gang,
    next_batch,
    rows_that_fit,
    tick_s,
)
from policies.router.order import Band, banded

FULL_ONLY = GangConfig(batch_size=3, max_wait_s=math.inf)
PATIENT = GangConfig(batch_size=3, max_wait_s=10.0)


def lane(*keys: float, bin_index: int = 0, waited_s: float = 0.0, slo_class: str = "s") -> LaneView:
    return LaneView(slo_class=slo_class, bin_index=bin_index, keys=keys, waited_s=waited_s)


def test_a_batch_is_formed_when_its_last_request_comes() -> None:
    assert formed_key(lane(1.0, 2.0), FULL_ONLY) is None
    assert formed_key(lane(1.0, 2.0, 5.0), FULL_ONLY) == 5.0
    assert formed_key(lane(1.0, 2.0, 5.0, 6.0), FULL_ONLY) == 5.0


def test_or_when_a_request_has_waited_long_enough() -> None:
    assert formed_key(lane(1.0, waited_s=9.9), PATIENT) is None
    assert formed_key(lane(1.0, waited_s=10.0), PATIENT) == 11.0
    assert formed_key(lane(1.0, 2.0, 50.0), PATIENT) == 11.0  # its head was due before the last one came


def test_the_first_formed_goes_first_whichever_bin_began_first() -> None:
    early_start, early_end = lane(0.0, 1.0, 9.0, bin_index=0), lane(2.0, 3.0, 4.0, bin_index=1)
    assert next_batch([early_start, early_end], FULL_ONLY) is early_end


def test_a_request_that_is_due_is_not_overtaken_for_ever_by_full_batches() -> None:
    lonely = lane(1.0, bin_index=3, waited_s=60.0)
    assert next_batch([lane(20.0, 21.0, 22.0), lonely], PATIENT) is lonely
    assert next_batch([lane(20.0, 21.0, 22.0), lonely], FULL_ONLY) is not lonely


def test_ties_go_by_bin_and_class_and_nothing_formed_is_nothing() -> None:
    lanes = [lane(1.0, 1.0, 1.0, bin_index=2), lane(1.0, 1.0, 1.0, slo_class="t"), lane(1.0, 1.0, 1.0)]
    assert next_batch(lanes, FULL_ONLY) is lanes[2]
    assert next_batch([lane(1.0), lane()], FULL_ONLY) is None


SHORT_FIRST = GangConfig(batch_size=3, max_wait_s=10.0, patience_s=60.0)


def test_short_batches_go_before_a_long_one_that_was_formed_first_until_its_patience_ends() -> None:
    long, short = lane(1.0, 2.0, 3.0, bin_index=3, waited_s=59.0), lane(4.0, 5.0, 6.0, bin_index=1, waited_s=2.0)
    assert next_batch([long, short], PATIENT) is long
    assert next_batch([long, short], SHORT_FIRST) is short
    starved = replace(long, waited_s=60.0)
    assert next_batch([starved, short], SHORT_FIRST) is starved
    starved_short = replace(short, waited_s=61.0)
    assert next_batch([starved_short, starved], SHORT_FIRST) is starved  # of two, the first formed


def test_within_a_bin_the_first_formed_goes_first_also_where_short_bins_do() -> None:
    first, second = lane(1.0, 2.0, 3.0, bin_index=1, slo_class="t"), lane(4.0, 5.0, 6.0, bin_index=1)
    assert next_batch([second, first], SHORT_FIRST) is first


def test_a_short_batch_goes_before_no_request_of_an_earlier_band() -> None:
    """Offline work, which fills idle capacity, stays behind all others."""
    key = banded(Band.FILLS_IDLE, 1.0)
    offline = lane(key, key, key, bin_index=0, waited_s=61.0)
    in_time = lane(*[banded(Band.IN_TIME, 5.0)] * 3, bin_index=3)
    assert next_batch([offline, in_time], SHORT_FIRST) is in_time


def test_without_a_wait_whatever_is_there_goes() -> None:
    assert formed_key(lane(4.0), GangConfig(batch_size=3, max_wait_s=0.0)) == 4.0


def test_an_idle_replica_asks_often_enough() -> None:
    assert [tick_s(wait_s, 1.0) for wait_s in (0.0, 0.001, 0.4, 60.0, math.inf)] == [1.0, 0.01, 0.1, 1.0, 1.0]


@pytest.mark.parametrize(
    "fields", [{"batch_size": 0}, {"max_wait_s": -1.0}, {"max_wait_s": math.nan}, {"patience_s": -1.0}]
)
def test_what_makes_no_sense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        GangConfig(**fields)  # type: ignore[arg-type]


def test_a_bin_may_have_smaller_batches_than_the_others() -> None:
    config = GangConfig(batch_size=3, max_wait_s=math.inf, bin_sizes=(9, 2))
    assert [config.size_of(bin_index) for bin_index in range(3)] == [3, 2, 3]
    assert formed_key(lane(1.0, 2.0, bin_index=1), config) == 2.0
    assert formed_key(lane(1.0, 2.0, bin_index=2), config) is None


def test_a_bin_s_batch_is_as_large_as_memory_is_safe_for() -> None:
    assert memory_safe_gang([100] * 50, 800, 8) == 8
    assert memory_safe_gang([100] * 50, 799, 8) == 7
    assert memory_safe_gang([100] * 50, 99, 8) == 1
    assert memory_safe_gang(range(1, 101), 150, 8, overflow_probability=0.5) == 2  # the greater of two: 71 or less
    assert memory_safe_gang(range(1, 101), 141, 8, overflow_probability=0.5) == 1


@given(rows=st.lists(st.integers(1, 100), min_size=1, max_size=50), capacity=st.integers(1, 2000))
def test_it_is_never_more_than_the_longest_seen_allow_and_never_less_than_all_of_them_do(
    rows: list[int], capacity: int
) -> None:
    size = memory_safe_gang(rows, capacity, 8)
    assert size >= min(8, max(1, capacity // max(rows)))
    assert size == 1 or size * sorted(rows)[len(rows) // 2] <= capacity
    assert memory_safe_gang(rows, capacity + 100, 8) >= size


def test_as_many_rows_as_fit_each_as_long_as_the_longest() -> None:
    prompts, answers = [10, 10, 50, 10], [10, 90, 10, 10]
    assert rows_that_fit(prompts, answers, math.inf, 20) == 1
    assert rows_that_fit(prompts, answers, math.inf, 200) == 2
    assert rows_that_fit(prompts, answers, math.inf, 419) == 2  # three would need 3 * (50 + 90)
    assert rows_that_fit(prompts, answers, math.inf, 420) == 3
    assert rows_that_fit(prompts, answers, 10.0, 240) == 4  # its bin seldom says more than 10
    assert rows_that_fit([100], [100], math.inf, 1) == 1
