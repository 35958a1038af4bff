"""The default policy: what its settings give its parts, which of them go together, and what a successor knows."""

from typing import Any

import pytest

from policies.engine.auto import Auto, AutoConfig
from policies.engine.step_time import StepTimeConfig
from policies.errors import ConfigError
from policies.papers.memory_aware import MemoryAware
from policies.types import StepResult
from tests.policies.states import answers_of, result_of, same_times

TIMES = same_times(overhead_s=0.01, prefill_s=1e-4, decode_s=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"memory_form": "linear"}, 'memory_form: of admission "memory_aware", got "forecast"'),
        ({"memory_basis": "resident", "admission": "slots"}, 'memory_basis: of admission "memory_aware", got "slots"'),
        ({"prior_output_tokens": 9.0}, "prior_output_tokens: of admission"),
        ({"memory_form": "linear", "prior_output_tokens": 9.0}, "memory_form, prior_output_tokens: of admission"),
        ({"phase_rule": "ifr", "refill": 4}, 'refill fixes what phase_rule "ifr" would say'),
        ({"phase_rule": "fixed"}, "refill goes with phase_rule"),
        ({"mode_rule": "guess"}, "mode_rule must be one of measured, crossover"),
        ({"exclusive_overflow_probability": 1.0}, "overflow_probability must be in"),
        ({"priority_margin_fraction": float("nan")}, "priority_margin_fraction must be finite"),
        ({"hysteresis_fraction": -0.1}, "hysteresis_fraction must be finite and at least 0"),
    ],
)
def test_settings_that_say_nothing_together_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AutoConfig(**settings)


def test_each_way_of_admission_accepts_its_own_chance_unless_told() -> None:
    silent, told = AutoConfig(), AutoConfig(overflow_probability=0.2)
    assert [config.forecast().overflow_probability for config in (silent, told)] == [0.05, 0.2]
    assert [config.memory_aware().overflow_probability for config in (silent, told)] == [0.01, 0.2]


def test_algorithm_1_gets_its_form_its_basis_and_its_prior() -> None:
    config = AutoConfig(
        admission="memory_aware", memory_form="linear", memory_basis="resident", prior_output_tokens=90.0
    )
    part = config.memory_aware()
    assert (part.form, part.basis) == ("linear", "resident")
    assert (part.prior_output_tokens, part.prior_output_std_tokens) == (90.0, 90.0)


def ended(*output_tokens: int) -> StepResult:
    """A decode step with which so many answers end."""
    return result_of(step_s=0.02, decode_requests=4, kv_tokens=400, finished=answers_of(*output_tokens))


def test_algorithm_1_goes_on_with_the_lengths_that_it_knew() -> None:
    before = Auto(AutoConfig(admission="memory_aware"))
    before.observe(ended(*[70] * 40))
    after = Auto(AutoConfig(admission="memory_aware", memory_basis="resident"), before)
    assert isinstance(after.admission, MemoryAware) and isinstance(before.admission, MemoryAware)
    assert after.admission.lengths is before.admission.lengths


def test_a_successor_with_another_profile_takes_steps_to_cost_what_that_says() -> None:
    before = Auto(AutoConfig())
    for _ in range(64):
        before.observe(ended())
    same, other = Auto(AutoConfig(), before), Auto(AutoConfig(step_times=TIMES), before)
    assert same.phases.model is before.phases.model
    assert other.phases.model.config == StepTimeConfig(prior=TIMES)
    assert other.phases.model.times() == TIMES
