"""003's own rules: theta0, its correction, a fixed refill, eq. 8 as printed, N*."""

from math import ceil, floor

import numpy as np
import pytest

from policies.engine.step_time import StepTimeConfig
from policies.errors import ConfigError
from policies.papers import exclusive_mixed_literal
from policies.papers.exclusive_mixed_literal import ExclusiveMixedLiteral, ExclusiveMixedLiteralConfig
from policies.papers.phases import overhead_ratio, phase_threshold
from policies.types import Limit, Phase, StepTimes
from tests.policies.phased import Recorder, make_state, make_times, saturated, steady
from tests.toy_engine import Job, ToyEngine, run_closed

FREE = make_times(prefill_overhead_s=0.03)
CONTENDED = make_times(prefill_overhead_s=0.01, interference_s=3e-4)


def literal(times: StepTimes | None = None, **settings: object) -> ExclusiveMixedLiteral:
    config = {"step_times": StepTimeConfig(prior=times or make_times()), **settings}
    return ExclusiveMixedLiteral(ExclusiveMixedLiteralConfig(**config))  # type: ignore[arg-type]


def exclusive(**settings: object) -> ExclusiveMixedLiteral:
    return literal(mode="exclusive", **settings)


@pytest.mark.long
@pytest.mark.slow
class TestTheBoundByMemory:
    def engine(self, policy: ExclusiveMixedLiteral, times: StepTimes | None = None) -> ToyEngine:
        engine = ToyEngine(policy, times or make_times(), slots=64, total_blocks=1000)
        return saturated(engine, count=400, mean_output=400)

    def test_n_star_keeps_the_batch_of_phases_within_the_cache_and_plans_say_that_memory_binds(self) -> None:
        bounded, free = self.engine(exclusive(overflow_probability=0.01)), self.engine(exclusive())
        assert 10 * bounded.preemptions < free.preemptions > 100
        caps = {plan.max_batch_size for plan in bounded.plans[-200:] if plan.limited_by is Limit.N_STAR}
        assert caps and max(caps) < 64

    def test_a_larger_chance_lets_more_in(self) -> None:
        policies = [exclusive(overflow_probability=chance) for chance in (0.001, 0.2)]
        for policy in policies:
            self.engine(policy)
        assert policies[0].most_exclusive < policies[1].most_exclusive < 64

    def test_where_not_even_one_request_is_safe_it_bounds_nothing_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exclusive_mixed_literal, "max_batch_size_exclusive", lambda **of_the_cache: 0)
        policy = exclusive(overflow_probability=0.01)
        engine = saturated(ToyEngine(policy, make_times(), slots=16), count=200)
        assert policy.out_of_reach is not None and "N* bounds no exclusive batch" in policy.out_of_reach
        assert engine.plans[-1].max_batch_size > 1

    def test_mixed_steps_are_not_bounded_by_it(self) -> None:
        policy = literal(FREE, overflow_probability=0.01)
        engine = self.engine(policy, FREE)
        assert policy.most_exclusive < 64
        assert {plan.max_batch_size for plan in engine.plans} == {64}


@pytest.mark.slow
def test_the_threshold_rule_refills_theta0_of_the_slots_rounded_down() -> None:
    policy = exclusive(phase_rule="threshold")
    engine = saturated(ToyEngine(policy, make_times(), slots=64), count=800)
    theta = phase_threshold(overhead_ratio(hazard=0.01, prefill_overhead_s=0.04, decode_overhead_s=0.01))
    refill = 64 * policy.phase_length.slots_fraction
    assert refill == floor(refill) == pytest.approx(64 * theta, abs=1.5)
    refills = [r.prefill_requests for r in steady(engine) if r.phase is Phase.PREFILL]
    assert np.median(refills) == pytest.approx(refill, abs=1.0)


@pytest.mark.long
@pytest.mark.slow
def test_the_ifr_rule_waits_for_more_where_the_hazard_rises() -> None:
    def refill(rule: str) -> float:
        policy = exclusive(phase_rule=rule)
        ages = np.arange(1, 2000)
        hazard = np.minimum(1.0, 1e-3 + 1e-4 * ages)
        law = np.append(1.0, np.cumprod(1.0 - hazard))
        outputs = np.searchsorted(-law, -np.random.default_rng(1).random(800))
        jobs = [Job(request_id=f"r{i}", prompt_tokens=100, output_tokens=int(o)) for i, o in enumerate(outputs)]
        run_closed(ToyEngine(policy, make_times(), slots=64), jobs, 128)
        return policy.phase_length.slots_fraction

    assert refill("ifr") > refill("threshold")


@pytest.mark.parametrize("slots", [5, 10, 37, 64])
def test_a_refill_of_k_is_due_with_the_kth_free_slot_whatever_share_that_is(slots: int) -> None:
    for refill in range(1, slots):
        policy = exclusive(phase_rule="fixed", refill=refill)
        standing = policy.plan(make_state(decoding=slots, waiting=50, slots=slots))
        assert (standing.phase, standing.departures) == (Phase.DECODE, min(refill, ceil(0.9 * slots)) - 1)
        due = make_state(decoding=slots - min(refill, ceil(0.9 * slots)), waiting=50, slots=slots)
        assert policy.plan(due).phase is Phase.PREFILL


def test_a_refill_without_the_rule_that_uses_it_is_refused() -> None:
    for settings in ({"refill": 4}, {"phase_rule": "fixed"}):
        with pytest.raises(ConfigError, match="refill"):
            ExclusiveMixedLiteralConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.long
def test_equation_8_takes_every_mixed_step_to_hold_a_prefill() -> None:
    # Of answers of 300 tokens in 32 slots most mixed steps hold none, and those cost what decodes cost.
    times = make_times(mixed_s=0.004)

    def share(rule: str) -> float:
        recorder = Recorder(literal(times, mode_rule=rule))
        saturated(ToyEngine(recorder, times, slots=32), count=300, mean_output=300)
        return float(np.mean(recorder.modes[2000:]))

    assert (share("measured"), share("crossover")) == (0.0, 1.0)


@pytest.mark.slow
def test_the_priority_margin_moves_the_choice() -> None:
    def share(margin: float) -> float:
        recorder = Recorder(literal(CONTENDED, priority_margin_fraction=margin))
        saturated(ToyEngine(recorder, CONTENDED, slots=32), count=500)
        return float(np.mean(recorder.modes[:-300]))

    assert share(10.0) == 0.0
    assert share(0.0) > 0.5
