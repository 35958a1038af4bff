"""Every setting of engine.scheduler changes what a real vLLM scheduler does, given at the start or while it runs."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from deployments.command.calibrate import write_profile
from deployments.config.scheduler import SchedulerSettings
from deployments.engines.vllm.request_metadata import RequestMetadata
from policies.papers.auto_literal import PapersConfig
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
        times: what steps cost, and what the profile says where `profiled`.
        sessions: every fourth request is the next turn of one of four sessions, and begins as the one before it.
    """

    value: Any
    base: Mapping[str, Any] = field(default_factory=lambda: UNMEASURED)
    engine: Mapping[str, Any] = field(default_factory=dict)
    times: StepTimes = TIMES
    profiled: bool = False
    requests: int = 100
    sessions: bool = False

    def prompt(self, number: int, tokens: int) -> list[int] | None:
        """Of the request with this number; None where nothing is cached."""
        if not self.sessions:
            return None
        return [number] * tokens if number % 4 else [1000 + number % 16] * 200


EXCLUSIVE = UNMEASURED | {"mode": "exclusive"}
EQUATION_12 = UNMEASURED | {"papers": {"memory": "exact"}}
SEARCH = UNMEASURED | {"papers": {"sla": "search"}}
SEARCH_AT_12_MS = UNMEASURED | {"papers": {"sla": "search", "itl_target_s": 0.012}}
ALONE = UNMEASURED | {"overcommit": False}
CASES = {
    "mode": Case(value="exclusive"),
    "admission": Case(value="slots", engine=TIGHT),
    "overflow_probability": Case(value=0.4, base=ALONE, engine=TIGHT),
    "overcommit": Case(value=False, engine=TIGHT),
    "max_batch_size": Case(value=4),
    "measure_s": Case(value=0.0, base={}, times=DEAR_MIXES, requests=200),
    "policy": Case(value="memory_aware", base={}, engine=TIGHT),
    "policy_args": Case(value={"prior_output_tokens": 20.0}, base={"policy": "memory_aware"}, engine=TIGHT),
    "classes": Case(value=("short",), base=ALONE, engine=TIGHT),
    "ttft_s": Case(value=0.3),
    "tpot_s": Case(value=0.012),
    "e2e_s": Case(value=1.0),
    "late_patience_s": Case(value=0.05, base={"mode": "mixed", "ttft_s": 0.1}, requests=200),
    "kept_fraction": Case(value=0.0, engine={**TIGHT, "enable_prefix_caching": True}, sessions=True),
    "profile": Case(value="profile.csv", times=DEAR_MIXES, requests=200),
    "papers": Case(value={"refill": 16}, base=EXCLUSIVE),
}
RULES = {
    "memory": Case(value="exact", engine=TIGHT),
    "memory_basis": Case(value="resident", base=EQUATION_12, engine=TIGHT),
    "overflow_probability": Case(value=0.4, base=EQUATION_12, engine=TIGHT),
    "sla": Case(value="search", base=UNMEASURED | {"tpot_s": 0.012}),
    "itl_target_s": Case(value=0.012, base=SEARCH),
    "itl_tolerance_fraction": Case(value=0.3, base=SEARCH_AT_12_MS),
    "min_batch_size": Case(value=20, base=SEARCH_AT_12_MS),
    "search_width": Case(value=1, base=SEARCH_AT_12_MS),
    "search_drift": Case(value=8, base=SEARCH_AT_12_MS),
    "refill": Case(value=16, base=EXCLUSIVE),
    "phase_rule": Case(value="threshold", base=EXCLUSIVE, requests=300),
    "mode_rule": Case(value="crossover", engine={"slots": 8}, times=DEAR_MIXES, profiled=True, requests=200),
    "priority_margin_fraction": Case(value=100.0, times=DEAR_MIXES, profiled=True, requests=200),
    "bounds_exclusive": Case(value=True, base=EXCLUSIVE | {"admission": "slots"}, engine=TIGHT, requests=200),
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
            tokens = case.prompt(number := len(left), prompt)
            comes_back = number % 4 == 0 if case.sessions else None
            told = RequestMetadata(slo_class="short" if output < 20 else None, comes_back=comes_back).as_extra_args()
            engine.add(f"r{number}", prompt, output, extra_args=told, prompt_token_ids=tokens)
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
    changes = {key: case.value}
    before, after = (served(case, settings, folder, {}) for settings in (case.base, {**case.base, **changes}))
    assert before != after


@pytest.mark.parametrize("rule", [each.name for each in fields(PapersConfig) if each.name != "literal_buckets"])
def test_every_rule_of_the_papers_changes_what_steps_hold(rule: str, folder: Path) -> None:
    case = RULES[rule]
    rules = {**case.base.get("papers", {}), rule: case.value}
    before, after = (served(case, settings, folder, {}) for settings in (case.base, {**case.base, "papers": rules}))
    assert before != after


@pytest.mark.long
@pytest.mark.parametrize("key", sorted(SchedulerSettings.live_keys()))
def test_a_live_change_is_served_as_if_it_had_stood_there_from_the_start(key: str, folder: Path) -> None:
    case = CASES[key]
    changes = {key: str(folder / case.value) if key == "profile" else case.value}
    begun = served(case, {**case.base, **changes}, folder, {})
    assert served(case, case.base, folder, changes) == begun
