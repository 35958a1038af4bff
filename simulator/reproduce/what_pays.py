"""Where each policy pays, and where it does not: ratios of paired runs on real lengths and arrivals.

Engine, unless an experiment says otherwise: Llama-3.1-8B on an RTX PRO 6000, by measured kernel times. Predictions have
the accuracy of paper 000's Table 1 (`simulator.predictors`). Saturated runs keep twice as many clients as slots and
count the middle 60 % of the requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple, get_args

import numpy as np

from policies.engine.step_time import StepTimeConfig
from policies.gang.batches import GangConfig
from policies.papers.bin_worth import expected_batch_max
from policies.router.bin_edges import equal_mass_edges, optimal_edges
from policies.router.multi_bin import MultiBinConfig
from policies.router.order import IdleOrder
from policies.router.promise import Promise
from policies.types import FloatArray
from simulator.cluster import ClusterConfig, Run, run, run_gang
from simulator.engines import engine_profile
from simulator.gang import LengthTimes
from simulator.predictors import predicted
from simulator.reproduce.common import (
    Setting,
    cluster,
    drawn,
    fixed_bins,
    saturated,
    spread,
    steady_rate,
    table,
    walk_forward,
)
from simulator.router import RouterConfig
from simulator.workload import Workload, gamma_bursts, length_law, mixed, poisson, synthetic

_ENGINE = "kernels_rtxpro6000_llama-3.1-8b"
_SETS = ("azure_conv", "azure_code", "lmsys", "deepseek_r1")
_SLOTS = 128
_BINS = 4
_PARTS = 6  # of a set, in time
_FULL = GangConfig(batch_size=8, max_wait_s=math.inf)
# Lengths and caches, in tokens, small enough to bind.
_TIGHT = (
    ("azure_conv", 20_000), ("azure_conv", 40_000), ("azure_conv", 80_000), ("lmsys", 10_000), ("lmsys", 20_000),
    ("lmsys", 40_000), ("deepseek_r1", 200_000),
)  # fmt: skip

# Forecast admission as engines have it by default: overcommitting where preemptions cost less than they bring. In mixed
# steps, so that admission is compared alone.
_AS_SERVED: tuple[str, dict[str, Any]] = ("auto", {"mode": "mixed"})


def _config(cache_tokens: int = 500_000, slots: int = _SLOTS, engine: str = _ENGINE, **changes: Any) -> ClusterConfig:
    return cluster(engine, slots=slots, cache_tokens=cache_tokens, **changes)


def _sources(setting: Setting, *names: str) -> dict[str, Workload]:
    return {name: setting.workload(name) for name in names}


def _percent(ratios: FloatArray) -> str:
    """Median and range of relative changes."""
    changes = [100.0 * (ratio - 1.0) for ratio in ratios]
    return f"{np.median(changes):+.1f} % [{min(changes):+.1f}, {max(changes):+.1f}]"


def gang_bins(setting: Setting) -> list[str]:
    """Gang batches of 8, saturated: throughput with bins against without, by edges cut before, on five later parts."""
    kinds = [("oracle", "equal_mass"), ("oracle", "optimal"), ("noise:0.44", "equal_mass"), ("noise:0.44", "optimal")]
    gain, bins = partial(_gang_gain, _sources(setting, *_SETS)), (2, 4, 8)
    found = replace(setting, runs=_PARTS - 1).grid(gain, _SETS, bins, kinds)  # a run for each later part
    rows = [
        (name, k, *(f"x{spread(each)}" for each in found[i, j]))
        for (i, name), (j, k) in product(enumerate(_SETS), enumerate(bins))
    ]
    heading = ("lengths", "bins", "known, equal mass", "known, optimal", "predicted, equal mass", "predicted, optimal")
    return table(heading, rows)


def _gang_gain(sources: Mapping[str, Workload], job: tuple[str, int, tuple[str, str], int]) -> float:
    name, k, (predictor, rule), part = job
    past, served = walk_forward(sources[name], _PARTS)[part]
    at_once = replace(served, arrival_s=np.zeros(len(served))).head(12_000)
    work = predicted(at_once, predictor, np.random.default_rng(part))
    plain, binned = (_gang_rate(work, past, each, rule) for each in (1, k))
    return binned / plain


def _gang_rate(work: Workload, past: Workload, k: int, rule: str) -> float:
    sample = past.output_tokens[-8192:]
    edges = optimal_edges(sample, k, 8, resolution=512) if rule == "optimal" else equal_mass_edges(sample, k)
    return run_gang(_FULL, fixed_bins(edges), LengthTimes(s_per_token=0.025), work).throughput


def rolling(setting: Setting) -> list[str]:
    """Rolling batches of 16 out of 4 bins, and without bins, against single requests: saturated, 128 slots."""
    engines, modes, sources = (
        (_ENGINE, "Qwen3-8B@h100_vllm", "Llama-3.1-8B-Instruct@H200"),
        ("mixed", "auto"),
        _SETS[:3:2],
    )
    found = setting.grid(partial(_rolling_gain, _sources(setting, *sources)), engines, sources, modes)
    rows = [
        (engine, name, mode, *(_percent(each) for each in np.moveaxis(found[i, j, m], -1, 0)))
        for (i, engine), (j, name), (m, mode) in product(enumerate(engines), enumerate(sources), enumerate(modes))
    ]
    return table(("engine", "lengths", "steps", "rolling, 4 bins", "rolling, 1 bin"), rows)


def _rolling_gain(sources: Mapping[str, Workload], job: tuple[str, str, str, int]) -> list[float]:
    engine, name, mode, seed = job
    work = drawn(sources[name], 4000, seed)
    rates = []
    for bins, size in ((1, 1), (_BINS, 16), (1, 16)):
        config = _config(
            engine=engine,
            batch="auto",
            batch_settings={"mode": mode, "step_times": engine_profile(engine).times},
            bins=fixed_bins(equal_mass_edges(work.output_tokens, bins)),
            router=RouterConfig(rolling_size=size),
        )
        rates.append(steady_rate(saturated(config, work)))
    return [rate / rates[0] for rate in rates[1:]]


def gang_low_load(setting: Setting) -> list[str]:
    """Gang batches of 8, 64 servers: mean latency of 2 and 4 bins against none, by load around the critical rate."""
    source = setting.workload("lmsys")
    lengths = source.output_tokens * 0.025
    critical = 7.0 / (expected_batch_max(lengths, 8) - float(lengths.mean()))
    factors = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    found = setting.grid(partial(_gang_latency, source), (1, 2, 4), [critical * factor for factor in factors])
    rows = [
        (f"{factor} x critical ({factor * critical:.2f}/s)", *(_percent(found[i, j] / found[0, j]) for i in (1, 2)))
        for j, factor in enumerate(factors)
    ]
    return table(("arrival rate", "latency, 2 bins", "latency, 4 bins"), rows)


def _gang_latency(source: Workload, job: tuple[int, float, int]) -> float:
    k, rate, seed = job
    rng = np.random.default_rng(seed)
    work = predicted(source.sample(4000, rng).arriving(poisson(rate, 4000, rng)), "oracle", rng)
    bins = fixed_bins(equal_mass_edges(source.output_tokens, k))
    return run_gang(_FULL, bins, LengthTimes(s_per_token=0.025), work, replicas=64).mean_latency_s


class _Batch(NamedTuple):
    """A batch policy on one engine, saturated."""

    name: str
    cache_tokens: int
    batch: str
    settings: Mapping[str, Any]
    classes: int = 1
    seed: int = 0
    slots: int = _SLOTS
    engine: str = _ENGINE


def _saturated(sources: Mapping[str, Workload], job: _Batch) -> tuple[float, int]:
    """Requests per second, and preemptions."""
    work = drawn(sources[job.name], 2000, job.seed, max_tokens=min(32_768, job.cache_tokens // 2))
    config = _config(
        job.cache_tokens,
        job.slots,
        job.engine,
        batch=job.batch,
        batch_settings=job.settings,
        bins=MultiBinConfig(bins=job.classes, rule="equal_mass"),
        router=RouterConfig(class_by_bin=True, credit_lookahead=job.slots),
    )
    finished = saturated(config, work)
    return steady_rate(finished), sum(engine.totals.preemptions for engine in finished.engines)


def _tight(setting: Setting, kinds: Sequence[tuple[str, dict[str, Any]]]) -> FloatArray:
    """Rate and preemptions under each kind of policy; shape (tight caches, kinds, runs, 2)."""
    return setting.grid(partial(_in_a_tight_cache, _sources(setting, *dict(_TIGHT))), _TIGHT, kinds)


def _in_a_tight_cache(
    sources: Mapping[str, Workload], job: tuple[tuple[str, int], tuple[str, dict[str, Any]], int]
) -> tuple[float, int]:
    (name, cache_tokens), (batch, settings), seed = job
    classes = settings.get("classes", 1)
    return _saturated(sources, _Batch(name, cache_tokens, batch, settings, classes=classes, seed=seed))


def continuous_bins(setting: Setting) -> list[str]:
    """Continuous batching, saturated: forecast admission with 4 bins' own survival curves against one curve for all."""
    found = _tight(setting, [("forecast_admission", {"classes": classes}) for classes in (1, _BINS)])
    rows = [(*at, _percent(each[1, :, 0] / each[0, :, 0])) for at, each in zip(_TIGHT, found, strict=True)]
    return table(("lengths", "cache, tokens", "throughput, 4 bins against 1"), rows)


