"""Goodput: the share of all requests that are in time, against load, for plain vLLM and for Sluice.

A request in time keeps the targets of TARGETS: the first token within ttft_s, the mean time per token within tpot_s.
What is refused is not in time. vLLM's best refusals are found by a grid for every load, with hindsight.

Loads come from laws, and from files in the folder of --data, if there is one: every CSV whose classes are those of
TARGETS. A file reference.json beside them, {file: {"stock8192": share, "best_cap": [share, ...], "moore_hodgson":
share}}, holds what another simulator found, and is set against ours.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from simulator import plots
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile, engine_profile
from simulator.predictors import predicted
from simulator.presets import FEATURES, system, without
from simulator.report import Target, attainment
from simulator.reproduce.common import Setting, mean, table
from simulator.traces import read_workload
from simulator.workload import Workload, gamma_bursts, length_law, synthetic

ENGINE = "Llama-3.1-8B@h100_sxm"
TARGETS = {"interactive": Target(ttft_s=0.5, tpot_s=0.03), "standard": Target(ttft_s=5.0, tpot_s=0.1)}
RUNS = 5
REQUESTS = 1500
_FILE_COLUMNS = {"arrival_s", "prompt_tokens", "output_tokens", "slo_class"}
# Far below 1 % of the requests, and the studied models' contexts hold it.
_MAX_PROMPT_TOKENS = 16_000
_LONG_PROMPT_TOKENS = 100_000
# As the stock of reference.json. vLLM's default is 0; with a full cache it preempts then, and fewer are in time.
_WATERMARK = 0.01
# Our stock and the reference's may differ by so much: fifteen requests of 1500.
_AGREEMENT = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests of one or two classes by laws.

    Attributes:
        lengths: laws of prompt and answer by class; classes come equally often.
        cv: coefficient of variation of the gaps between arrivals.
        rates: requests per second to try.
    """

    lengths: Mapping[str, tuple[str, str]]
    cv: float
    rates: Sequence[float] = ()

    def drawn(self, rate: float, count: int, rng: Generator) -> Workload:
        labels = rng.choice(sorted(self.lengths), size=count)
        prompts, outputs = np.ones(count, np.int64), np.ones(count, np.int64)
        for name, laws in self.lengths.items():
            mine = np.flatnonzero(labels == name)
            made = synthetic(name, length_law(laws[0]), length_law(laws[1]), len(mine), rng)
            prompts[mine] = np.minimum(made.prompt_tokens, _MAX_PROMPT_TOKENS)
            outputs[mine] = made.output_tokens
        arrivals = gamma_bursts(rate, self.cv, count, rng)
        return Workload.of(f"{rate:g}/s", arrivals, prompts, outputs, slo_class=labels.tolist())


