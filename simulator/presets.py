"""Whole systems by name, and what is left of Sluice without one of its features.

`stock` is plain vLLM behind a plain balancer: first come, first served, most free slots, nothing held back.
`sluice` is every default: forecast admission, exclusive or mixed by cost, virtual deadline in router and engines, least
work, and requests that wait in the router until a replica would let them run. It is told what is promised. Neither has
bins: they only matter to gang batches.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import isinf
from typing import Any

from policies.errors import ConfigError
from simulator.cluster import ClusterConfig
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.report import EVERY_CLASS, Target
from simulator.router import RouterConfig

NO_HURRY_S = 3600.0  # what the order takes for a class that was promised no first token in time
SYSTEMS = ("stock", "sluice")
FEATURES = (
    "forecast admission",
    "latency targets",
    "phases by cost",
    "virtual deadline",
    "placement by work",
    "queue in the router",
)


def system(
    name: str,
    profile: EngineProfile,
    engine: EngineConfig,
    replicas: int,
    targets: Mapping[str, Target] | None = None,
    **changes: Any,
) -> ClusterConfig:
    """A named system on that engine.

    Args:
        targets: what Sluice is told that each class was promised, by name; "*" for every one not named.
        changes: fields of ClusterConfig besides.

    Raises:
        ConfigError: there is no such system.
    """
    if name == "stock":
        defaults: dict[str, Any] = {"placement": "most_credit", "router": RouterConfig(credit_lookahead=None)}
    elif name == "sluice":
        engine = replace(engine, ordered=True)
        defaults = _told(targets or {}) | {"batch": "auto", "order": "virtual_deadline"}
    else:
        raise ConfigError(f"unknown system {name!r}; there are {', '.join(SYSTEMS)}")
    return ClusterConfig(
        times=profile.times, clock=profile.clock, engine=engine, replicas=replicas, **(defaults | changes)
    )


def _told(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Order, batch and router as the live system sets them up for what is promised."""
    names = tuple(sorted(targets.keys() - {EVERY_CLASS}))
    each = [targets.get(name) for name in (EVERY_CLASS, *names)]
    order: dict[str, Any] = {"class_targets_s": {name: min(targets[name].ttft_s, NO_HURRY_S) for name in names}}
    if each[0] is not None:
        order["default_target_s"] = min(each[0].ttft_s, NO_HURRY_S)
    between_tokens = tuple(None if target is None or isinf(target.tpot_s) else target.tpot_s for target in each)
    return {
        "batch_settings": {"classes": len(each), "itl_targets_s": between_tokens},
        "order_settings": order,
        "router": RouterConfig(credit="admitted", class_names=names),
    }


def without(feature: str, config: ClusterConfig) -> ClusterConfig:
    """Sluice with one feature as stock has it."""
    settings: Mapping[str, Any] = config.batch_settings
    match feature:
        case "forecast admission":
            return replace(config, batch_settings={**settings, "admission": "slots"})
        case "latency targets":
            return replace(config, batch_settings={**settings, "itl_targets_s": ()})
        case "phases by cost":
            return replace(config, batch_settings={**settings, "mode": "mixed"})
        case "virtual deadline":
            engine = replace(config.engine, ordered=False)
            return replace(config, order="fcfs", order_settings={}, engine=engine)
        case "placement by work":
            return replace(config, placement="most_credit")
        case "queue in the router":
            return replace(config, router=replace(config.router, credit_lookahead=None))
    raise ConfigError(f"unknown feature {feature!r}; there are {', '.join(FEATURES)}")