def admission(setting: Setting) -> list[str]:
    """Continuous batching, saturated: eq. 12 and forecast, alone and as served, against a plain 128 slots."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("stock", {}), ("memory_aware", {}), ("memory_aware", {"basis": "resident"}), ("forecast_admission", {}),
        _AS_SERVED,
    ]  # fmt: skip
    rows = []
    for at, each in zip(_TIGHT, _tight(setting, kinds), strict=True):
        rate = each[:, :, 0]
        gains = [_percent(rate[m] / rate[0]) for m in (1, 2, 3, 4)]
        lost = "/".join(f"{count:.0f}" for count in each[:, :, 1].mean(axis=1))
        rows.append((*at, *gains, _percent(rate[3] / rate[1]), lost))
    heading = (
        "lengths", "cache, tokens", "eq. 12", "eq. 12, resident", "forecast", "as served", "forecast / eq. 12",
        "preemptions of 2000 requests: stock, 12, 12 resident, forecast, as served",
    )  # fmt: skip
    return table(heading, rows)


def known_prompts(setting: Setting) -> list[str]:
    """Eq. 12 with the prompts known at admission against eq. 12 as published: throughput."""
    found = _tight(setting, [("memory_aware", {"known_prompts": known}) for known in (False, True)])
    rows = [(*at, _percent(each[1, :, 0] / each[0, :, 0])) for at, each in zip(_TIGHT, found, strict=True)]
    return table(("lengths", "cache, tokens", "throughput, known against published"), rows)


def phases(setting: Setting) -> list[str]:
    """Exclusive batching, saturated: the exact phase length and k = 1 against mixed steps."""
    engines = (
        _ENGINE, "Qwen3-8B@H200", "Qwen3-8B@RTX_PRO_6000", "Qwen3-30B-A3B@H200", "Qwen3-30B-A3B@RTX_PRO_6000",
    )  # fmt: skip
    names = ("azure_conv", "lmsys")
    found = setting.grid(partial(_in_phases, _sources(setting, *names)), engines, names, range(4))
    rows = []
    for (i, engine), (j, name) in product(enumerate(engines), enumerate(names)):
        rate = found[i, j, :, :, 0]
        pairs = (rate[1] / rate[0], rate[2] / rate[0], rate[3] / rate[0], rate[2] / rate[1])
        rows.append((engine, name, *(_percent(pair) for pair in pairs)))
    heading = ("engine", "lengths", "k = 1 / mixed", "exact / mixed", "auto / mixed", "exact / k = 1")
    return table(heading, rows)


def _in_phases(sources: Mapping[str, Workload], job: tuple[str, str, int, int]) -> tuple[float, int]:
    engine, name, kind, seed = job
    batch, settings = _phase_kinds(engine)[kind]
    return _saturated(sources, _Batch(name, 500_000, batch, settings, seed=seed, engine=engine))


def _phase_kinds(engine: str) -> list[tuple[str, dict[str, Any]]]:
    prior = {"step_times": StepTimeConfig(prior=engine_profile(engine).times)}
    return [
        ("stock", {}),
        ("exclusive_mixed_literal", {"mode": "exclusive", "phase_rule": "fixed", "refill": 1}),
        ("exclusive_mixed", {"mode": "exclusive", **prior}),
        ("exclusive_mixed", {"mode": "auto", **prior}),
    ]


def equal_lengths(setting: Setting) -> list[str]:
    """A tight cache and answers of equal length: cache in use and throughput against answers with a spread."""
    laws = {"equal": "constant:300", "uniform 200-400": "uniform:200:400", "exponential": "exponential:300"}
    kinds = {"stock": ("stock", {}), "forecast": ("forecast_admission", {}), "as served": _AS_SERVED}
    found = setting.grid(_equal, list(laws.values()), list(kinds.values()))
    rows = [
        (name, kind, f"{found[i, j, :, 0].mean():.0%}", f"{found[i, j, :, 1].mean():.2f}")
        for (i, name), (j, kind) in product(enumerate(laws), enumerate(kinds))
    ]
    return table(("answers", "admission", "cache in use", "requests/s"), rows)


def _equal(job: tuple[str, tuple[str, dict[str, Any]], int]) -> tuple[float, float]:
    law, (batch, settings), seed = job
    rng = np.random.default_rng(seed)
    work = predicted(synthetic("equal", length_law("constant:100"), length_law(law), 3000, rng), "none", rng)
    router = RouterConfig(credit_lookahead=_SLOTS)
    finished = saturated(_config(20_000, batch=batch, batch_settings=settings, router=router), work)
    totals = finished.engines[0].totals
    return totals.blocks_s / totals.busy_s / finished.engines[0].config.total_blocks, steady_rate(finished)


def _load(config: ClusterConfig, work: Workload) -> float:
    """Requests per second that the system serves when saturated."""
    return steady_rate(saturated(config, work))


def dedicated_replicas(setting: Setting) -> list[str]:
    """Four replicas, one for each bin of predicted length, against four for all: requests per second, saturated."""
    names = ("azure_conv", "lmsys", "deepseek_r1")
    found = setting.grid(partial(_dedicated, _sources(setting, *names)), names)
    return table(
        ("lengths", "throughput, dedicated against shared"),
        [(name, _percent(ratios)) for name, ratios in zip(names, found, strict=True)],
    )


def _dedicated(sources: Mapping[str, Workload], job: tuple[str, int]) -> float:
    name, seed = job
    work = drawn(sources[name], 3000, seed)
    inner = equal_mass_edges(work.output_tokens, _BINS)[1:-1]
    labels = tuple(f"bin {index}" for index in np.searchsorted(inner, work.predicted_output_tokens, side="right"))
    labelled = replace(work, slo_class=labels)
    reserved = tuple(frozenset({f"bin {index}"}) for index in range(_BINS))
    # All at once, so that no reserved replica waits for clients of another: what counts is when the last one ends.
    shared, dedicated = (
        run(_config(replicas=_BINS, replica_classes=classes), labelled).makespan_s for classes in ((), reserved)
    )
    return shared / dedicated


def class_replicas(setting: Setting) -> list[str]:
    """Chat beside long summaries on 4 replicas: goodput when chat has 1 or 2 replicas of its own against none."""
    rates = (12.0, 16.0, 20.0, 24.0, 28.0)
    found = setting.grid(partial(_classes, _sources(setting, "lmsys", "arxiv")), rates)
    rows = [
        (rate, f"{found[i, :, 0].mean():.2f}", *(_percent(found[i, :, m] / found[i, :, 0]) for m in (1, 2)))
        for i, rate in enumerate(rates)
    ]
    return table(("requests/s", "goodput, shared", "1 replica for chat", "2 replicas for chat"), rows)


def _classes(sources: Mapping[str, Workload], job: tuple[float, int]) -> list[float]:
    """Goodput: chat within 0.5 s and 40 ms per token, summaries within 10 s and 200 ms."""
    rate, seed = job
    rng = np.random.default_rng(seed)
    parts = [
        replace(drawn(sources[name], 1500, seed), name=label).arriving(poisson(rate / 2.0, 1500, rng))
        for name, label in (("lmsys", "chat"), ("arxiv", "batch"))
    ]
    work = mixed("chat and batch", *parts)
    chat, batch = frozenset({"chat"}), frozenset({"batch"})
    kinds = ((), (chat, batch, batch, batch), (chat, chat, batch, batch))
    return [_goodput(run(_config(replicas=4, replica_classes=kind), work)) for kind in kinds]


def _goodput(finished: Run) -> float:
    limits = {"chat": (0.5, 0.040), "batch": (10.0, 0.2)}
    good = 0
    for request in finished.requests:
        ttft_s, tpot_s = limits[request.slo_class or "batch"]
        good += (request.ttft_s or 0.0) <= ttft_s and (request.tpot_s or 0.0) <= tpot_s
    return good / finished.makespan_s


def queue_order(setting: Setting) -> list[str]:
    """Bursts (gaps with a cv of 3) at 80 and 95 % load, 64 slots: latency by the order of the queue against FCFS."""
    source = setting.workload("azure_conv")
    orders: tuple[tuple[str, dict[str, Any]], ...] = (
        ("fcfs", {}),
        ("simulator.comparisons:LeastWork", {}),
        ("sjf", {}),
    )
    loads = (0.8, 0.95)
    found = setting.grid(partial(_orders, source, orders), loads)
    rows = []
    for (i, load), (j, (kind, settings)) in product(enumerate(loads), enumerate(orders)):
        order = ", ".join([kind, *(f"{name} {value:g}" for name, value in settings.items())])
        changes = [_percent(found[i, :, j, m] / found[i, :, 0, m]) for m in range(3)]
        rows.append((f"{load:.0%}", order, *changes))
    return table(("load", "order", "mean latency", "99th percentile", "mean time to first token"), rows)


def _orders(
    source: Workload, orders: Sequence[tuple[str, Mapping[str, Any]]], job: tuple[float, int]
) -> list[list[float]]:
    load, seed = job
    rng = np.random.default_rng(seed)
    work = drawn(source, 6000, seed)
    rate = load * _load(_config(slots=64), work.head(2500))
    arriving = work.arriving(gamma_bursts(rate, 3.0, len(work), rng))
    return [
        _latencies(run(_config(slots=64, order=order, order_settings=settings), arriving)) for order, settings in orders
    ]


def _latencies(finished: Run) -> list[float]:
    latency = np.array([request.latency_s for request in finished.requests])
    ttft = np.array([request.ttft_s for request in finished.requests])
    return [float(latency.mean()), float(np.percentile(latency, 99)), float(ttft.mean())]


def idle_order(setting: Setting) -> list[str]:
    """Offline work that is there all at once, 64 slots: by prompt length against as it came."""
    source, orders = setting.workload("azure_conv"), get_args(IdleOrder)
    found = setting.grid(partial(_idle_orders, source))
    changes = [[_percent(found[:, i, m] / found[:, 0, m]) for m in range(3)] for i in range(len(orders))]
    rows = [(order, *each) for order, each in zip(orders, changes, strict=True)]
    return table(("order", "all done", "mean latency", "99th percentile"), rows)


def _idle_orders(source: Workload, job: tuple[int]) -> list[list[float]]:
    (seed,) = job
    drawn_work = drawn(source, 1500, seed)
    work = replace(drawn_work, slo_class=("nightly",) * len(drawn_work))
    config = _config(slots=64, promises={"nightly": Promise(ttft_s=36_000.0, tpot_s=1.0)})
    found = []
    for order in get_args(IdleOrder):
        finished = run(replace(config, router=RouterConfig(fills_idle={"nightly": order})), work)
        found.append([finished.makespan_s, *_latencies(finished)[:2]])
    return found


def placement(setting: Setting) -> list[str]:
    """Eight replicas of 32 slots, 90 % load: latency by predicted work against by count, at once or by free slots."""
    names, ways = ("azure_conv", "lmsys"), {"at once": None, "by free slots": 0}
    found = setting.grid(partial(_placements, _sources(setting, *names)), names, list(ways.values()))
    rows = []
    for (i, name), (j, way) in product(enumerate(names), enumerate(ways)):
        each = found[i, j]
        changes = [_percent(each[:, 1, m] / each[:, 0, m]) for m in range(3)]
        rows.append((name, way, *changes))
    return table(("lengths", "handed out", "mean latency", "99th percentile", "mean time to first token"), rows)


def _placements(sources: Mapping[str, Workload], job: tuple[str, int | None, int]) -> list[list[float]]:
    name, lookahead, seed = job
    rng = np.random.default_rng(seed)
    work = drawn(sources[name], 2500, seed)
    rate = 8.0 * 0.9 * _load(_config(slots=32), work.head(800))
    arriving = work.arriving(poisson(rate, len(work), rng))
    config = _config(slots=32, replicas=8, router=RouterConfig(credit_lookahead=lookahead))
    kinds = ("most_credit", "least_work")
    return [_latencies(run(replace(config, placement=kind), arriving)) for kind in kinds]