_CHAT = ("lognormal:400:1", "lognormal:250:0.8")
_DOCUMENTS = ("lognormal:4000:0.6", "lognormal:250:0.6")
TRAFFIC = {
    "mix": Traffic(lengths={"interactive": _CHAT, "standard": _DOCUMENTS}, cv=2.0, rates=(6, 8, 10, 12, 15, 20)),
    "chat": Traffic(lengths={"interactive": _CHAT}, cv=3.0, rates=(20, 30, 40, 50, 60, 70)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A system to compare.

    Attributes:
        system: by its name in `simulator.presets`; told the targets, if it is Sluice.
        predictor: where its length predictions come from (`simulator.predictors`).
        engine: fields of `EngineConfig` besides slots and cache.
        without: a feature of `simulator.presets.FEATURES` that is taken out.
        replicas: under as many times the rate.
    """

    system: str = "sluice"
    predictor: str = "noise:0.44"
    engine: Mapping[str, Any] = field(default_factory=dict)
    without: str | None = None
    replicas: int = 1

    def config(self) -> ClusterConfig:
        profile = _profile()
        sizes = EngineConfig(total_blocks=(profile.cache_tokens or 0) // 16, **self.engine)
        config = system(self.system, profile, sizes, self.replicas, TARGETS)
        return without(self.without, config) if self.without else config


STOCK = Variant(system="stock", predictor="none", engine={"watermark": _WATERMARK})
# What is compared, by name; another row is another column of the tables and another line of the figure.
VARIANTS: Mapping[str, Variant] = {
    "stock": STOCK,
    "Sluice": Variant(),
    "Sluice, lengths known": Variant(predictor="oracle"),
    "Sluice, 4 replicas": Variant(replicas=4),
}
# vLLM's own refusals: tokens per step and most queued tokens.
CAPS: Mapping[tuple[int, int], Variant] = {
    (step, queued): replace(
        STOCK, engine={"watermark": _WATERMARK, "max_batch_tokens": step, "max_num_queued_tokens": queued}
    )
    for step, queued in product((1024, 2048, 8192), (2500, 5000, 10_000, 20_000, 40_000))
}
BEST_CAP = "stock, best cap"
LEAVE_OUT: Mapping[str, Variant] = {f"without {name}": Variant(without=name) for name in FEATURES}


@cache
def _profile() -> EngineProfile:
    return engine_profile(ENGINE)


# From a seed and the number of replicas.
Load = Callable[[int, int], Workload]


def _of_law(traffic: Traffic, rate: float, seed: int, replicas: int) -> Workload:
    """As many times the requests for several replicas, so that an overload lasts as long."""
    return traffic.drawn(rate * replicas, REQUESTS * replicas, np.random.default_rng(seed))


def _of_file(path: Path, seed: int, replicas: int) -> Workload:
    """A file has no more requests: several replicas get them in less time."""
    return read_workload(path, rng=np.random.default_rng(seed)).faster(replicas)


def in_time(variant: Variant, workload: Workload, seed: int) -> float:
    """Share of the workload's requests."""
    known = predicted(workload, variant.predictor, np.random.default_rng(seed))
    return attainment(run(variant.config(), known), TARGETS)


def _share(job: tuple[Load, Variant, int]) -> float:
    load, variant, seed = job
    return in_time(variant, load(seed, variant.replicas), seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Shares in time under one load.

    Attributes:
        shares: by variant and seed.
        cap: of BEST_CAP: tokens per step and most queued tokens.
    """

    shares: Mapping[str, Sequence[float]]
    cap: tuple[int, int]


def _measured(setting: Setting, loads: Mapping[str, Load]) -> dict[str, Found]:
    variants, found = [*VARIANTS.values(), *CAPS.values()], {}
    shares = setting.grid(_share, list(loads.values()), variants)
    for name, each in zip(loads, shares.tolist(), strict=True):
        plain, capped = each[: len(VARIANTS)], dict(zip(CAPS, each[len(VARIANTS) :], strict=True))
        cap = max(capped, key=lambda key: mean(capped[key]))
        found[name] = Found(shares={**dict(zip(VARIANTS, plain, strict=True)), BEST_CAP: capped[cap]}, cap=cap)
    return found


_COLUMNS = ("stock", BEST_CAP, *(name for name in VARIANTS if name != "stock"))


def goodput(setting: Setting) -> list[str]:
    """Share of requests in time against load: stock, stock with its best refusals, Sluice; and files of --data."""
    laws = {
        f"{name} {rate:g}/s": partial(_of_law, traffic, rate)
        for name, traffic in TRAFFIC.items()
        for rate in traffic.rates
    }
    files = _files(setting.data)
    by_law = _measured(setting, laws)
    by_file = _measured(replace(setting, runs=1), {path.name.split(".")[0]: partial(_of_file, path) for path in files})
    if path := setting.figure("goodput"):
        plots.draw_panels(_panels(by_law), path, x="requests per second", y="share in time")
    lines = _law_table(by_law)
    return [*lines, "", *_file_table(by_file, _reference(setting.data))] if by_file else lines


def leave_out(setting: Setting) -> list[str]:
    """What each feature of Sluice adds to the share in time: the whole, and the change with one less."""
    loads = {"mix": (8, 12, 15), "chat": (30, 50)}
    named = {
        f"{name} {rate}/s": partial(_of_law, TRAFFIC[name], rate) for name, rates in loads.items() for rate in rates
    }
    variants = [VARIANTS["Sluice"], *LEAVE_OUT.values()]
    shares = setting.grid(_share, list(named.values()), variants).mean(axis=2)
    rows = [
        (name, float(whole), *(f"{less - whole:+.3f}" for less in rest))
        for name, (whole, *rest) in zip(named, shares, strict=True)
    ]
    return table(("load", "Sluice", *LEAVE_OUT), rows)


def long_prompts(setting: Setting) -> list[str]:
    """Chat at two rates beside a document of 100 000 tokens now and then: the share of the chat that is in time."""
    cases = [(rate, every) for rate in (10.0, 20.0) for every in (20.0, 10.0, 5.0)]
    variants = ("stock", "Sluice")
    loads = [partial(_beside_long_prompts, *case) for case in cases]
    shares = setting.grid(_share, loads, [VARIANTS[name] for name in variants]).mean(axis=2)
    named = [f"{rate:g}/s, one every {every:g} s" for rate, every in cases]
    rows = [(name, *(float(share) for share in row)) for name, row in zip(named, shares, strict=True)]
    return table(("chat and documents", *variants), rows)


def _beside_long_prompts(rate: float, every_s: float, seed: int, replicas: int) -> Workload:
    """Documents come regularly, and make few of all requests."""
    chat = TRAFFIC["chat"].drawn(rate * replicas, REQUESTS * replicas, np.random.default_rng(seed))
    arrivals = np.arange(every_s / 2, chat.arrival_s[-1], every_s / replicas)
    documents = len(arrivals)
    return Workload.of(
        f"{rate:g}/s beside documents",
        np.concatenate([chat.arrival_s, arrivals]),
        np.concatenate([chat.prompt_tokens, np.full(documents, _LONG_PROMPT_TOKENS)]),
        np.concatenate([chat.output_tokens, np.full(documents, 200)]),
        slo_class=[*(chat.slo_class or ()), *["standard"] * documents],
    )


def _law_table(by_law: Mapping[str, Found]) -> list[str]:
    """Means over seeds, and how far Sluice is from stock, seed by seed."""
    rows = []
    for name, found in by_law.items():
        more = np.subtract(found.shares["Sluice"], found.shares["stock"])
        shares = (mean(found.shares[column]) for column in _COLUMNS)
        rows.append((name, *shares, _cap(found.cap), f"{more.min():+.3f} to {more.max():+.3f}"))
    return table(("load", *_COLUMNS, "best cap", "Sluice - stock"), rows)


def _cap(cap: tuple[int, int]) -> str:
    step, queued = cap
    return f"{queued} queued, {step} a step"


def _panels(by_law: Mapping[str, Found]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    return {
        kind: {
            column: (
                [float(rate) for rate in traffic.rates],
                [mean(by_law[f"{kind} {rate:g}/s"].shares[column]) for rate in traffic.rates],
            )
            for column in _COLUMNS
        }
        for kind, traffic in TRAFFIC.items()
    }


def _files(folder: Path | None) -> list[Path]:
    """Those below it that hold requests of the classes that have targets; others' data may lie there too."""
    paths = sorted(folder.rglob("*.csv.gz")) if folder else []
    return [
        path for path in paths if _has_classes(path) and set(_of_file(path, 0, 1).slo_class or ()) <= TARGETS.keys()
    ]


def _has_classes(path: Path) -> bool:
    with gzip.open(path, "rt") as file:
        return set(file.readline().strip().split(",")) >= _FILE_COLUMNS


def _reference(folder: Path | None) -> dict[str, dict[str, Any]]:
    found = sorted(folder.rglob("reference.json")) if folder else []
    reference: dict[str, dict[str, Any]] = json.loads(found[0].read_text()) if found else {}
    return reference


def _file_table(by_file: Mapping[str, Found], reference: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Shares by file beside the reference's, and whether the two stocks agree."""
    rows, apart = [], []
    for name, found in by_file.items():
        shares = [found.shares[column][0] for column in _COLUMNS]
        theirs = reference.get(name)
        others: list[object] = ["-"] * 3
        if theirs is not None:
            others = [float(theirs["stock8192"]), float(theirs["best_cap"][0]), float(theirs["moore_hodgson"])]
            apart.append(abs(shares[0] - theirs["stock8192"]))
        rows.append((name, *shares, _cap(found.cap), *others))
    heading = ("file", *_COLUMNS, "best cap", "reference: stock", "reference: best cap", "reference: rules")
    lines = table(heading, rows)
    if apart:
        kept = "within" if max(apart) <= _AGREEMENT else "NOT within"
        lines += ["", f"Stock is at most {max(apart):.4f} from the reference's: {kept} {_AGREEMENT}."]
    return lines
