"""Sort keys, and the proof that the virtual deadline lets nobody be overtaken for long."""

import heapq
import math
import pickle
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.router.order import (
    BAND_S,
    FCFS,
    LJF,
    SJF,
    Band,
    Deadline,
    DeadlineConfig,
    EstimatedWork,
    IdleOrder,
    Order,
    VirtualDeadline,
    VirtualDeadlineConfig,
    banded,
    deadline_keys,
    is_late,
    is_owed_a_start,
)
from policies.types import FloatArray

CONFIG = VirtualDeadlineConfig(
    class_targets_s={"chat": 0.5, "batch": 8.0}, default_target_s=2.0, work_weight=2.0, max_work_s=16.0
)
# Quarters are exact in binary, so a key's comparison and the bound's are the same arithmetic.
QUARTERS = st.integers(0, 200).map(lambda quarters: quarters / 4)
ARRIVALS = st.lists(st.tuples(QUARTERS, st.sampled_from(["chat", "batch", None]), QUARTERS), min_size=2, max_size=40)


def start_order(order: Order, requests: list[tuple[float, str | None, float]], service_s: float) -> list[int]:
    """The order in which one server that pops the lowest key starts the requests, each taking ``service_s``."""
    pending = sorted(range(len(requests)), key=lambda index: requests[index][0])
    waiting: list[tuple[float, int]] = []
    started, now_s = [], 0.0
    while pending or waiting:
        if not waiting:
            now_s = max(now_s, requests[pending[0]][0])
        while pending and requests[pending[0]][0] <= now_s:
            index = pending.pop(0)
            arrival_s, slo_class, work_s = requests[index]
            heapq.heappush(waiting, (order.key(arrival_s, slo_class, work_s, 1), index))
        started.append(heapq.heappop(waiting)[1])
        now_s += service_s
    return started


def waits(order: Order, arrivals_s: FloatArray, slot_s: FloatArray, work_s: FloatArray, slots: int) -> FloatArray:
    free_s, waiting, following, now_s = [0.0] * slots, list[tuple[float, int]](), 0, 0.0
    waited = np.zeros(len(arrivals_s))
    for _ in range(len(arrivals_s)):
        now_s = max(now_s, heapq.heappop(free_s))
        if not waiting:
            now_s = max(now_s, float(arrivals_s[following]))
        while following < len(arrivals_s) and arrivals_s[following] <= now_s:
            key = order.key(float(arrivals_s[following]), None, float(work_s[following]), 1)
            heapq.heappush(waiting, (key, following))
            following += 1
        index = heapq.heappop(waiting)[1]
        waited[index] = now_s - arrivals_s[index]
        heapq.heappush(free_s, now_s + float(slot_s[index]))
    return waited


def test_each_order_ranks_by_its_own_quantity() -> None:
    first, second = (0.0, None, 5.0, 10), (1.0, None, 2.0, 20)
    assert FCFS().key(*first) < FCFS().key(*second)
    assert SJF().key(*first) < SJF().key(*second)
    assert LJF().key(*first) > LJF().key(*second)
    assert EstimatedWork().key(*first) > EstimatedWork().key(*second)


def test_the_deadline_is_arrival_plus_target_and_what_has_none_goes_behind_all_that_have_one() -> None:
    policy = Deadline(DeadlineConfig(class_targets_s={"chat": 0.5, "any time": None}, default_target_s=2.0))
    assert policy.key(100.0, "chat", 3.0, 1) == deadline_keys(100.0, 0.5).key == banded(Band.IN_TIME, 100.5)
    assert policy.key(100.0, None, 3.0, 1) == policy.key(100.0, "unheard of", 9.0, 7) == banded(Band.IN_TIME, 102.0)
    now_s = 1.8e9
    first, second = policy.key(now_s, "any time", 0.0, 1), policy.key(now_s + 0.001, "any time", 0.0, 1)
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


@pytest.mark.parametrize("wrong", [{"class_targets_s": {"chat": -1.0}}, {"default_target_s": math.inf}])
def test_a_target_that_is_no_time_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        DeadlineConfig(**wrong)  # type: ignore[arg-type]


def test_the_virtual_deadline_is_arrival_plus_target_plus_weighted_work() -> None:
    policy = VirtualDeadline(CONFIG)
    assert policy.key(100.0, "chat", 3.0, 1) == 100.0 + 0.5 + 2.0 * 3.0
    assert policy.key(100.0, None, 3.0, 1) == 100.0 + 2.0 + 2.0 * 3.0
    assert policy.key(100.0, "unheard of", 3.0, 1) == policy.key(100.0, None, 3.0, 1)


def test_work_counts_up_to_its_cap() -> None:
    policy = VirtualDeadline(CONFIG)
    assert policy.key(0.0, "chat", math.inf, 1) == policy.key(0.0, "chat", 16.0, 1) == 0.5 + 2.0 * 16.0


