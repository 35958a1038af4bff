"""`user_config` over `args`: what it changes, and what it may not."""

import re
from typing import Any

import msgspec
import pytest

from deployments.config.application import AppConfig
from deployments.config.live import EngineTerms, configured_as, with_live
from deployments.config.reference import Key, all_keys
from deployments.process.log_settings import LogSettings
from policies.errors import ConfigError

FIXED = "cannot change while engines serve; it belongs into args"


def config(**settings: Any) -> AppConfig:
    return AppConfig.model_validate({"model": "m", **settings})


def why_refused(base: AppConfig, user_config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        with_live(base, user_config)
    return str(caught.value)


def nested(path: str, value: Any) -> dict[str, Any]:
    *sections, name = path.replace("NAME", "standard").split(".")
    settings: dict[str, Any] = {name: value}
    for section in reversed(sections):
        settings = {section: settings}
    return settings


KEYS = [key for key in all_keys(AppConfig) if key.type != "section" and "[]" not in key.path]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_what_the_reference_calls_live_is_taken_and_all_else_is_refused_by_name(key: Key) -> None:
    """The value is wrong everywhere: of a live key that is what is said."""
    said = why_refused(config(engine={"prefill": {}}), nested(key.path, object()))
    found = re.search(rf"(\S+): {FIXED}", said)
    assert (found is None) == (key.is_live or key.path == "more_models"), said
    assert found is None or key.path.replace("NAME", "standard").startswith(found[1]), "itself, or a section of it"


def test_sections_merge_and_mappings_are_replaced_as_in_args() -> None:
    base = config(router={"max_wait_s": 5, "replicas": 3}, engine={"scheduler": {"mode": "mixed", "max_batch_size": 4}})
    changed = with_live(
        base,
        {
            "router": {"max_wait_s": 7},
            "engine": {"scheduler": {"max_batch_size": 8}},
            "classes": {"chat": {"ttft_s": 0.4}},
            "default_class": "chat",
        },
    )
    assert (changed.router.max_wait_s, changed.router.replicas) == (7, 3)
    assert (changed.engine.scheduler.mode, changed.engine.scheduler.max_batch_size) == ("mixed", 8)
    assert list(changed.classes) == ["chat"] and changed.default_class == "chat"
    assert with_live(base, None) == with_live(base, {}) == base, "nothing is left of the one before"


def test_further_models_are_changed_in_their_places() -> None:
    base = config(more_models=[{"model": "n", "engine": {"replicas": 2}}])
    changed = with_live(base, {"more_models": [{"engine": {"scheduler": {"mode": "exclusive"}}}]})
    first, second = changed.each_model()
    assert (first.engine.scheduler.mode, second.engine.scheduler.mode) == ("auto", "exclusive")
    assert second.engine.replicas == 2
    assert "each of the 1 of args" in why_refused(base, {"more_models": []})
    assert f"more_models[0].engine.replicas: {FIXED}" in why_refused(
        base, {"more_models": [{"engine": {"replicas": 3}}]}
    )


def test_how_much_a_candidate_gets_changes_live_and_what_it_may_succeed_does_not() -> None:
    base = config(more_models=[{"model": "n", "candidate": {"of": "m"}}, {"model": "o"}])
    more = {"share": 0.3, "mirror": True, "decide": "promote"}
    changed = with_live(base, {"more_models": [{"candidate": more}, {}]}).more_models[0].candidate
    assert changed is not None and changed.model_dump() == {"of": "m", **more}
    for refused, place in ((({"candidate": {"of": "o"}}, {}), "[0].candidate.of"), (({}, {"candidate": {}}), "[1]")):
        assert f"more_models{place}" in why_refused(base, {"more_models": list(refused)})
    for share in (1.5, "much"):
        assert "share" in why_refused(base, {"more_models": [{"candidate": {"share": share}}, {}]})


def test_engines_are_not_restarted_for_what_is_said_of_a_candidate() -> None:
    plain = config(more_models=[{"model": "n"}]).each_model()
    asked = config(more_models=[{"model": "n", "candidate": {"of": "m", "share": 0.5}}]).each_model()
    assert [configured_as(each) for each in plain] == [configured_as(each) for each in asked]


@pytest.mark.parametrize(
    ("user_config", "said"),
    [
        ({"clases": {}}, "clases: there is no such key; did you mean classes?"),
        ({"router": {"max_wait_s": "10m"}}, "router.max_wait_s: must be a number above 0, in seconds"),
        ({"default_class": "gold"}, "default_class 'gold' is not one of classes"),
        ({"classes": {"gold": {}}}, "default_class 'standard' is not one of classes"),
        ({"classes": None}, "classes: must be a mapping"),
        ({"engine": {"scheduler": {"mode": "fast"}}}, "engine.scheduler.mode: must be one of"),
        ({"order": {"policy_args": {"weight": 2}}}, "policy_args are settings of policy, and there is none"),
        (["classes"], "must be a mapping of settings, got list"),
    ],
)
def test_it_is_checked_as_the_whole_configuration_is(user_config: Any, said: str) -> None:
    message = why_refused(config(), user_config)
    assert said in message and message.startswith("user_config of Router: ")


def test_every_key_that_cannot_change_is_named_at_once() -> None:
    said = why_refused(
        config(), {"model": "n", "router": {"silence_s": 30, "max_wait_s": 3}, "engine": {"replicas": 2}}
    )
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        "model",
        "router.silence_s",
        "engine.replicas",
    ]


