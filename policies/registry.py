"""Every policy that is chosen by name: kind -> (config class, policy class).

A policy without settings has no config class. ``build`` takes the settings as keywords; a config field that is itself a
config takes one, or its settings. ``build_of`` takes a class of the user's own as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from typing import Any, get_type_hints

from policies.engine.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.stock import Stock
from policies.errors import ConfigError
from policies.papers.auto_literal import AutoLiteralConfig, auto
from policies.papers.chunk_size import ChunkSize, ChunkSizeConfig
from policies.papers.exclusive_mixed_literal import ExclusiveMixedLiteral, ExclusiveMixedLiteralConfig
from policies.papers.memory_aware import MemoryAware, MemoryAwareConfig
from policies.papers.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.papers.sla_constrained_literal import SlaConstrainedLiteral, SlaConstrainedLiteralConfig
from policies.plug_ins import CheckedBatchPolicy, CheckedOrder
from policies.router.order import (
    FCFS,
    LJF,
    SJF,
)


class Family(Enum):
    """What a policy decides."""

    BATCH = "batch"
    ORDER = "order"


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered policy; ``config`` is None where it takes no settings."""

    family: Family
    config: type[Any] | None
    policy: Callable[..., Any]


REGISTRY: dict[str, Entry] = {
    "auto": Entry(Family.BATCH, AutoLiteralConfig, auto),
    "stock": Entry(Family.BATCH, None, Stock),
    "memory_aware": Entry(Family.BATCH, MemoryAwareConfig, MemoryAware),
    "sla_constrained": Entry(Family.BATCH, SlaConstrainedConfig, SlaConstrained),
    "sla_constrained_literal": Entry(Family.BATCH, SlaConstrainedLiteralConfig, SlaConstrainedLiteral),
    "chunk_size": Entry(Family.BATCH, ChunkSizeConfig, ChunkSize),
    "forecast_admission": Entry(Family.BATCH, ForecastAdmissionConfig, ForecastAdmission),
    "exclusive_mixed": Entry(Family.BATCH, ExclusiveMixedConfig, ExclusiveMixed),
    "exclusive_mixed_literal": Entry(Family.BATCH, ExclusiveMixedLiteralConfig, ExclusiveMixedLiteral),
    "fcfs": Entry(Family.ORDER, None, FCFS),
    "sjf": Entry(Family.ORDER, None, SJF),
    "ljf": Entry(Family.ORDER, None, LJF),
}


def kinds(family: Family) -> tuple[str, ...]:
    """The names in one family, in the order of the registry."""
    return tuple(kind for kind, entry in REGISTRY.items() if entry.family is family)


_OWN = {Family.BATCH: CheckedBatchPolicy, Family.ORDER: CheckedOrder}


def build_of(family: Family, name: str, settings: Mapping[str, Any]) -> Any:
    """A new policy of that family, by a kind of the registry or as ``package.module:Class``.

    Raises:
        ConfigError: there is no such policy, or it refuses the settings.
    """
    if ":" in name:
        return _OWN[family](name, settings)
    if name not in kinds(family):
        known = ", ".join((*kinds(family), "or a class of your own as package.module:Class"))
        raise ConfigError(f"{family.value} policy must be one of {known}, got {name!r}")
    return build(name, **settings)


def build(kind: str, /, **params: Any) -> Any:
    """A new policy of that kind.

    Raises:
        ConfigError: the kind is unknown, a setting is unknown or missing, or one is out of bounds.
    """
    entry = REGISTRY.get(kind)
    if entry is None:
        raise ConfigError(f"unknown policy kind {kind!r}; known kinds: {', '.join(sorted(REGISTRY))}")
    if entry.config is None:
        if params:
            raise ConfigError(f"policy {kind!r} takes no settings, got {', '.join(sorted(params))}")
        return entry.policy()
    types = get_type_hints(entry.config)
    try:
        made = {
            name: types[name](**value) if _is_nested(types.get(name), value) else value
            for name, value in params.items()
        }
        config = entry.config(**made)
    except TypeError as error:
        raise ConfigError(f"policy {kind!r}: {error}") from error
    return entry.policy(config)


def _is_nested(kind: Any, value: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping)
