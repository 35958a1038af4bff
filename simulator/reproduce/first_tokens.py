"""By how much the first token of a request misses what was predicted of it, by load and class.

    error = sum |true - predicted| / sum predicted        as of the live counters

Requests of the Azure conversation trace come to replicas of Llama-2-70B, half of them in a class that is promised its
first token soon. Loads run from nearly none to beyond capacity.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from policies.errors import InputError
from simulator.cluster import run
from simulator.predictors import predicted
from simulator.reproduce.common import Setting, table
from simulator.reproduce.scaling import TARGETS, served_by
from simulator.requests import Request
from simulator.workload import Workload, poisson

RATES = (0.5, 2.0, 4.0, 6.0, 8.0)  # requests a second
SECONDS = 300.0


class Found(NamedTuple):
    """Of one class, over its requests.

    Attributes:
        bias: mean true over mean predicted.
        mistaken: share of them that came on the other side of its promise than predicted.
        kept: share whose first token was in time.
    """

    error: float
    bias: float
    mistaken: float
    kept: float


def first_tokens(setting: Setting) -> list[str]:
    """Predicted against true first tokens, by load and class."""
    trace = setting.workload("azure_conv")
    jobs = [(rate, seed) for rate in RATES for seed in range(setting.runs)]
    found = dict(zip(jobs, setting.each(partial(measured, trace), jobs), strict=True))
    rows = []
    for rate in RATES:
        for slo_class in sorted(TARGETS):
            each = np.mean([found[rate, seed][slo_class] for seed in range(setting.runs)], axis=0)
            mean = Found(*each.tolist())
            rows.append((f"{rate:g}", slo_class, *(f"{share:.0%}" for share in mean)))
    return table(("requests/s", "class", "error", "true of predicted", "mistaken", "in time"), rows)


def measured(trace: Workload, job: tuple[float, int]) -> dict[str, Found]:
    """By class. Args: job: requests a second, and a seed."""
    rate, seed = job
    rng = np.random.default_rng(seed)
    count = round(rate * SECONDS)
    rows = np.roll(np.arange(len(trace)), -int(rng.integers(len(trace))))[:count]
    workload = trace.rows(rows).arriving(poisson(rate, count, rng))
    workload = replace(workload, slo_class=tuple(rng.choice(sorted(TARGETS), size=count).tolist()))
    config = served_by(None)
    config = replace(config, router=replace(config.router, foresees=True))
    served = run(config, predicted(workload, "noise:0.44", rng)).requests
    return {name: compared([each for each in served if each.slo_class == name]) for name in TARGETS}


def compared(requests: Sequence[Request]) -> Found:
    """Raises InputError: one of them has no first token, or none was predicted."""
    pairs = [(each.foreseen_ttft_s, each.ttft_s, each.promised_ttft_s) for each in requests]
    if not pairs or any(foreseen is None or true is None for foreseen, true, _ in pairs):
        raise InputError("each request needs a first token and what was predicted of it")
    foreseen, true, promised = np.array(pairs, dtype=float).T
    return Found(
        error=float(np.abs(true - foreseen).sum() / foreseen.sum()),
        bias=float(true.sum() / foreseen.sum()),
        mistaken=float(np.mean((true <= promised) != (foreseen <= promised))),
        kept=float(np.mean(true <= promised)),
    )
