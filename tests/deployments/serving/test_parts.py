"""Which parts of the policy act, and why others do not."""

from typing import Any

import pytest

from deployments.config.application import AppConfig
from deployments.serving.parts import parts_of_engine, parts_of_router, steps_in_words

ENGINE: dict[str, Any] = {
    "mode": "auto",
    "exclusive": False,
    "limited_by": "slots",
    "max_batch_size": 32,
    "step_times": {"decode": {"overhead_s": 0.01}},
    "finished": 40,
    "off": {},
}
BERT = {"kind": "bert"}
ROLLING = {"dispatch": "rolling"}


@pytest.mark.parametrize(
    ("settings", "acts", "why"),
    [
        ({}, False, "bins.dispatch: requests sends each as soon as a slot is free"),
        ({"bins": ROLLING}, True, "rolling batches of one bin each, of 4"),
        ({"bins": {"dispatch": "batches"}}, True, "batches of one bin each, of 4"),
        ({"engine": {"kind": "transformers"}}, True, "batches of one bin each, of 4"),
        ({"bins": ROLLING | {"count": 1}}, False, "bins.count: 1 does not tell lengths apart"),
        ({"mode": "shadow"}, False, "mode: shadow goes by no bins"),
    ],
)
def test_bins_act_where_batches_are_made_of_them(settings: dict[str, Any], acts: bool, why: str) -> None:
    said = parts_of_router(AppConfig(model="m", **settings))["bins"]
    assert said["acts"] is acts and said["why"].startswith(why)


def test_prediction_acts_where_a_model_reads_prompts() -> None:
    with_model = parts_of_router(AppConfig.model_validate({"model": "m", "predictor": BERT}))["prediction"]
    without = parts_of_router(AppConfig(model="m"))["prediction"]
    assert with_model["acts"] and not without["acts"]
    assert without["why"].startswith("predictor.kind: auto reads no prompts")


@pytest.mark.parametrize(
    ("said", "acts", "why"),
    [
        ({"exclusive": True}, True, "prompts and decodes take turns"),
        ({}, False, "mixed steps cost no more here"),
        ({"finished": 5}, False, "fewer than 32 answers have ended"),
        ({"step_times": {}}, False, "it is not known yet what steps cost"),
        ({"mode": "mixed"}, False, "engine.scheduler.mode: mixed"),
        ({"exclusive": True, "off": {"phases": {"loads": "caches"}}}, False, "off, with caches"),
    ],
)
def test_phases_say_why_steps_are_mixed(said: dict[str, Any], acts: bool, why: str) -> None:
    told = parts_of_engine({**ENGINE, **said})["phases"]
    assert told["acts"] is acts and told["why"].startswith(why)


def test_a_policy_of_another_has_its_name_there() -> None:
    own = {name: value for name, value in ENGINE.items() if name != "exclusive"} | {"policy": "mine:Policy"}
    assert parts_of_engine(own)["phases"] == {"acts": False, "why": "mine:Policy plans the steps"}


@pytest.mark.parametrize(
    ("limit", "acts", "why"),
    [
        ("algorithm_2", True, "001's Algorithm 2 bounds the batch, for the time between tokens, to 32"),
        ("memory", True, "the KV cache bounds the batch, to 32"),
        ("slots", False, "neither memory nor a time per token bounds the batch, but its slots"),
        (None, False, "no step was planned yet"),
    ],
)
def test_the_control_of_the_batch_acts_where_it_bounds_it(limit: str | None, acts: bool, why: str) -> None:
    assert parts_of_engine({**ENGINE, "limited_by": limit})["batch_control"] == {"acts": acts, "why": why}


def test_an_engine_that_plans_no_steps_has_no_parts() -> None:
    assert parts_of_engine({}) == parts_of_engine({"error": "gone"}) == {}


def test_steps_are_told_by_shares_of_what_they_held() -> None:
    steps = {"prefill": 12, "decode": 80, "mixed": 8, "empty": 900}
    assert steps_in_words({"steps": steps}) == "12 % prompts alone, 80 % decodes, 8 % mixed"
    assert steps_in_words({"steps": {"empty": 3}}) is None and steps_in_words({}) is None
