"""The default policy with rules of the papers: which of them go together, and what they replace."""

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
from policies.types import FinishedRequest, Phase, StepResult


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"memory": "square"}, "form must be one of exact, linear"),
        ({"memory_basis": "resident"}, 'memory_basis "resident" is of memory'),
        ({"overflow_probability": 1.0}, "overflow_probability must be in"),
        ({"itl_target_s": 0.0}, "itl_target_s must be finite and positive"),
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
    made = build("auto", papers={"memory": "linear", "memory_basis": "resident", "itl_target_s": 0.05, "refill": 3})
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
    config = AutoLiteralConfig(papers=PapersConfig(itl_target_s=0.001))
    before = auto(config)
    slow = StepResult(
        now_s=0.0, step_s=0.5, phase=Phase.DECODE, prefill_tokens=0, prefill_requests=0, decode_requests=64,
        kv_tokens=6400, max_batch_size=64, running_count=64, waiting_count=9,
    )  # fmt: skip
    for _ in range(200):
        before.observe(slow)
    after = auto(config, before)
    assert limit_of(before) < limit_of(auto(config)) == limit_of(after)


def limit_of(policy: Auto) -> int:
    assert isinstance(policy.latency, Smallest) and isinstance(policy.latency.policies[0], SlaConstrained)
    return policy.latency.policies[0].limit