def test_what_serves_one_class_alone_goes_on_under_it() -> None:
    base = config(classes={"gold": {"own_replicas": 2}, "standard": {}}, service_tiers={})
    changed = with_live(base, {"classes": {"gold": {}, "standard": {}, "new": {}}})
    assert {name: each.own_replicas for name, each in changed.classes.items()} == {"gold": 2, "standard": 0, "new": 0}
    assert "gold has own_replicas by args" in why_refused(base, {"classes": {"standard": {}}})
    wrong = {"classes": {"gold": {"own_replicas": 3}, "standard": {}}}
    assert f"classes.gold.own_replicas: {FIXED}" in why_refused(base, wrong)


def test_engines_that_began_as_stock_have_no_plug_in_to_turn_on() -> None:
    base = config(engine={"scheduler": {"mode": "stock"}})
    assert "have not loaded the plug-in" in why_refused(base, {"engine": {"scheduler": {"mode": "mixed"}}})
    began = config()
    changed = with_live(began, {"engine": {"scheduler": {"mode": "stock"}}})
    terms = EngineTerms.of(began, changed, "decode")
    assert terms.scheduler is not None and terms.scheduler["mode"] == "stock", "but they can turn it off"


def test_engines_follow_classes_and_their_targets() -> None:
    base = config(engine={"prefill": {}})
    changed = with_live(
        base,
        {
            "classes": {"chat": {"ttft_s": 0.25}, "idle": {"ttft_s": 0.1, "fills_idle": True}},
            "default_class": "chat",
            "router": {"max_wait_s": 9},
        },
    )
    decode, prefill = (EngineTerms.of(base, changed, role) for role in ("decode", "prefill"))
    assert decode.scheduler is not None and prefill.scheduler is not None
    assert decode.scheduler["classes"] == prefill.scheduler["classes"] == ["chat", "idle"]
    assert (decode.scheduler["mode"], prefill.scheduler["mode"]) == ("auto", "mixed")
    assert (decode.credit_s, prefill.credit_s, decode.max_wait_s) == (changed.credit_s, None, 9)
    assert decode.credit_s is not None and base.credit_s is not None and decode.credit_s < base.credit_s
    assert "policy" not in decode.scheduler, "nothing that engines would refuse"


def test_engines_follow_how_their_model_is_to_log() -> None:
    base = config(logs={"to": "stdout"})
    terms = EngineTerms.of(base, with_live(base, {"logs": {"level": "DEBUG", "format": "human"}}), "decode")
    assert terms.logs == LogSettings(to="stdout", level="DEBUG", format="human")
    assert msgspec.json.decode(msgspec.json.encode(terms), type=EngineTerms) == terms, "as it travels"


def test_replicas_of_other_args_follow_other_settings() -> None:
    assert configured_as(config()) == configured_as(config())
    assert configured_as(config()) != configured_as(config(router={"max_wait_s": 9}))
