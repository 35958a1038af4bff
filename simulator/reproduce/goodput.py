"""Goodput: the share of all requests that are in time, against load, for plain vLLM and for Sluice.

A request in time keeps the targets of its class: the first token within ttft_s, the mean time per token within tpot_s.
What is refused is not in time. vLLM's best refusals are found by a grid for every load, with hindsight.

Three engines: straight lines for all steps; an H100 as measured, where a step that holds prompts and decodes has a
price of its own; a CPU engine whose steps take longer than Sluice believes.

Loads come from laws, and from files in the folder of --data, if there is one: every CSV whose classes are those of
TARGETS. A file reference.json beside them, {file: {"stock8192": share, "best_cap": [share, ...], "moore_hodgson":
share}}, holds what another simulator found, and is set against ours.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from policies.types import StepCoefficients, StepTimes
from simulator import plots
from simulator.cluster import ClusterConfig, run
from simulator.disaggregated import run_disaggregated
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile, engine_profile
from simulator.predictors import predicted
from simulator.presets import FEATURES, PAPERS_POOLS, system, without
from simulator.real_times import RealTimes
from simulator.report import Target, attainment
from simulator.reproduce.common import Setting, mean, output_rate, table
from simulator.traces import read_workload
from simulator.workload import Workload, gamma_bursts, length_law, synthetic

ENGINE = "Llama-3.1-8B@h100_sxm"
TARGETS = {"interactive": Target(ttft_s=0.5, tpot_s=0.03), "standard": Target(ttft_s=5.0, tpot_s=0.1)}
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
class Served:
    """What systems are compared on.

    Attributes:
        profile: the engine as it is believed to be.
        sizes: fields of `EngineConfig` besides the cache.
        targets: by class.
        caps: vLLM's own refusals: tokens per step and most queued tokens.
        real_times: how its steps differ from the profile.
    """

    profile: EngineProfile
    sizes: Mapping[str, int] = field(default_factory=dict)
    targets: Mapping[str, Target] = field(default_factory=lambda: TARGETS)
    caps: Sequence[tuple[int, int]] = tuple(product((1024, 2048, 8192), (2500, 5000, 10_000, 20_000, 40_000)))
    real_times: RealTimes | None = None


LINES = Served(profile=engine_profile(ENGINE))
# Its steps were measured with 19 GiB of KV cache, on a GPU that another engine used as well.
MEASURED = Served(profile=replace(engine_profile("Qwen3-8B@h100_vllm"), cache_tokens=138_000))
MEASURED_TRAFFIC = {
    "mix": replace(TRAFFIC["mix"], rates=(8, 10, 12, 15, 20)),
    "chat": replace(TRAFFIC["chat"], rates=(20, 30, 40)),
}
# As in docs/measurements/goodput.md, "On a real engine": a step of 32 decodes takes 19 ms there, reading 184 tokens
# alone 40 ms with the way there and back, and `sluice calibrate` finds most of either in a step's overhead.
_CPU_STEP = StepCoefficients(overhead_s=0.0155, prefill_s=120e-6, decode_s=110e-6)
_BELIEVED = StepTimes(prefill=_CPU_STEP, decode=_CPU_STEP, mixed=_CPU_STEP)
CPU = Served(
    profile=EngineProfile(name="CPU", times=_BELIEVED, clock=_BELIEVED, cache_tokens=320_000),
    sizes={"slots": 32, "max_batch_tokens": 2048},
    targets={"interactive": Target(ttft_s=0.201, tpot_s=0.038), "standard": Target(ttft_s=2.013, tpot_s=0.114)},
    caps=tuple((2048, 184 * prompts) for prompts in (5, 10, 20, 40)),
)
CPU_TRAFFIC = Traffic(
    lengths={"interactive": ("uniform:24:72", "uniform:12:36"), "standard": ("uniform:160:480", "uniform:12:36")},
    cv=2.0,
    rates=(2.1, 3.0, 3.9, 8.1, 12.0),  # 0.7, 1, 1.3, 2.7 and 4 times what plain vLLM carried on the real one
)
# Routers and clients share its two cores: steps take longer than they did alone, or time passes between them.
CPU_REAL_TIMES: Mapping[str, RealTimes] = {
    "as believed": RealTimes(),
    "x 1.4": RealTimes(factor=1.4),
    "x 1.2, and 4 ms + 0.3 ms a decode between": RealTimes(factor=1.2, between_s=0.004, between_decode_s=0.0003),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A system to compare.

    Attributes:
        system: by its name in `simulator.presets`; told the targets, if it is Sluice.
        predictor: where its length predictions come from (`simulator.predictors`).
        engine: fields of `EngineConfig` besides those of what is served.
        without: a feature of `simulator.presets.FEATURES` that is taken out.
        replicas: under as many times the rate.
    """

    system: str = "sluice"
    predictor: str = "noise:0.44"
    engine: Mapping[str, Any] = field(default_factory=dict)
    without: str | None = None
    replicas: int = 1

    def config(self, served: Served = LINES) -> ClusterConfig:
        sizes = EngineConfig(total_blocks=(served.profile.cache_tokens or 0) // 16, **{**served.sizes, **self.engine})
        config = system(self.system, served.profile, sizes, self.replicas, served.targets, real_times=served.real_times)
        return without(self.without, config) if self.without else config

    def capped(self, step_tokens: int, queued_tokens: int) -> "Variant":
        """With vLLM's own refusals."""
        caps = {"max_batch_tokens": step_tokens, "max_num_queued_tokens": queued_tokens}
        return replace(self, engine={**self.engine, **caps})


STOCK = Variant(system="stock", predictor="none", engine={"watermark": _WATERMARK})
# What is compared, by name; another row is another column of the tables and another line of the figures.
VARIANTS: Mapping[str, Variant] = {"stock": STOCK, "Sluice": Variant()}
# On files besides.
FILE_VARIANTS: Mapping[str, Variant] = {
    **VARIANTS,
    "Sluice, lengths known": Variant(predictor="oracle"),
    "Sluice, 4 replicas": Variant(replicas=4),
}
BEST_CAP = "stock, best cap"
LEAVE_OUT: Mapping[str, Variant] = {f"without {name}": Variant(without=name) for name in FEATURES}


# From a seed and the number of replicas.
Load = Callable[[int, int], Workload]


def _of_law(traffic: Traffic, rate: float, seed: int, replicas: int) -> Workload:
    """As many times the requests for several replicas, so that an overload lasts as long."""
    return traffic.drawn(rate * replicas, REQUESTS * replicas, np.random.default_rng(seed))


def _of_file(path: Path, seed: int, replicas: int) -> Workload:
    """A file has no more requests: several replicas get them in less time."""
    return read_workload(path, rng=np.random.default_rng(seed)).faster(replicas)


def in_time(variant: Variant, workload: Workload, seed: int, served: Served = LINES) -> float:
    """Share of the workload's requests."""
    known = predicted(workload, variant.predictor, np.random.default_rng(seed))
    return attainment(run(variant.config(served), known), served.targets)


def _share(served: Served, job: tuple[Load, Variant, int]) -> float:
    load, variant, seed = job
    return in_time(variant, load(seed, variant.replicas), seed, served)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Shares in time under one load.

    Attributes:
        shares: by variant and seed.
        cap: of BEST_CAP: tokens per step and most queued tokens.
    """

    shares: Mapping[str, Sequence[float]]
    cap: tuple[int, int]


def compared(
    setting: Setting, served: Served, loads: Mapping[str, Load], variants: Mapping[str, Variant] = VARIANTS
) -> dict[str, Found]:
    """The variants, and stock with its best cap, under each load."""
    caps = [STOCK.capped(*cap) for cap in served.caps]
    found = {}
    shares = setting.grid(partial(_share, served), list(loads.values()), [*variants.values(), *caps])
    for name, each in zip(loads, shares.tolist(), strict=True):
        plain, capped = each[: len(variants)], dict(zip(served.caps, each[len(variants) :], strict=True))
        cap = max(capped, key=lambda key: mean(capped[key]))
        found[name] = Found(shares={**dict(zip(variants, plain, strict=True)), BEST_CAP: capped[cap]}, cap=cap)
    return found


def _columns(variants: Mapping[str, Variant] = VARIANTS) -> list[str]:
    """The best cap stands beside stock."""
    return ["stock", BEST_CAP, *(name for name in variants if name != "stock")]


def _laws(traffic: Mapping[str, Traffic]) -> dict[str, Load]:
    return {f"{name} {rate:g}/s": partial(_of_law, each, rate) for name, each in traffic.items() for rate in each.rates}


def goodput(setting: Setting) -> list[str]:
    """Share of requests in time against load: stock, stock with its best refusals, Sluice; and files of --data."""
    by_law = compared(setting, LINES, _laws(TRAFFIC))
    draw(setting, "goodput", _points(TRAFFIC), by_law)
    files = {path.name.split(".")[0]: partial(_of_file, path) for path in _files(setting.data)}
    by_file = compared(replace(setting, runs=1), LINES, files, FILE_VARIANTS) if files else {}
    lines = law_table(by_law)
    return [*lines, "", *_file_table(by_file, _reference(setting.data))] if by_file else lines


def on_measured(setting: Setting) -> list[str]:
    """The same on an H100 whose step times were measured: reading beside decodes has a price of its own."""
    beside = {f"chat {rate:g}/s, documents": partial(_beside_long_prompts, rate, 5.0) for rate in (10.0, 20.0)}
    found = compared(setting, MEASURED, _laws(MEASURED_TRAFFIC) | beside)
    draw(setting, "goodput_measured", _points(MEASURED_TRAFFIC), found)
    return law_table(found)


def on_cpu(setting: Setting) -> list[str]:
    """The same on a CPU engine whose steps take otherwise than Sluice believes."""
    loads = _laws({"CPU": CPU_TRAFFIC})
    by_times = {name: compared(setting, replace(CPU, real_times=real), loads) for name, real in CPU_REAL_TIMES.items()}
    return law_table({f"{load}, steps {name}": by_times[name][load] for name in CPU_REAL_TIMES for load in loads})


def leave_out(setting: Setting) -> list[str]:
    """What each feature of Sluice adds to the share in time: the whole, and the change with one less."""
    loads = {"mix": (8, 12, 15), "chat": (30, 50)}
    named = {
        f"{name} {rate}/s": partial(_of_law, TRAFFIC[name], rate) for name, rates in loads.items() for rate in rates
    }
    variants = [VARIANTS["Sluice"], *LEAVE_OUT.values()]
    shares = setting.grid(partial(_share, LINES), list(named.values()), variants).mean(axis=2)
    rows = [
        (name, float(whole), *(f"{less - whole:+.3f}" for less in rest))
        for name, (whole, *rest) in zip(named, shares, strict=True)
    ]
    return table(("load", "Sluice", *LEAVE_OUT), rows)


def as_published(setting: Setting) -> list[str]:
    """The papers' system beside the defaults and plain vLLM, on two engines: share in time, output tokens/s."""
    variants = {"stock": STOCK, **{name: Variant(system=name) for name in ("sluice", "papers", "papers_literal")}}
    on_two = [replace(variant, replicas=2) for variant in variants.values()]
    loads = {f"mix {rate}/s each": partial(_of_law, TRAFFIC["mix"], rate) for rate in (6, 8, 10, 12)}
    found = setting.grid(_share_and_rate, list(loads.values()), on_two).mean(axis=2)
    rows = [
        (name, *(f"{share:.3f}, {rate:.0f}" for share, rate in row)) for name, row in zip(loads, found, strict=True)
    ]
    return table(("load", *variants), rows)


def _share_and_rate(job: tuple[Load, Variant, int]) -> tuple[float, float]:
    load, variant, seed = job
    known = predicted(load(seed, variant.replicas), variant.predictor, np.random.default_rng(seed))
    served = run(variant.config(), known)
    return attainment(served, LINES.targets), output_rate(served)


def papers_pools(setting: Setting) -> list[str]:
    """002's figures 1 and 4: three engines of the papers' system, or two and one that reads long prompts."""
    three = replace(Variant(system="papers"), replicas=3)
    loads = {f"mix {rate}/s each": partial(_of_law, TRAFFIC["mix"], rate) for rate in (6, 8, 10, 12)}
    found = setting.grid(_share_and_rate_of_pools, list(loads.values()), [three], (False, True)).mean(axis=3)[:, 0]
    rows = [
        (name, *(f"{share:.3f}, {rate:.0f}" for share, rate in row)) for name, row in zip(loads, found, strict=True)
    ]
    return table(("load", "three alike", "two, and one that reads"), rows)


def _share_and_rate_of_pools(job: tuple[Load, Variant, bool, int]) -> tuple[float, float]:
    """The same engines, all alike or split by PAPERS_POOLS."""
    load, variant, split, seed = job
    if not split:
        return _share_and_rate((load, variant, seed))
    known = predicted(load(seed, variant.replicas), variant.predictor, np.random.default_rng(seed))
    config = replace(variant.config(), replicas=variant.replicas - PAPERS_POOLS.prefill_replicas)
    served = run_disaggregated(config, PAPERS_POOLS, known)
    return attainment(served, LINES.targets), output_rate(served)


def long_prompts(setting: Setting) -> list[str]:
    """Chat at two rates beside a document of 100 000 tokens now and then: the share of the chat that is in time."""
    cases = [(rate, every) for rate in (10.0, 20.0) for every in (20.0, 10.0, 5.0)]
    variants = ("stock", "Sluice")
    loads = [partial(_beside_long_prompts, *case) for case in cases]
    shares = setting.grid(partial(_share, LINES), loads, [VARIANTS[name] for name in variants]).mean(axis=2)
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


def law_table(
    by_law: Mapping[str, Found],
    variants: Mapping[str, Variant] = VARIANTS,
    differences: Sequence[tuple[str, str]] = (("Sluice", "stock"),),
) -> list[str]:
    """Means over seeds, and how far variants are from others, seed by seed."""
    rows = []
    for name, found in by_law.items():
        shares = (mean(found.shares[column]) for column in _columns(variants))
        apart = (np.subtract(found.shares[one], found.shares[other]) for one, other in differences)
        ranges = (f"{more.min():+.3f} to {more.max():+.3f}" for more in apart)
        rows.append((name, *shares, _cap(found.cap), *ranges))
    return table(("load", *_columns(variants), "best cap", *map(" - ".join, differences)), rows)


def _cap(cap: tuple[int, int]) -> str:
    step, queued = cap
    return f"{queued} queued, {step} a step"


# Loads by where they stand on the axis of a panel, by the panel's title.
Points = Mapping[str, Mapping[float, str]]


def _points(traffic: Mapping[str, Traffic]) -> Points:
    return {kind: {rate: f"{kind} {rate:g}/s" for rate in each.rates} for kind, each in traffic.items()}


def draw(
    setting: Setting,
    name: str,
    points: Points,
    by_law: Mapping[str, Found],
    variants: Mapping[str, Variant] = VARIANTS,
    x: str = "requests per second",
) -> None:
    """Share in time against load, where figures are asked for."""
    panels = {
        title: {
            column: (list(loads), [mean(by_law[load].shares[column]) for load in loads.values()])
            for column in _columns(variants)
        }
        for title, loads in points.items()
    }
    if path := setting.figure(name):
        plots.draw_panels(panels, path, x=x, y="share in time")


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
    rows, apart, columns = [], [], _columns(FILE_VARIANTS)
    for name, found in by_file.items():
        shares = [found.shares[column][0] for column in columns]
        theirs = reference.get(name)
        others: list[object] = ["-"] * 3
        if theirs is not None:
            others = [float(theirs["stock8192"]), float(theirs["best_cap"][0]), float(theirs["moore_hodgson"])]
            apart.append(abs(shares[0] - theirs["stock8192"]))
        rows.append((name, *shares, _cap(found.cap), *others))
    heading = ("file", *columns, "best cap", "reference: stock", "reference: best cap", "reference: rules")
    lines = table(heading, rows)
    if apart:
        kept = "within" if max(apart) <= _AGREEMENT else "NOT within"
        lines += ["", f"Stock is at most {max(apart):.4f} from the reference's: {kept} {_AGREEMENT}."]
    return lines
