"""Whole systems by name, and what is left of Sluice without one of its features.

`stock` is plain vLLM behind a plain balancer: first come, first served, most free slots, nothing held back; what an
engine refuses, by vLLM's own limits, is not tried at another.
`sluice` is every default: forecast admission, steps and queues by promises, exclusive or mixed by cost, the replica
whose first token comes soonest, and requests that wait in the router while replicas have enough to read. It is told
what is promised. Neither has bins: they only matter to gang batches.
`papers` is what the five papers describe, as `sluice serve --preset papers` has it but for buckets: rolling batches of
one bin, phases by 003's rules, batches by 001's two algorithms. `PAPERS_POOLS` is its pool that reads long prompts, for
`run_disaggregated`. `papers_literal` gives whole batches to an idle replica.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.router.credit import longest_promise_s
from policies.router.multi_bin import MultiBinConfig
from policies.router.prefill_decode import PrefillDecodeConfig
from simulator.cluster import ClusterConfig
from simulator.disaggregated import PoolsConfig
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.report import EVERY_CLASS, Target
from simulator.router import RouterConfig

SYSTEMS = ("stock", "sluice", "papers", "papers_literal")
PAPERS_BATCH_SIZE, PAPERS_ROLLING_SIZE = 32, 8
PAPERS_POOLS = PoolsConfig(split=PrefillDecodeConfig(mode="always", min_prompt_tokens=256))


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
        changes: fields of ClusterConfig besides; settings of the system's own batch policy lie over those it has.

    Raises:
        ConfigError: there is no such system, or it does not refuse by vLLM's limits as the engine is to do.
    """
    if name == "stock":
        defaults: dict[str, Any] = {
            "order": "fcfs",
            "placement": "most_credit",
            "router": RouterConfig(credit_lookahead=None),
        }
    elif name in SYSTEMS:
        if engine.refuses:
            raise ConfigError(
                "max_num_queued_reqs and max_num_queued_tokens are vLLM's own: use them with system stock"
            )
        engine = replace(engine, ordered=True)
        defaults = _told(targets or {}, profile)
        defaults |= {"batch": "auto"}
        if name.startswith("papers"):
            defaults |= _of_papers(defaults, literal=name == "papers_literal")
    else:
        raise ConfigError(f"unknown system {name!r}; there are {', '.join(SYSTEMS)}")
    if changes.get("batch") == defaults.get("batch"):
        changes["batch_settings"] = defaults.get("batch_settings", {}) | changes.get("batch_settings", {})
    return ClusterConfig(
        times=profile.times, clock=profile.clock, engine=engine, replicas=replicas, **(defaults | changes)
    )


def _told(targets: Mapping[str, Target], profile: EngineProfile) -> dict[str, Any]:
    """Engine and router as the live system sets them up for what is promised."""
    names = tuple(sorted(targets.keys() - {EVERY_CLASS}))
    credit_s = longest_promise_s(min(target.ttft_s, target.e2e_s) for target in targets.values())
    return {
        # A live engine measures them when it starts.
        "batch_settings": {"classes": len(names) + 1, "step_times": profile.times},
        "router": RouterConfig(credit_s=credit_s, class_names=names),
        "promises": {name: target.promise() for name, target in targets.items()},
    }


def _of_papers(told: Mapping[str, Any], *, literal: bool) -> dict[str, Any]:
    """What is otherwise than by default, as deployments/configs/papers.yaml has it."""
    size = PAPERS_BATCH_SIZE if literal else PAPERS_ROLLING_SIZE
    router = replace(told["router"], rolling_size=size)
    if literal:
        batches = GangConfig(batch_size=size, max_wait_s=0.5)
        router = RouterConfig(class_names=told["router"].class_names, batches=batches)
    rules = {
        "phase_rule": "threshold",
        "mode_rule": "crossover",
        "bounds_exclusive": True,
        "memory": "linear",
        "sla": "search",
    }
    return {
        "bins": MultiBinConfig(bins=4, rule="optimal", batch_size=size),
        "router": router,
        "batch_settings": {**told["batch_settings"], "papers": rules},
    }


def _batch(**settings: Any) -> Callable[[ClusterConfig], ClusterConfig]:
    return lambda config: replace(config, batch_settings={**config.batch_settings, **settings})


def _in_order_of_arrival(config: ClusterConfig) -> ClusterConfig:
    return replace(config, order="fcfs", engine=replace(config.engine, ordered=False))


# What takes each feature out.
FEATURES: Mapping[str, Callable[[ClusterConfig], ClusterConfig]] = {
    "forecast admission": _batch(admission="slots"),
    "promises": lambda config: replace(config, promises={}),
    "phases by cost": _batch(mode="mixed"),
    "order by deadline": _in_order_of_arrival,
    "placement by first token": lambda config: replace(config, placement="most_credit"),
    "queue in the router": lambda config: replace(
        config, router=replace(config.router, credit_lookahead=None, credit_s=None)
    ),
}


TIER = "further KV cache"
"""Of engines that have one; a feature of vLLM, and stock has it as well."""


def without(feature: str, config: ClusterConfig) -> ClusterConfig:
    """Sluice with one feature as stock has it, or without `TIER`.

    Raises:
        ConfigError: there is no such feature.
    """
    if feature == TIER:
        return replace(config, engine=replace(config.engine, tier=None))
    if feature not in FEATURES:
        raise ConfigError(f"unknown feature {feature!r}; there are {', '.join(FEATURES)}")
    return FEATURES[feature](config)
