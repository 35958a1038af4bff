"""Sort keys: who goes before whom, and for how long."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.router.order import (
    BAND_S,
    FCFS,
    LJF,
    SJF,
    Band,
    IdleOrder,
    Order,
    banded,
    deadline_keys,
    is_late,
    is_owed_a_start,
)

# Exact in binary.
QUARTERS = st.integers(0, 200).map(lambda quarters: quarters / 4)


def test_each_order_ranks_by_its_own_quantity() -> None:
    first, second = (0.0, None, 5.0, 10), (1.0, None, 2.0, 20)
    assert FCFS().key(*first) < FCFS().key(*second)
    assert SJF().key(*first) < SJF().key(*second)
    assert LJF().key(*first) > LJF().key(*second)


def test_the_deadline_is_arrival_plus_target_and_what_has_none_goes_behind_all_that_have_one() -> None:
    assert deadline_keys(100.0, 0.5).key == banded(Band.IN_TIME, 100.5)
    now_s = 1.8e9
    first, second = deadline_keys(now_s, None).key, deadline_keys(now_s + 0.001, None).key
    assert deadline_keys(now_s + 1e6, 1e6).key < first < second


def test_in_time_goes_before_no_target_before_late_before_what_fills_idle_capacity_whatever_the_times() -> None:
    now_s = 1.8e9
    in_time, late = deadline_keys(now_s, 1e6, late_patience_s=1e6)
    none = deadline_keys(now_s - 1e5, None, late_patience_s=1.0)
    idle = deadline_keys(now_s - 1e5, 1.0, fills_idle="deadline", late_patience_s=1.0)
    resumed = banded(Band.RESUMED, now_s)
    assert resumed < in_time < none.key < late < idle.key
    assert none.key == none.late_key and idle.key == idle.late_key, "they cannot be late"
    assert deadline_keys(now_s - 0.001, 99.0).late_key < deadline_keys(now_s, 1.0).late_key, "the oldest goes first"


@given(st.tuples(QUARTERS, QUARTERS), st.tuples(QUARTERS, QUARTERS))
def test_who_is_in_time_is_overtaken_only_within_the_difference_of_targets(
    first: tuple[float, float], second: tuple[float, float]
) -> None:
    (arrival_s, target_s), (other_s, other_target_s) = first, second
    goes_first = deadline_keys(other_s, other_target_s).key < deadline_keys(arrival_s, target_s).key
    assert goes_first == (other_s - arrival_s < target_s - other_target_s)


IDLE_ORDERS: tuple[IdleOrder, ...] = get_args(IdleOrder)


@pytest.mark.parametrize("order", IDLE_ORDERS)
@given(arrival_s=st.floats(0.0, 2e9), ttft_s=st.one_of(st.none(), st.floats(1.0, 1e5)), tokens=st.integers(1, 1 << 22))
def test_idle_capacity_is_owed_after_patience_and_no_later_than_a_window_more_whatever_the_order(
    order: IdleOrder, arrival_s: float, ttft_s: float | None, tokens: int
) -> None:
    key, late_key = deadline_keys(arrival_s, ttft_s, fills_idle=order, prompt_tokens=tokens, late_patience_s=60.0)
    assert key == late_key
    assert key // BAND_S == Band.FILLS_IDLE
    window_s = ttft_s or 60.0
    assert arrival_s + 60.0 - 1e-4 <= key % BAND_S <= arrival_s + 60.0 + 2 * window_s + 1e-4


WINDOWED = st.tuples(st.integers(0, 2000), st.integers(1, 1 << 20))


@given(first=WINDOWED, second=WINDOWED, longest_first=st.booleans())
def test_by_length_the_shorter_or_longer_goes_first_within_a_window_and_the_earlier_window_before_the_later(
    first: tuple[int, int], second: tuple[int, int], longest_first: bool
) -> None:
    """Windows of 600 s of Unix time."""
    order: IdleOrder = "longest_first" if longest_first else "shortest_first"
    keys = [
        deadline_keys(1.8e9 + a, 600.0, fills_idle=order, prompt_tokens=tokens).key for a, tokens in (first, second)
    ]
    ranks = [(a // 600, -tokens if longest_first else tokens) for a, tokens in (first, second)]
    assert (keys[0] < keys[1]) == (ranks[0] < ranks[1])


def test_a_request_is_late_when_reading_its_prompt_would_pass_its_deadline() -> None:
    assert not is_late(deadline_s=10.0, reading_s=2.0, now_s=8.0)
    assert is_late(deadline_s=10.0, reading_s=2.0, now_s=8.1)


def test_one_start_in_ten_is_owed_to_who_has_no_patience_left() -> None:
    late_key = deadline_keys(100.0, 1.0, late_patience_s=60.0).late_key
    assert [starts for starts in range(30) if is_owed_a_start(starts, late_key, 161.0)] == [9, 19, 29]
    assert not is_owed_a_start(9, late_key, 159.0)


@given(st.floats(0.0, 4e9), st.sampled_from(["chat", None]), st.floats(0.0), st.integers(0, 10**6))
def test_keys_are_finite_doubles(arrival_s: float, slo_class: str | None, work_s: float, prompt_tokens: int) -> None:
    """Redis refuses NaN as a score."""
    orders: list[Order] = [FCFS(), SJF(), LJF()]
    for order in orders:
        key = order.key(arrival_s, slo_class, work_s, prompt_tokens)
        assert isinstance(key, float)
        assert math.isfinite(key)


@pytest.mark.parametrize("arrival_s", [math.nan, math.inf])
def test_a_key_is_not_made_of_what_is_no_time(arrival_s: float) -> None:
    with pytest.raises(InputError):
        deadline_keys(arrival_s, 1.0)
