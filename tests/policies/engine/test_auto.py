"""The default policy: which settings it refuses, and what a successor knows."""

from typing import Any

import pytest

from policies.engine.auto import Auto, AutoConfig
from policies.engine.step_time import StepTimeConfig
from policies.errors import ConfigError
from tests.policies.states import result_of, same_times

TIMES = same_times(overhead_s=0.01, prefill_s=1e-4, decode_s=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "guess"}, "mode must be one of auto, exclusive, mixed"),
        ({"admission": "guess"}, "admission must be one of forecast, slots"),
        ({"overflow_probability": 1.0}, "overflow_probability must be in"),
        ({"classes": 0}, "classes must be finite and at least 1"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AutoConfig(**settings)


DECODES = result_of(step_s=0.02, decode_requests=4, kv_tokens=400)


def test_a_successor_with_another_profile_takes_steps_to_cost_what_that_says() -> None:
    before = Auto(AutoConfig())
    for _ in range(64):
        before.observe(DECODES)
    same, other = Auto(AutoConfig(), before), Auto(AutoConfig(step_times=TIMES), before)
    assert same.phases.model is before.phases.model
    assert other.phases.model.config == StepTimeConfig(prior=TIMES)
    assert other.phases.model.times() == TIMES
