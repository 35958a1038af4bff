"""Configuration as it is written: what PyYAML merges or turns into something else is seen."""

import pytest

from deployments.config.yaml_text import load_yaml
from policies.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model: a\nrouter:\n  replicas: 1\nmodel: b\n", "line 4 repeats a name of line 1: 'model'"),
        ("engine: {replicas: 1, replicas: 2}\n", "line 1 repeats a name of line 1: 'replicas'"),
        ("- {name: a}\n- sha256: x\n  sha256: y\n", "line 3 repeats a name of line 2: 'sha256'"),
        ("a: [1, 2\nb: 3\n", "line 2 is not YAML"),
        ("a: 1\n--- \nb: 2\n", "line 2 is not YAML"),
        ("a: !!python/object:os.system {}\n", "line 1 is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("a: 1\nb: [x, 2026-02-30]\n", "line 2 is not YAML: what looks like timestamp is none, put it in quotes"),
        ("a: 1\n2026-13-01: b\n", "line 2 is not YAML: what looks like timestamp"),
        ("a: !!int x\n", "line 1 is not YAML: what looks like int"),
        ("a: !!bool maybe\n", "line 1 is not YAML: what looks like bool"),
        ("a: !!timestamp never\n", "line 1 is not YAML: what looks like timestamp"),
        (f"a: {'9' * 5000}\n", "line 1 is not YAML: what looks like int"),
    ],
)
def test_what_stands_there_twice_or_is_no_yaml_is_named_with_its_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_yaml(text)


def test_numbers_are_what_they_look_like() -> None:
    text = "[1, -2, 0x10, 1_000, 1.5, .5, 1.0e-3, .inf, 1:30, 012, 1:30.5]"
    assert load_yaml(text) == [1, -2, 16, 1000, 1.5, 0.5, 1e-3, float("inf"), "1:30", "012", "1:30.5"]


def test_a_name_may_replace_one_that_comes_from_elsewhere() -> None:
    text = "x: {base: &base {a: 1, b: 2}, more: &more {<<: *base, b: 3}}\ny: {<<: *more, a: 4}\n"
    assert load_yaml(text) == {"x": {"base": {"a": 1, "b": 2}, "more": {"a": 1, "b": 3}}, "y": {"a": 4, "b": 3}}


def test_nothing_is_nothing() -> None:
    assert load_yaml("") is None and load_yaml("# only this\n") is None
