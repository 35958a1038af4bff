"""The default policy with rules of the papers: which of them go together, and what they replace."""

from math import inf
from typing import Any

import pytest

from policies.engine.auto import Auto
from policies.errors import ConfigError
from policies.papers.auto_literal import AutoLiteralConfig, PapersConfig, auto
from policies.papers.exclusive_mixed_literal import ExclusiveMixedLiteral
from policies.papers.memory_aware import MemoryAware
from policies.papers.sla_constrained import SlaConstrained
from policies.papers.smallest import Smallest
from policies.registry import build
from policies.types import BatchState, FinishedRequest, Limit, Phase, RunningRequests, StepPlan, StepResult
from tests.policies.states import result_of, same_times, state_of


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"memory": "square"}, "form must be one of exact, linear"),
        ({"memory_basis": "resident"}, 'memory_basis "resident" is of memory'),
        ({"overflow_probability": 1.0}, "overflow_probability must be in"),
        ({"sla": "guess"}, 'sla must be "search" or null'),
        ({"itl_target_s": 0.05}, 'itl_target_s 0.05 is of sla, which is not set: set sla "search"'),
        ({"search_width": 8}, "search_width 8 is of sla"),
        ({"sla": "search", "itl_target_s": 0.0}, "itl_target_s must be finite and positive"),
        ({"sla": "search", "itl_tolerance_fraction": 1.0}, "itl_tolerance_fraction must be in"),
        ({"sla": "search", "min_batch_size": 0}, "min_batch_size must be finite and at least 1"),
        ({"sla": "search", "search_width": 0}, "search_width must be finite and at least 1"),
        ({"sla": "search", "search_drift": 0}, "search_drift must be finite and at least 1"),
        ({"phase_rule": "guess"}, "phase_rule must be one of exact, threshold, ifr"),
        ({"phase_rule": "ifr", "refill": 4}, 'refill fixes what phase_rule "ifr" would say'),
        ({"phase_rule": "fixed"}, "refill goes with phase_rule"),
        ({"mode_rule": "guess"}, "mode_rule must be one of measured, crossover"),
        ({"priority_margin_fraction": float("nan")}, "priority_margin_fraction must be finite"),
    ],
)
def test_rules_that_say_nothing_together_are_refused_by_name(rules: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PapersConfig(**rules)


def test_without_a_rule_it_is_the_default_policy() -> None:
    assert type(build("auto")) is Auto
    rules = {"memory": "linear", "memory_basis": "resident", "sla": "search", "itl_target_s": 0.05, "refill": 3}
    made = build("auto", papers=rules)
    assert isinstance(made.admission, MemoryAware) and isinstance(made.latency, Smallest)
    assert (made.admission.config.form, made.admission.config.basis) == ("linear", "resident")
    assert isinstance(made.phases, ExclusiveMixedLiteral) and made.phases.refill(64) == 3


def test_algorithm_1_goes_on_with_the_lengths_that_it_knew() -> None:
    before = auto(AutoLiteralConfig(papers=PapersConfig(memory="exact")))
    finished = tuple(FinishedRequest(prompt_tokens=10, output_tokens=70) for _ in range(40))
    ended = StepResult(
        now_s=0.0, step_s=0.02, phase=Phase.DECODE, prefill_tokens=0, prefill_requests=0, decode_requests=4,
        kv_tokens=400, max_batch_size=8, running_count=4, waiting_count=0, finished=finished,
    )  # fmt: skip
    before.observe(ended)
    resident = PapersConfig(memory="exact", memory_basis="resident")
    after = auto(AutoLiteralConfig(papers=resident), before)
    assert isinstance(after.admission, MemoryAware) and isinstance(before.admission, MemoryAware)
    assert after.admission.lengths is before.admission.lengths


def test_a_search_begins_anew_where_its_policy_goes_on_with_what_another_learned() -> None:
    config = AutoLiteralConfig(papers=PapersConfig(sla="search", itl_target_s=0.001))
    before = auto(config)
    for _ in range(64):
        before.observe(SLOW)
    after = auto(config, before)
    assert limit_of(before) < limit_of(auto(config)) == limit_of(after)


SLOW = result_of(step_s=0.5, decode_requests=64, kv_tokens=6400, max_batch_size=64, waiting_count=9)


def searching(**rules: Any) -> Auto:
    """Exclusive, with lengths and step times known."""
    times = same_times(overhead_s=0.01, prefill_s=1e-4, decode_s=1e-4)
    return auto(AutoLiteralConfig(mode="exclusive", step_times=times, papers=PapersConfig(sla="search", **rules)))


def running(*tpot_s: float) -> BatchState:
    made = RunningRequests.of(prompt_tokens=[100] * len(tpot_s), output_tokens=[10] * len(tpot_s), tpot_s=list(tpot_s))
    return state_of(running=made)


def slow_steps(policy: Auto, state: BatchState) -> StepPlan:
    for _ in range(64):
        policy.plan(state)
        policy.observe(SLOW)
    return policy.plan(state)


def test_a_target_that_nobody_was_promised_bounds_nothing() -> None:
    policy = searching()
    plan = slow_steps(policy, running(*[inf] * 64))
    assert (plan.max_batch_size, plan.max_prefill_tokens) == (256, None)


def test_the_strictest_promise_of_those_that_run_is_the_target() -> None:
    loose, strict = searching(), searching()
    assert slow_steps(loose, running(inf, *[2.0] * 63)).limited_by is not Limit.ALGORITHM_2
    plan = slow_steps(strict, running(0.03, *[2.0] * 63))
    assert plan.limited_by is Limit.ALGORITHM_2 and plan.max_batch_size < 64
    assert strict.plan(running(*[2.0] * 63)).max_batch_size == 256, "it has left"


def test_phases_end_for_what_was_promised_and_not_for_a_constant() -> None:
    def phase(policy: Auto, *tpot_s: float) -> Phase:
        return policy.plan(running(*tpot_s)).phase

    assert phase(searching(), inf) is Phase.DECODE and phase(searching(), 0.5) is Phase.MIXED
    assert phase(searching(itl_target_s=0.5), inf) is Phase.DECODE


def test_a_search_knows_how_fast_prompts_are_read_and_what_answers_take() -> None:
    policy = searching()
    assert policy.seconds_per_prompt_token == pytest.approx(1e-4), "the least"
    for _ in range(32):
        policy.observe(result_of(step_s=0.05, prefill_tokens=100, decode_requests=4, waiting_count=9))
    assert policy.seconds_per_prompt_token == pytest.approx(0.05 / 100)
    assert searching().answer_price(0.0) == pytest.approx(1.0)
    assert policy.answers.seconds_per_token == pytest.approx(0.05)


def limit_of(policy: Auto) -> int:
    assert isinstance(policy.latency, Smallest) and isinstance(policy.latency.policies[0], SlaConstrained)
    return policy.latency.policies[0].limit
