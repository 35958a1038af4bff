"""Whole systems by name, and what is left of Sluice without one of its features.

`stock` is plain vLLM behind a plain balancer: first come, first served, most free slots, nothing held back; what an
engine refuses, by vLLM's own limits, is not tried at another.
`sluice` is every default: forecast admission, exclusive or mixed by cost, virtual deadline in router and engines, least
work, and requests that wait in the router until a replica would let them run. It is told what is promised. Neither has
bins: they only matter to gang batches.
"""

from collections.abc import Callable, Mapping
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
        ConfigError: there is no such system, or it does not refuse by vLLM's limits as the engine is to do.
    """
    if name == "stock":
        defaults: dict[str, Any] = {"placement": "most_credit", "router": RouterConfig(credit_lookahead=None)}
    elif name == "sluice":
        if engine.refuses:
            raise ConfigError(
                "max_num_queued_reqs and max_num_queued_tokens are vLLM's own: use them with system stock"
            )
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


def _batch(**settings: Any) -> Callable[[ClusterConfig], ClusterConfig]:
    return lambda config: replace(config, batch_settings={**config.batch_settings, **settings})


def _in_order_of_arrival(config: ClusterConfig) -> ClusterConfig:
    return replace(config, order="fcfs", order_settings={}, engine=replace(config.engine, ordered=False))


# What takes each feature out.
FEATURES: Mapping[str, Callable[[ClusterConfig], ClusterConfig]] = {
    "forecast admission": _batch(admission="slots"),
    "latency targets": _batch(itl_targets_s=()),
    "phases by cost": _batch(mode="mixed"),
    "virtual deadline": _in_order_of_arrival,
    "placement by work": lambda config: replace(config, placement="most_credit"),
    "queue in the router": lambda config: replace(config, router=replace(config.router, credit_lookahead=None)),
}


def without(feature: str, config: ClusterConfig) -> ClusterConfig:
    """Sluice with one feature as stock has it.

    Raises:
        ConfigError: there is no such feature.
    """
    if feature not in FEATURES:
        raise ConfigError(f"unknown feature {feature!r}; there are {', '.join(FEATURES)}")
    return FEATURES[feature](config)
