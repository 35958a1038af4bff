"""Every policy is found under its name, and whatever is wrong with a request for one is said."""

import pytest

from policies.engine.exclusive import ExclusiveMixed
from policies.engine.step_time import StepTimeConfig
from policies.errors import ConfigError
from policies.registry import REGISTRY, Entry, Family, build, kinds
from policies.types import BatchPolicy

REQUIRED: dict[str, dict[str, object]] = {
    "auto": {},
    "sla_constrained": {"itl_target_s": 0.05},
    "sla_constrained_literal": {"itl_target_s": 0.05},
    "chunk_size": {"itl_target_s": 0.05},
}


@pytest.mark.parametrize("kind", list(REGISTRY))
def test_every_kind_is_built_with_its_required_settings_alone(kind: str) -> None:
    policy = build(kind, **REQUIRED.get(kind, {}))
    assert hasattr(policy, "config") == (REGISTRY[kind].config is not None)


def test_settings_reach_the_config() -> None:
    policy = build("exclusive_mixed", mode="exclusive", step_times=StepTimeConfig(min_steps=3))
    assert isinstance(policy, ExclusiveMixed)
    assert policy.config.mode == "exclusive"
    assert policy.config.step_times.min_steps == 3


def test_an_unknown_kind_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fastest'.*exclusive_mixed.*sjf"):
        build("fastest")


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("memory_aware", {"overflow": 0.1}, "memory_aware.*overflow"),
        ("sla_constrained", {}, "sla_constrained.*itl_target_s"),
        ("sla_constrained", {"itl_target_s": None}, "itl_target_s must be set"),
        ("memory_aware", {"window": None}, "window must be set"),
        ("memory_aware", {"overflow_probability": 2.0}, "overflow_probability"),
        ("memory_aware", {"window": "many"}, "memory_aware"),
        ("fcfs", {"weight": 1}, "fcfs.*no settings.*weight"),
    ],
)
def test_wrong_settings_are_named(kind: str, params: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(kind, **params)


def test_families_partition_the_registry() -> None:
    listed = [kind for family in Family for kind in kinds(family)]
    assert sorted(listed) == sorted(REGISTRY)


def test_two_policies_of_a_kind_share_nothing() -> None:
    first, second = build("sla_constrained", itl_target_s=0.05), build("sla_constrained", itl_target_s=0.05)
    assert first is not second


def test_an_entry_says_what_it_decides() -> None:
    assert REGISTRY["auto"] == Entry(Family.BATCH, REGISTRY["auto"].config, REGISTRY["auto"].policy)
    policy: BatchPolicy = build("stock")
    assert callable(policy.plan)
