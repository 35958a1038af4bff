from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.router.admission import (
    Limits,
    Queue,
    Quota,
    Refusal,
    Settlement,
    Spent,
    no_room,
    predicted_wait_s,
    settle,
    spend,
)


def quota(cost: float = 1.0, per_s: float = 1.0, burst: float = 5.0) -> Quota:
    return Quota(name="k", cost=cost, per_s=per_s, burst=burst)


def test_a_rested_allowance_gives_its_burst_and_then_one_at_a_time() -> None:
    spent, taken_at = Spent(), []
    for tenth in range(1000, 1100):
        after, late_s = spend(quota(), spent.rested(tenth / 10))
        if late_s <= 0:
            spent = after
            taken_at.append(tenth / 10)
    assert taken_at[:5] == [100.0, 100.1, 100.2, 100.3, 100.4]
    assert taken_at[5:] == [101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 108.0, 109.0]


def test_what_comes_too_early_is_told_how_much() -> None:
    spent, late_s = spend(quota(cost=5.0), Spent().rested(100.0))
    assert (spent, late_s) == (Spent(5.0, 100.0), 0.0)
    assert spend(quota(cost=2.0), spent.rested(100.0))[1] == 2.0
    assert spend(quota(cost=2.0), spent.rested(102.0))[1] == 0.0


def test_a_clock_that_was_set_back_neither_gives_nor_locks_out() -> None:
    spent = Spent(owed_s=5.0, at_s=3700.0).rested(100.0)
    assert spent == Spent(5.0, 100.0)
    assert spent.rested(102.0) == Spent(3.0, 102.0)


@given(
    costs=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=50),
    pauses=st.lists(st.floats(0.0, 3.0), min_size=50, max_size=50),
)
def test_never_more_than_burst_and_rate_allow(costs: list[float], pauses: list[float]) -> None:
    now_s, allowance, taken = 0.0, Spent(), 0.0
    for cost, pause_s in zip(costs, pauses, strict=False):
        now_s += pause_s
        after, late_s = spend(quota(cost=cost), allowance.rested(now_s))
        if late_s <= 0:
            allowance, taken = after, taken + cost
        assert taken <= 5.0 + now_s + 1.1e-3  # its own rounding


@given(
    answers=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 400.0)), min_size=1, max_size=50),
    pause_s=st.floats(0.0, 3.0),
)
def test_whatever_was_predicted_no_request_is_taken_before_all_before_it_are_paid(
    answers: list[tuple[float, float]], pause_s: float
) -> None:
    now_s, allowance, taken = 0.0, Spent(), 0.0
    for predicted, true in answers:
        now_s += pause_s
        allowance, late_s = spend(quota(cost=predicted), before := allowance.rested(now_s))
        if late_s > 0:
            allowance = before
            continue
        assert taken + predicted <= 5.0 + now_s + 1.1e-3
        allowance = settle(Settlement(name="k", cost=true - predicted, per_s=1.0), allowance)
        taken += true


def test_what_was_predicted_and_not_taken_comes_back_and_nobody_is_owed_anything() -> None:
    assert settle(Settlement(name="k", cost=-30.0, per_s=10.0), Spent(5.0, 9.0)) == Spent(2.0, 9.0)
    assert settle(Settlement(name="k", cost=-99.0, per_s=10.0), Spent(5.0, 9.0)) == Spent(0.0, 9.0)


def queue(**found: float) -> Queue:
    return Queue(**{"waiting": 6, "wait_s": 6.0, "of_key": 2, "of_key_s": 2.0, **found})  # type: ignore[arg-type]


LIMITS = Limits(max_waiting=8, max_wait_s=8.0, max_of_key=4)


@pytest.mark.parametrize(
    ("found", "refusal"),
    [
        (queue(), None),
        (queue(of_key=3, of_key_s=4.0, waiting=7, wait_s=8.0), None),
        (queue(of_key=4), Refusal("max_key_share", 2.0)),
        (queue(waiting=8), Refusal("max_waiting", 6.0)),
        (queue(wait_s=9.5), Refusal("late", 1.5)),
        (queue(waiting=8, of_key=4), Refusal("max_key_share", 2.0)),
    ],
)
def test_a_queue_has_room_for_a_class_and_in_it_for_each_key(found: Queue, refusal: Refusal | None) -> None:
    assert no_room(LIMITS, found) == refusal


def test_what_is_late_already_is_told_when_all_before_it_is_worked_off() -> None:
    late = replace(LIMITS, max_wait_s=-2.0)
    assert no_room(late, queue(wait_s=6.0)) == Refusal("late", 6.0)
    assert no_room(late, queue(wait_s=0.0)) == Refusal("late", 0.0)


@pytest.mark.parametrize("now_s", [1.76e9 + 0.123456, 1.79e9 + 0.9])
def test_a_minutes_worth_may_be_taken_at_once_at_any_rate(now_s: float) -> None:
    for rate in (*range(1, 400), 5000):
        allowance, spent = quota(per_s=rate / 60, burst=float(rate)), Spent()
        for _ in range(rate):
            spent, late_s = spend(allowance, spent.rested(now_s))
            assert late_s <= 0.0
        assert spend(allowance, spent.rested(now_s))[1] > 0.0


def test_a_wait_is_the_work_ahead_over_the_pace_of_all_replicas() -> None:
    assert predicted_wait_s(12.0, [1.0, 0.5]) == 4.0
    assert predicted_wait_s(12.0, [2.0]) == 24.0
    assert predicted_wait_s(12.0, []) == 0.0


def test_a_class_with_replicas_of_its_own_waits_for_no_work_that_cannot_run_there() -> None:
    assert predicted_wait_s(90.0, [1.0, 0.5], own_ahead_s=2.0, own_slowness=[0.5]) == 1.0
    assert predicted_wait_s(3.0, [1.0, 0.5], own_ahead_s=3.0, own_slowness=[0.5]) == 1.0


@pytest.mark.parametrize("wrong", [{"cost": -1.0}, {"per_s": 0.0}, {"burst": 0.0}])
def test_a_quota_out_of_bounds_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        quota(**wrong)


def test_a_settlement_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="per_s"):
        Settlement(name="k", cost=1.0, per_s=0.0)
