"""All values files of the chart, as tests render them."""

from pathlib import Path
from typing import Any

import yaml

from tests.k8s.engines import CHART, Values

FILES = sorted([*CHART.glob("ci/*.yaml"), *CHART.glob("examples/*.yaml")])
GOLDENS = Path(__file__).parent / "goldens"


def values_of(file: Path) -> Values:
    """With a fixed password where the chart would make a random one."""
    values: Values = yaml.safe_load(file.read_text())
    return with_password(values)


def with_password(values: Values) -> Values:
    redis = {"mode": "internal"} | values.get("redis", {})
    auth = redis.get("auth", {})
    if redis["mode"] != "internal" or auth.get("existingSecret"):
        return values
    return {**values, "redis": redis | {"auth": {"password": "not-a-secret"} | auth}}


def named(name: str) -> Values:
    """The values of ci/NAME-values.yaml or examples/NAME.yaml."""
    return values_of(next(file for file in FILES if file.stem.removesuffix("-values") == name))


def golden(file: Path) -> Path:
    return GOLDENS / f"{file.stem}.yaml"


def holds(arrived: Any, given: Any) -> bool:
    """Everything given is there, whatever else is; but for what says nothing, and is left out."""
    if isinstance(given, dict):
        said = {key: value for key, value in given.items() if value != {} and (key, value) != ("own_replicas", 0)}
        return all(key in arrived and holds(arrived[key], value) for key, value in said.items())
    if isinstance(given, list):
        return len(arrived) == len(given) and all(map(holds, arrived, given))
    return bool(arrived == given)
