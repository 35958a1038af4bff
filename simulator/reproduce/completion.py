"""Whole answers by a time: the share of all requests whose last token comes in time, for plain vLLM and for Sluice.

Agents, tool calls, extraction and every client that does not stream wait for the whole answer. Here alone a promise
depends on how long answers will be, so Sluice is shown without predictions, with those of a predictor that errs, and
with true lengths. vLLM's best refusals are found by a grid for every load, with hindsight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.random import Generator

from policies.types import IntArray
from simulator.cluster import run
from simulator.engines import engine_profile
from simulator.predictors import predicted
from simulator.report import Target
from simulator.reproduce.common import Setting, table
from simulator.reproduce.goodput import ENGINE, STOCK, Load, Served, Variant, compared, draw, law_table
from simulator.workload import Workload, gamma_bursts, length_law

TARGETS = {"chat": Target(e2e_s=8.0), "tool": Target(e2e_s=5.0), "document": Target(e2e_s=30.0)}
REQUESTS = 1500
LOADS = (0.8, 1.0, 1.5, 2.5)  # of capacity
SERVED = Served(
    profile=replace(engine_profile(ENGINE), cache_tokens=432_000),
    targets=TARGETS,
    caps=tuple(product((512, 2048, 8192), (2500, 5000, 10_000, 20_000, 40_000))),
)
WITHOUT_PREDICTIONS = "Sluice, no predictions"
VARIANTS = {
    "stock": STOCK,
    WITHOUT_PREDICTIONS: Variant(predictor="none"),
    "Sluice": Variant(),
    "Sluice, lengths known": Variant(predictor="oracle"),
}
_DIFFERENCES = (("Sluice", "stock"), ("Sluice", WITHOUT_PREDICTIONS))
_CV = 2.0  # of the gaps between arrivals
# Lengths far beyond these are fewer than one in a thousand, and none is empty.
_PROMPT_TOKENS, _OUTPUT_TOKENS = (8, 16_000), (1, 6000)
# What is shown apart, of the answers' lengths: "the shorter half" and "the longest tenth".
_SHORTER, _LONGEST = 0.5, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one class, by laws.

    Attributes:
        share: of all requests.
    """

    slo_class: str
    share: float
    prompt: str
    output: str

    def lengths(self, count: int, rng: Generator) -> tuple[IntArray, IntArray]:
        """Tokens of prompts and answers, each of shape (count,)."""
        prompts, outputs = (
            np.clip(np.rint(length_law(law)(rng, count)), *bounds).astype(np.int64)
            for law, bounds in ((self.prompt, _PROMPT_TOKENS), (self.output, _OUTPUT_TOKENS))
        )
        return prompts, outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Attributes:
    capacity: requests per second that plain vLLM ends where 2 500 wait from the first second.
    """

    capacity: float
    kinds: Sequence[Kind]

    def drawn(self, rate: float, count: int, rng: Generator) -> Workload:
        kinds = rng.choice(len(self.kinds), size=count, p=[kind.share for kind in self.kinds])
        prompts, outputs = np.ones(count, np.int64), np.ones(count, np.int64)
        for index, kind in enumerate(self.kinds):
            mine = np.flatnonzero(kinds == index)
            prompts[mine], outputs[mine] = kind.lengths(len(mine), rng)
        classes = [self.kinds[index].slo_class for index in kinds]
        return Workload.of(f"{rate:g}/s", gamma_bursts(rate, _CV, count, rng), prompts, outputs, slo_class=classes)


_CHAT = Kind(slo_class="chat", share=1.0, prompt="lognormal:400:1", output="lognormal:250:1")
_CALL = Kind(slo_class="tool", share=0.88, prompt="lognormal:900:0.6", output="lognormal:45:0.8")
_DOCUMENT = Kind(slo_class="document", share=0.4, prompt="lognormal:4000:0.6", output="lognormal:350:0.8")
TRAFFIC = {
    "chat": Traffic(capacity=43.7, kinds=[_CHAT]),
    "agents": Traffic(capacity=36.1, kinds=[_CALL, replace(_CALL, share=0.12, output="lognormal:900:0.6")]),
    "mix": Traffic(capacity=12.7, kinds=[replace(_CHAT, share=0.6), _DOCUMENT]),
}


def completion(setting: Setting) -> list[str]:
    """Share of whole answers in time against load: stock, stock with its best refusals, Sluice by what it predicts."""
    points = {name: {load: f"{name} x {load:g}" for load in LOADS} for name in TRAFFIC}
    loads = {label: _load(name, load) for name, labels in points.items() for load, label in labels.items()}
    found = compared(setting, SERVED, loads, VARIANTS)
    draw(setting, "completion", points, found, VARIANTS, x="of capacity")
    return law_table(found, VARIANTS, _DIFFERENCES)


def by_length(setting: Setting) -> list[str]:
    """Who misses beyond capacity: shares of whole answers in time, of the shorter half and of the longest tenth."""
    loads = {f"{name} x {load:g}": _load(name, load) for name in TRAFFIC for load in LOADS if load > 1.0}
    shares = setting.grid(_shares_by_length, list(loads.values()), list(VARIANTS.values())).mean(axis=2)
    rows = [(name, *map(float, row.T.flatten())) for name, row in zip(loads, shares, strict=True)]
    parts = ("shorter half", "longest tenth")
    return table(("load", *(f"{part}: {name}" for part in parts for name in VARIANTS)), rows)


def _load(name: str, load: float) -> Load:
    return partial(_of_law, TRAFFIC[name], load)


def _of_law(traffic: Traffic, load: float, seed: int, replicas: int) -> Workload:
    return traffic.drawn(traffic.capacity * load * replicas, REQUESTS * replicas, np.random.default_rng(seed))


def _shares_by_length(job: tuple[Load, Variant, int]) -> tuple[float, float]:
    load, variant, seed = job
    workload = predicted(load(seed, variant.replicas), variant.predictor, np.random.default_rng(seed))
    served = run(variant.config(SERVED), workload)
    requests = served.requests + served.refused
    output_tokens = np.array([request.output_tokens for request in requests])
    met = np.array([TARGETS[request.slo_class or ""].met(request) for request in requests])
    half, tenth = np.quantile(output_tokens, (_SHORTER, _LONGEST))
    return float(met[output_tokens <= half].mean()), float(met[output_tokens > tenth].mean())