@given(ARRIVALS, st.sampled_from([0.25, 1.0, 4.0]))
def test_nobody_is_overtaken_by_arrivals_after_the_window(
    requests: list[tuple[float, str | None, float]], service_s: float
) -> None:
    policy = VirtualDeadline(CONFIG)
    started = start_order(policy, requests, service_s)
    assert sorted(started) == list(range(len(requests)))
    for place, index in enumerate(started):
        arrival_s, slo_class, work_s = requests[index]
        window_s = policy.overtaking_window_s(slo_class, work_s)
        assert window_s <= policy.overtaking_bound_s
        assert all(requests[earlier][0] <= arrival_s + window_s for earlier in started[:place])


@given(ARRIVALS, st.sampled_from([0.25, 1.0, 4.0]))
def test_the_wait_is_bounded_by_the_work_that_arrives_within_the_window(
    requests: list[tuple[float, str | None, float]], service_s: float
) -> None:
    policy = VirtualDeadline(CONFIG)
    now_s, starts_s = 0.0, dict[int, float]()
    for index in start_order(policy, requests, service_s):
        starts_s[index] = now_s = max(now_s, requests[index][0])
        now_s += service_s
    for index, (arrival_s, slo_class, work_s) in enumerate(requests):
        window_s = policy.overtaking_window_s(slo_class, work_s)
        ahead = [
            min(service_s, starts_s[other] + service_s - arrival_s)
            for other in range(len(requests))
            if other != index and starts_s[other] + service_s > arrival_s and requests[other][0] <= arrival_s + window_s
        ]
        assert starts_s[index] <= arrival_s + sum(ahead)


def test_the_window_is_tight() -> None:
    policy = VirtualDeadline(CONFIG)
    window_s = policy.overtaking_window_s("batch", 16.0)
    assert window_s == policy.overtaking_bound_s == 8.0 - 0.5 + 2.0 * 16.0
    late = policy.key(0.0, "batch", 16.0, 1)
    assert policy.key(window_s - 0.25, "chat", 0.0, 1) < late < policy.key(window_s + 0.25, "chat", 0.0, 1)


def test_shortest_first_lets_short_requests_overtake_for_ever() -> None:
    requests: list[tuple[float, str | None, float]] = [(0.0, None, 1.0), (0.0, None, 5.0)]
    requests += [(float(second), None, 1.0) for second in range(1, 200)]
    assert start_order(EstimatedWork(), requests, 1.0)[-1] == 1
    assert start_order(VirtualDeadline(VirtualDeadlineConfig()), requests, 1.0).index(1) < 20


def test_a_weight_of_4_lowers_the_mean_wait_and_not_at_the_cost_of_the_slowest() -> None:
    """64 slots at 90 % load in bursts (gap CV 3), lognormal lengths, estimates off by a factor of e^0.5 (1 sd)."""
    rng = np.random.default_rng(0)
    slot_s = 8.0 * np.exp(rng.normal(-0.5, 1.0, 20_000))
    arrivals_s = np.cumsum(rng.gamma(1 / 9, 9.0, 20_000)) * 8.0 / 64 / 0.9
    work_s = slot_s * np.exp(rng.normal(0.0, 0.5, 20_000)) / 32
    first_come = waits(FCFS(), arrivals_s, slot_s, work_s, 64)
    deadline = waits(VirtualDeadline(VirtualDeadlineConfig(work_weight=4.0)), arrivals_s, slot_s, work_s, 64)
    shortest = waits(EstimatedWork(), arrivals_s, slot_s, work_s, 64)
    assert deadline.mean() < 0.85 * first_come.mean()
    assert np.quantile(deadline, 0.99) <= np.quantile(first_come, 0.99) < np.quantile(shortest, 0.99)


@given(st.floats(0.0, 4e9), st.sampled_from(["chat", None]), st.floats(0.0), st.integers(0, 10**6))
def test_keys_are_finite_doubles(arrival_s: float, slo_class: str | None, work_s: float, prompt_tokens: int) -> None:
    """Redis refuses NaN as a score."""
    orders: list[Order] = [FCFS(), SJF(), LJF(), Deadline(DeadlineConfig()), VirtualDeadline(CONFIG)]
    for order in orders:
        key = order.key(arrival_s, slo_class, work_s, prompt_tokens)
        assert isinstance(key, float)
        assert math.isfinite(key)


@pytest.mark.parametrize(("arrival_s", "work_s"), [(math.nan, 1.0), (math.inf, 1.0), (0.0, -1.0), (0.0, math.nan)])
def test_a_key_is_not_made_of_what_is_no_time(arrival_s: float, work_s: float) -> None:
    with pytest.raises(InputError):
        VirtualDeadline(CONFIG).key(arrival_s, "chat", work_s, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"work_weight": -1.0},
        {"max_work_s": math.inf},
        {"default_target_s": math.nan},
        {"class_targets_s": {"chat": -0.5}},
    ],
)
def test_settings_that_would_break_the_bound_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        VirtualDeadlineConfig(**settings)  # type: ignore[arg-type]


def test_a_policy_pickles_with_its_classes() -> None:
    policy = pickle.loads(pickle.dumps(VirtualDeadline(CONFIG)))
    assert policy.key(1.0, "batch", 2.0, 1) == VirtualDeadline(CONFIG).key(1.0, "batch", 2.0, 1)
