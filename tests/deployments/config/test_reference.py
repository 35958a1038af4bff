"""The one source of what keys are."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from deployments.command import config as command
from deployments.config.application import AppConfig
from deployments.config.reference import Key, all_keys, below, find, nearest, schema
from deployments.config.scheduler import SchedulerSection, SchedulerSettings
from deployments.http.keys import KeyEntry
from tests.deployments.command.test_cli import CONFIGS

KEYS = all_keys(AppConfig)


def key(path: str) -> Key:
    found = find(KEYS, path)
    assert found is not None
    return found


def properties(made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for section in (made, *made.get("$defs", {}).values()):
        yield from section.get("properties", {}).items()


@pytest.mark.parametrize("model", [AppConfig, KeyEntry])
def test_every_key_has_a_text_of_its_own(model: type[AppConfig] | type[KeyEntry]) -> None:
    for name, value in properties(schema(model)):
        assert value["description"].endswith("."), name
    assert all(each.meaning for each in all_keys(model))


def test_the_schema_takes_what_is_served_and_refuses_what_is_not() -> None:
    validator = jsonschema.Draft202012Validator(schema(AppConfig))
    validator.check_schema(validator.schema)
    for file in CONFIGS.glob("*.yaml"):
        for application in yaml.safe_load(file.read_text())["applications"]:
            validator.validate(application["args"])
    assert not validator.is_valid({"model": "m", "engin": {}})


def test_defaults_are_those_in_force() -> None:
    assert key("model").is_needed and not key("name").is_needed
    made, compared = AppConfig(model="m"), 0
    for each in KEYS:
        value: Any = made
        for part in each.path.split("."):
            value = getattr(value, part, None)
        if isinstance(value, int | float | str) and not each.is_needed:
            compared += 1
            assert json.loads(each.default) == value, each.path
    assert compared > 50


def test_names_and_numbers_stand_in_the_place_of_any() -> None:
    assert key("classes.gold.ttft_s").path == "classes.NAME.ttft_s"
    assert key("more_models[3].engine.replicas") == key("more_models.3.engine.replicas") == key("engine.replicas")
    assert find(KEYS, "engine.gold.ttft_s") is None


def test_keys_that_further_models_alone_have_stand_below_them() -> None:
    assert key("more_models[1].candidate.share").is_live and not key("more_models[1].candidate.of").is_live
    own = [each.path for each in KEYS if each.path.startswith("more_models[]")]
    names = ("", ".of", ".share", ".mirror", ".decide")
    assert own == [f"more_models[].candidate{name}" for name in names]


def test_units_follow_from_names() -> None:
    units = {each.path: each.unit for each in KEYS}
    assert units["engine.drain_timeout_s"] == units["engine.scheduler.measure_s"] == "seconds"
    assert (units["router.max_body_bytes"], units["engine.prefill.transfer_s_per_token"]) == (
        "bytes",
        "seconds per token",
    )
    assert (units["engine.kind"], units["router.max_body_bytes"]) == ("", "bytes")


def test_what_changes_live_of_schedulers_is_what_live_control_takes() -> None:
    live = {each.name for each in below(KEYS, "engine.scheduler") if each.is_live}
    assert live == SchedulerSection.live_keys() < SchedulerSettings.live_keys()


def test_targets_and_limits_change_live_and_what_is_deployed_does_not() -> None:
    live = {each.path for each in KEYS if each.is_live}
    assert {"classes", "classes.NAME.ttft_s", "default_class", "router.max_wait_s", "engine.credit_s"} <= live
    assert not {"classes.NAME.own_replicas", "engine.replicas", "router.silence_s", "order.policy", "model"} & live
    assert all(each.is_live for each in all_keys(KeyEntry))


def test_nothing_is_near_to_what_is_like_nothing() -> None:
    assert nearest(KEYS, "xyzzy") is None


def test_the_page_has_every_key_once() -> None:
    rows = [line.split("`")[1] for line in command.page().splitlines() if line.startswith("| `")]
    once = [each for each in KEYS if each.type != "section" and each.section != "engine.prefill.autoscaling"]
    assert sorted(rows) == sorted(each.path for each in [*once, *all_keys(KeyEntry)])
    assert "## engine.prefill.autoscaling\n\nAs `engine.autoscaling`.\n" in command.page()
