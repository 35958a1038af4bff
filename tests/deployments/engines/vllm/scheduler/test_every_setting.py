"""Every setting of engine.scheduler changes what a real vLLM scheduler does, given at the start or while it runs."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deployments.command.calibrate import write_profile
from deployments.config.scheduler import SchedulerSettings
from deployments.engines.vllm.request_metadata import RequestMetadata
from policies.types import StepCoefficients, StepTimes
from tests.virtual_engine import TIMES, StepLog, VirtualEngine

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

UNMEASURED = {"measure_s": 0.0}
TIGHT = {"blocks": 120}
# Eight requests of fifty tokens each: most mixed steps hold no prefill, so eq. 8 takes mixing for dearer than it is.
DEAR_MIXES = replace(
    TIMES,
    prefill=StepCoefficients(overhead_s=0.02, prefill_s=2e-5),
    mixed=StepCoefficients(overhead_s=0.03, prefill_s=2e-5, decode_s=1e-4),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value, what else is set in both runs, and the engine and requests for which it makes a difference.

    Attributes:
        with_it: settings that only make sense together with the value.
        times: what steps cost, and what the profile says where `profiled`.
    """

    value: Any
    base: Mapping[str, Any] = field(default_factory=lambda: UNMEASURED)
    with_it: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    times: StepTimes = TIMES
    profiled: bool = False
    requests: int = 100


EXCLUSIVE = UNMEASURED | {"mode": "exclusive"}
EQUATION_12 = UNMEASURED | {"admission": "memory_aware"}
ALONE = UNMEASURED | {"overcommit": False}
CASES = {
    "mode": Case(value="exclusive"),
    "admission": Case(value="slots", engine=TIGHT),
    "memory_form": Case(value="linear", base=EQUATION_12, engine=TIGHT),
    "memory_basis": Case(value="resident", base=EQUATION_12, engine=TIGHT),
    "prior_output_tokens": Case(value=20.0, base=EQUATION_12, engine=TIGHT),
    "ttft_s": Case(value=0.3),
    "tpot_s": Case(value=0.012),
    "sla": Case(value="search", with_it={"itl_target_s": 0.012}),
    "itl_target_s": Case(value=0.012, base=UNMEASURED | {"sla": "search", "itl_target_s": 0.03}),
    "classes": Case(value=("short",), base=ALONE, engine=TIGHT),
    "refill": Case(value=16, base=EXCLUSIVE),
    "phase_rule": Case(value="threshold", base=EXCLUSIVE, requests=300),
    "mode_rule": Case(value="crossover", engine={"slots": 8}, times=DEAR_MIXES, profiled=True, requests=200),
    "hysteresis_fraction": Case(value=100.0, times=DEAR_MIXES, profiled=True, requests=200),
    "priority_margin_fraction": Case(value=100.0, times=DEAR_MIXES, profiled=True, requests=200),
    "exclusive_overflow_probability": Case(
        value=0.01, base=EXCLUSIVE | {"admission": "slots"}, engine=TIGHT, requests=200
    ),
    "max_wait_s": Case(value=0.05, base=EXCLUSIVE | {"refill": 16}),
    "max_batch_size": Case(value=4),
    "overflow_probability": Case(value=0.4, base=ALONE, engine=TIGHT),
    "overcommit": Case(value=False, engine=TIGHT),
    "profile": Case(value="profile.csv", times=DEAR_MIXES, requests=200),
    "measure_s": Case(value=0.0, base={}, times=DEAR_MIXES, requests=200),
    "policy": Case(value="memory_aware", base={}, engine=TIGHT),
    "policy_args": Case(value={"prior_output_tokens": 20.0}, base={"policy": "memory_aware"}, engine=TIGHT),
}
every_key = pytest.mark.parametrize("key", sorted(SchedulerSettings.model_fields))


def served(case: Case, settings: Mapping[str, Any], folder: Path, changes: Mapping[str, Any]) -> list[StepLog]:
    """Steps of an engine that began with `settings`, and was measured if they say so, and then was told `changes`."""
    if "profile" in settings or case.profiled:
        settings = {**settings, "profile": str(folder / "profile.csv")}
    engine = VirtualEngine(dict(settings), times=case.times, **case.engine)
    if engine.scheduler.settings.measures:
        engine.measure()
    if changes:
        engine.scheduler.control(changes)
    rng = random.Random(1)
    left = [(rng.randint(8, 300), min(400, 1 + int(rng.expovariate(1 / 50)))) for _ in range(case.requests)]
    while left or engine.busy:
        while left and len(engine.scheduler.requests) < 48:
            prompt, output = left.pop()
            told = RequestMetadata(slo_class="short" if output < 20 else None).as_extra_args()
            engine.add(f"r{len(left)}", prompt, output, extra_args=told)
        engine.step()
    assert all(answer.whole for answer in engine.answers.values())
    return engine.log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_profile(tmp_path / "profile.csv", DEAR_MIXES, (512, 4096), model="mine", gpu="mine")
    return tmp_path


@every_key
def test_every_setting_changes_what_steps_hold(key: str, folder: Path) -> None:
    """A new one needs a case: a value and a load with which it makes a difference."""
    case = CASES[key]
    changes = {key: case.value, **case.with_it}
    before, after = (served(case, settings, folder, {}) for settings in (case.base, {**case.base, **changes}))
    assert before != after


@pytest.mark.long
@pytest.mark.parametrize("key", sorted(SchedulerSettings.live_keys()))
def test_a_live_change_is_served_as_if_it_had_stood_there_from_the_start(key: str, folder: Path) -> None:
    case = CASES[key]
    changes = {key: str(folder / case.value) if key == "profile" else case.value, **case.with_it}
    begun = served(case, {**case.base, **changes}, folder, {})
    assert served(case, case.base, folder, changes) == begun
