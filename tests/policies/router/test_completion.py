"""Where a request stands whose whole answer is due by a time."""

import pytest

from policies.router.completion import Due, MeanCost, due
from policies.router.order import Band, banded, deadline_keys
from policies.router.promise import NO_PROMISE, Promise


def test_without_a_whole_answer_the_first_token_decides() -> None:
    assert due(100.0, NO_PROMISE) == Due(None, None)
    assert due(100.0, Promise(ttft_s=2.0, tpot_s=0.1), relative_cost=9.0) == Due(102.0, 102.0)


def test_one_of_mean_cost_stands_at_its_deadline_and_a_cheap_one_before() -> None:
    promise = Promise(e2e_s=8.0)
    assert due(100.0, promise, relative_cost=1.0, short_s=1.5) == Due(108.0, 106.5)
    assert due(100.0, promise, relative_cost=0.25).due_s == 102.0
    assert due(100.0, promise, relative_cost=3.0).due_s == 124.0


def test_what_has_several_promises_must_keep_all() -> None:
    assert due(100.0, Promise(ttft_s=1.0, e2e_s=8.0), relative_cost=0.05, short_s=7.5) == Due(100.4, 100.5)
    assert due(100.0, Promise(ttft_s=1.0, e2e_s=8.0), relative_cost=3.0, short_s=2.0) == Due(101.0, 101.0)


def test_costs_are_told_against_those_before() -> None:
    costs = MeanCost()
    assert [costs.relative(10.0) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert costs.relative(40.0) == pytest.approx(40.0 / 17.5)
    assert MeanCost().relative(0.0) == 1.0


def test_its_key_is_in_the_order_of_those_in_time() -> None:
    assert deadline_keys(100.0, None, due_s=103.0).key == banded(Band.IN_TIME, 103.0)
    assert deadline_keys(100.0, None, due_s=103.0).late_key == deadline_keys(100.0, 1.0).late_key
