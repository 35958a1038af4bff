from collections import deque
from math import exp, log, nan, sqrt

import numpy as np
import pytest

from policies.engine.overcommit import MOST, Overcommit
from policies.types import StepCoefficients, StepTimes
from tests.policies.states import result_of


def times(prefill_s: float, overhead_s: float, decode_s: float) -> StepTimes:
    decode = StepCoefficients(overhead_s=overhead_s, decode_s=decode_s)
    return StepTimes(prefill=StepCoefficients(overhead_s=overhead_s, prefill_s=prefill_s), decode=decode, mixed=decode)


CHEAP = times(prefill_s=1e-6, overhead_s=0.01, decode_s=1e-6)
DEAR = times(prefill_s=1e-3, overhead_s=0.001, decode_s=1e-3)


def window(
    overcommit: Overcommit,
    preempted: int,
    steps: int = 32,
    *,
    decodes: int = 20,
    decode_steps: int = 32,
    step_s: float = 0.02,
) -> None:
    """Steps of 20 ms in which each decode reads 200 tokens; those after the first ``decode_steps`` only prefill."""
    for step in range(steps):
        running = decodes if step < decode_steps else 0
        overcommit.observe(
            result_of(
                step_s=step_s,
                prefill_tokens=0 if running else 500,
                decode_requests=running,
                kv_tokens=200 * running,
                preempted=preempted if step == 0 else 0,
            )
        )


def settled(step_times: StepTimes, preempted_per_share: float) -> float:
    """Where it ends when preemptions grow with the square of what is admitted too much."""
    overcommit = Overcommit()
    for _ in range(200):
        window(overcommit, round(preempted_per_share * overcommit.share**2))
        overcommit.move(step_times, binding=True)
    return overcommit.share


def test_it_admits_all_it_may_where_recomputing_is_cheap() -> None:
    assert settled(CHEAP, preempted_per_share=2.0) == MOST


def test_it_stays_with_the_forecast_where_recomputing_is_dear() -> None:
    assert settled(DEAR, preempted_per_share=20.0) < 0.5


@pytest.mark.parametrize("lag", [1, 6], ids=["at once", "six windows later"])
def test_preemptions_in_bursts_do_not_swing_it_between_none_and_too_many(lag: int) -> None:
    # A preemption costs 200 tokens of 50 us in windows of 0.64 s; they grow with (g + 0.03)^1.5, and overhead is 0.6
    # of a decode step. 1.5 * 0.2 (g + 0.03)^0.5 (1 + g) = 0.6 at g = 0.98.
    step_times, cost = times(prefill_s=5e-5, overhead_s=0.012, decode_s=4e-4), 200 * 5e-5 / 0.64
    chance, overcommit, shares = np.random.default_rng(3), Overcommit(), deque([0.0] * lag, maxlen=lag)
    seen = []
    for _ in range(500):
        shares.append(overcommit.share)
        window(overcommit, int(chance.poisson(0.2 * (shares[0] + 0.03) ** 1.5 / cost)))
        overcommit.move(step_times, binding=True)
        seen.append(overcommit.share)
    assert 0.88 < np.mean(seen[150:]) < 1.08
    assert min(seen[150:]) > 0.68 and max(seen[150:]) < 1.35


def test_a_step_whose_time_is_no_number_does_not_stop_it_for_good() -> None:
    overcommit = Overcommit()
    window(overcommit, preempted=0, step_s=nan)
    window(overcommit, preempted=0)
    assert overcommit.due


def test_it_does_not_grow_while_it_keeps_nobody_waiting() -> None:
    overcommit = Overcommit()
    window(overcommit, preempted=0)
    overcommit.move(CHEAP, binding=False)
    assert overcommit.share == 0.0


def test_it_shrinks_while_it_keeps_nobody_waiting_and_preemptions_are_dear() -> None:
    overcommit = Overcommit()
    overcommit.share = 1.0
    window(overcommit, preempted=4)
    overcommit.move(DEAR, binding=False)
    assert overcommit.share < 1.0


def test_a_cheap_preemption_that_the_forecast_itself_let_happen_does_not_stop_it_for_good() -> None:
    overcommit = Overcommit()
    for preempted in (1, 0, 0):
        window(overcommit, preempted)
        overcommit.move(CHEAP, binding=True)
    assert overcommit.share > 0.0


@pytest.mark.long
def test_rare_preemptions_cost_in_the_mean_what_they_are_worth() -> None:
    # A preemption costs 200 tokens of 1 ms in windows of 0.64 s, 31 %, and all may cost 0.6 * 0.05 / sqrt(20) = 0.67 %:
    # one in 47 windows. At g = 0 there are twice as many, and they grow e-fold with every 0.0112 of g.
    step_times, h = times(prefill_s=1e-3, overhead_s=0.012, decode_s=4e-4), 0.05 / sqrt(20)
    chance, overcommit = np.random.default_rng(5), Overcommit()
    seen, shares = 0, []
    for number in range(20_000):
        preempted = int(chance.poisson(2.0 / 47.0 * exp(overcommit.share / h)))
        window(overcommit, preempted)
        overcommit.move(step_times, binding=True)
        if number >= 4000:
            seen += preempted
            shares.append(overcommit.share)
    assert seen / len(shares) == pytest.approx(1.0 / 47.0, rel=0.12)
    assert np.mean(shares) == pytest.approx(-h * log(2.0), abs=0.25 * h)


def test_it_does_not_go_far_below_the_forecast() -> None:
    overcommit = Overcommit()
    for _ in range(100):
        window(overcommit, preempted=50)
        overcommit.move(DEAR, binding=True)
    assert overcommit.share == pytest.approx(-6.0 * 0.05 / sqrt(20))


# Overhead is 0.6 of each step that decodes, and a preemption costs 0.5 % of a window.
BETWEEN = times(prefill_s=0.005 * 0.64 / 200, overhead_s=0.012, decode_s=0.0)


def moved(**load: int) -> float:
    """From 0, after one preemption in a window."""
    overcommit = Overcommit()
    window(overcommit, preempted=1, **load)
    overcommit.move(BETWEEN, binding=True)
    return overcommit.share


def test_a_larger_batch_reaches_less_far_beyond_the_forecast() -> None:
    assert moved(decodes=4) > 0.0  # 0.05 / 2 is worth 0.6 * 0.025
    assert moved(decodes=400) < 0.0


def test_where_most_of_the_time_is_prefill_a_larger_batch_brings_less() -> None:
    assert moved(decodes=20) > 0.0  # 0.6 * 0.011 is more than 0.5 %
    assert moved(decodes=20, decode_steps=16) < 0.0


def test_a_window_is_due_only_when_it_decoded_and_is_complete() -> None:
    overcommit = Overcommit()
    window(overcommit, preempted=0, steps=31)
    assert not overcommit.due
    window(overcommit, preempted=0, steps=1)
    assert overcommit.due
