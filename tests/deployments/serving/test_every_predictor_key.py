"""Every key of the predictor changes what it foresees, how prompts are scored together, or where it runs."""

import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deployments.config.application import AppConfig
from deployments.config.lengths import PredictorSection
from deployments.serving.predictor import learned_predictor
from predictor.calibration import CALIBRATION_FILE, DAY_0, Curve
from predictor.learned import Question

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds

BERT = {"kind": "bert", "deadline_s": 30.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value of a key, what else is set, and a decision that it changes."""

    value: Any
    decide: Callable[[PredictorSection], Awaitable[Any]]
    base: Mapping[str, Any] = field(default_factory=lambda: BERT)


async def foreseen(section: PredictorSection) -> object:
    asked = learned_predictor(section, None)
    if asked is None:
        return None
    foresight = await asked.foresee(Question(prompt="Name three rivers.", model="m", slo_class="standard"))
    return foresight.score, foresight.prediction


async def resources(section: PredictorSection) -> object:
    return AppConfig(model="demo", predictor=section).resources


CASES = {
    "kind": Case(value="bert", decide=foreseen, base={"deadline_s": 30.0}),
    "place": Case(value="router", decide=resources),
    "checkpoint": Case(value="twice as long", decide=foreseen),
    "replicas": Case(value=2, decide=resources),
    "num_gpus": Case(value=1.0, decide=resources),
    "num_cpus": Case(value=2.0, decide=resources),
    "dtype": Case(value="bfloat16", decide=foreseen, base=BERT | {"dtype": "float32"}),
    "deadline_s": Case(value=1e-6, decide=foreseen),
}


@pytest.fixture
def twice_as_long(tmp_path: Path) -> Path:
    """A checkpoint whose answers are."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(DAY_0, folder)
    (folder / CALIBRATION_FILE).write_text(json.dumps(Curve.read(DAY_0).scaled(2.0).to_dict()))
    return folder


@pytest.mark.parametrize("key", sorted(PredictorSection.model_fields))
async def test_every_key_changes_a_decision(key: str, twice_as_long: Path) -> None:
    """A new one needs a case: a value, and a decision that it changes."""
    case = CASES[key]
    value = twice_as_long if key == "checkpoint" else case.value
    before, after = PredictorSection(**case.base), PredictorSection(**{**case.base, key: value})
    assert await case.decide(before) != await case.decide(after)
