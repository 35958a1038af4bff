"""What went into a simulation or a plan, for its report to say: a later reader has nothing else."""

import argparse
from collections.abc import Iterable, Mapping

import numpy as np

from policies.types import IntArray
from simulator.cluster import ClusterConfig
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile
from simulator.html_page import shown_number
from simulator.planner import PlanConfig
from simulator.report import EVERY_CLASS, Target
from simulator.tier import TierConfig
from simulator.workload import Workload

Group = dict[str, str]


def traffic(options: argparse.Namespace, workload: Workload) -> Group:
    drawn = {} if options.trace else {"drawn by": f"prompts {options.prompts}, answers {options.outputs}"}
    rate = workload.rate
    return {
        "requests": f"{len(workload):,} of {options.trace or workload.name}",
        **drawn,
        **({"its file": "; ".join(options.told)} if options.trace and options.told else {}),
        "arrivals": _arrivals(options),
        "rate": "all at once" if rate is None else f"{shown_number(rate)} requests/s",
        "prompt": _lengths(workload.prompt_tokens),
        "answer": _lengths(workload.output_tokens),
        "predicted by": options.predictor,
        "prefixes": "none" if options.no_prefix_reuse or not _has_prefixes(workload) else "as in the trace",
        "seed": str(options.seed),
    }


def _arrivals(options: argparse.Namespace) -> str:
    speed = "" if options.speed == 1 else f", {options.speed:g} times as fast"
    return f"{options.arrivals}{speed}"


def _has_prefixes(workload: Workload) -> bool:
    return workload.session is not None or bool(workload.cached_tokens.any())


def _lengths(tokens: IntArray) -> str:
    half, most = np.percentile(tokens, (50, 99))
    return f"{tokens.mean():,.0f} tokens on the mean, half of them up to {half:,.0f}, 99 % up to {most:,.0f}"


def promises(targets: Mapping[str, Target], *, told: bool) -> Group:
    """By class."""
    of_classes = {
        "all other classes" if name == EVERY_CLASS and len(targets) > 1 else "all" if name == EVERY_CLASS else name: (
            f"first token within {target.ttft_s:g} s, then {target.tpot_s:g} s a token"
        )
        for name, target in sorted(targets.items())
    }
    return {**of_classes, "told to Sluice": "yes" if told else "no, it is only judged by them"}


def engine(profile: EngineProfile, config: EngineConfig, price: float | None = None) -> Group:
    return {
        "GPUs a replica": str(profile.gpus),
        **({} if price is None else {"price a replica": f"{price:g}"}),
        "KV cache": f"{config.total_blocks * config.block_size:,} tokens",
        **({} if config.tier is None else {"further KV cache": _tier(config.tier)}),
        "slots": f"{config.slots:,}",
        "tokens a step": f"{config.max_batch_tokens:,}",
        **({"kept free": f"{config.watermark:.1%} of the cache"} if config.watermark else {}),
    }


def _tier(tier: TierConfig) -> str:
    speed = f", {1.0 / tier.token_s:,.0f} of them loaded in a second" if tier.token_s else ""
    return f"{tier.tokens:,} tokens beyond the GPU{speed}"


def served(options: argparse.Namespace, config: ClusterConfig) -> Group:
    """How it is served."""
    given = {
        "clients": options.clients,
        "prefill replicas": options.prefill_replicas,
        "most requests in an engine": options.max_num_queued_reqs,
        "most queued prompt tokens": options.max_num_queued_tokens,
        "takes what is idle": ", ".join(options.fills_idle) or None,
    }
    return {
        "system": options.system,
        "replicas": str(config.replicas),
        "batch": config.batch,
        "order": config.order or "by promises",
        "placement": config.placement,
        **{name: str(value) for name, value in given.items() if value is not None},
    }


def planned(config: PlanConfig) -> Group:
    """What a plan tries, and when that is good enough."""
    return {
        "systems": _listed(config.systems),
        "replicas": _listed(map(str, config.replicas)),
        "load": _listed(f"×{load:g}" for load in config.loads),
        "good enough": f"{config.attainment:.1%} of every class in time",
        "tries": "everything" if config.everything else "nothing dearer than the answer",
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
