"""Whole systems by name, and what is left of Sluice without one of its features.

`stock` is plain vLLM behind a plain balancer: no bins, first come, first served, most free slots, nothing held back.
`sluice` is every default: forecast admission, exclusive or mixed by cost, bins, virtual deadline, least work, and
requests that wait in the router until a slot is free.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies.errors import ConfigError
from policies.multi_bin import MultiBinConfig
from simulator.cluster import ClusterConfig
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.router import RouterConfig

BINS = 4
SYSTEMS = ("stock", "sluice")
FEATURES = (
    "forecast admission",
    "phases by cost",
    "bins",
    "virtual deadline",
    "placement by work",
    "queue in the router",
)


def system(name: str, profile: EngineProfile, engine: EngineConfig, replicas: int, **changes: Any) -> ClusterConfig:
    """A named system on that engine.

    Args:
        changes: fields of ClusterConfig besides.

    Raises:
        ConfigError: there is no such system.
    """
    if name == "stock":
        defaults: dict[str, Any] = {"placement": "most_credit", "router": RouterConfig(credit_lookahead=None)}
    elif name == "sluice":
        defaults = {
            "batch": "auto",
            "batch_settings": {"classes": BINS},
            "order": "virtual_deadline",
            "bins": MultiBinConfig(bins=BINS, rule="equal_mass"),
            "router": RouterConfig(classes=BINS),
        }
    else:
        raise ConfigError(f"unknown system {name!r}; there are {', '.join(SYSTEMS)}")
    return ClusterConfig(
        times=profile.times, clock=profile.clock, engine=engine, replicas=replicas, **(defaults | changes)
    )


def without(feature: str, config: ClusterConfig) -> ClusterConfig:
    """Sluice with one feature as stock has it."""
    settings: Mapping[str, Any] = config.batch_settings
    match feature:
        case "forecast admission":
            return replace(config, batch="exclusive_mixed", batch_settings={})
        case "phases by cost":
            return replace(config, batch_settings={**settings, "mode": "mixed"})
        case "bins":
            router = replace(config.router, classes=1)
            return replace(config, bins=None, router=router, batch_settings={**settings, "classes": 1})
        case "virtual deadline":
            return replace(config, order="fcfs", order_settings={})
        case "placement by work":
            return replace(config, placement="most_credit")
        case "queue in the router":
            return replace(config, router=replace(config.router, credit_lookahead=None))
    raise ConfigError(f"unknown feature {feature!r}; there are {', '.join(FEATURES)}")
