"""Paper 002 (Zheng et al., BucketServe): throughput, SLO attainment and padding waste, on padded batches.

Alpaca-like prompts are HaluEval's general queries, long ones arXiv summaries (the paper: LongBench), mixed half each.
Step times are OPT-13B's on an A100 (the paper: Llama2-13B on A100 40 GB). Bucketing is of prompts. Offline, batches run
padded until their longest answer ends, beside continuous batching, where nothing is padded. Online it is the paper's
arrangement: prompts are read by bucket in padded batches on GPUs of their own, answers go on in continuous batches.
What the paper compares with is not rebuilt; stand-ins have its arrangement and order: reading first come, first served
for DistServe, padded batches by predicted length, which read and answer, for UELLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from policies.gang.batches import GangConfig
from policies.gang.buckets import AdaptiveBuckets, AdaptiveBucketsConfig, BucketPolicy, PromptBuckets, max_safe_requests
from policies.gang.prefill import PrefillConfig
from policies.papers.bucket_serve import BucketServeBuckets, BucketServeConfig, kv_bytes_per_token
from policies.router.multi_bin import MultiBinConfig
from policies.router.order import FCFS, LJF, SJF, Order
from policies.router.prefill_decode import TransferTimes
from policies.types import FloatArray
from simulator.cluster import ClusterConfig, run, run_gang
from simulator.engines import EngineProfile, engine_profile
from simulator.gang import PADDED, PaddedTimes
from simulator.reproduce.common import Setting, cluster, drawn, mean, table
from simulator.requests import Request
from simulator.workload import Workload, mixed, poisson

_ENGINE = "opt-13b@A100-80G"
_BATCH = 16
_MAX_TOKENS = 4096
_NAMES = ("alpaca", "long", "mixed")
_ONE_BIN = MultiBinConfig(bins=1, rule="fixed", initial_edges=(0.0, 1e9))
# Equation 5: a tenth of what the model leaves is kept free.
_SAFE_SHARE = 0.9
# Seconds to the first token and of a token: the paper names none. DistServe's, of OPT-13B for chat and of summaries.
_TARGETS = {"alpaca": (0.25, 0.1), "long": (15.0, 0.15)}
# How many of the paper's four GPUs read prompts, and how many answer.
_READING = _ANSWERING = 2
_NVLINK_BYTES_PER_S = 300e9
_RATES = {
    "alpaca": (64.0, 128.0, 192.0, 256.0, 320.0, 384.0),
    "long": (4.0, 5.0, 6.0, 7.0, 8.0, 10.0),
    "mixed": (4.0, 5.0, 6.0, 8.0, 10.0, 12.0),
}
_REQUESTS = {"alpaca": 3000, "long": 600, "mixed": 600}
_READERS = ("first come", "Algorithm 1", "adaptive", "no padding")


def _profile() -> EngineProfile:
    return engine_profile(_ENGINE)


def _continuous(**changes: Any) -> ClusterConfig:
    return cluster(_ENGINE, clock=None, **changes)


def _workload(setting: Setting, name: str, count: int, seed: int, predictor: str = "none") -> Workload:
    if name == "mixed":
        parts = (_workload(setting, part, count // 2, seed, predictor) for part in ("alpaca", "long"))
        both = mixed("mixed", *parts)
        return both.rows(np.random.default_rng(seed).permutation(len(both)))
    source = setting.workload("alpaca" if name == "alpaca" else "arxiv")
    return replace(drawn(source, count, seed, predictor, _MAX_TOKENS), name=name)


def figure_3(setting: Setting) -> list[str]:
    """Figures 2 and 3: prompt lengths of each kind, and the seconds and useful work of padded batches of them."""
    sets = {name: _workload(setting, name, 4096, 0) for name in _NAMES}
    kinds = {
        "short, up to 256": sets["alpaca"].rows(np.flatnonzero(sets["alpaca"].prompt_tokens <= 256)),
        "long, from 1024": sets["long"].rows(np.flatnonzero(sets["long"].prompt_tokens >= 1024)),
        "mixed": sets["mixed"],
    }
    rows = []
    for kind, work in kinds.items():
        requests, tokens = work.requests(), work.prompt_tokens
        batches = [requests[start : start + _BATCH] for start in range(0, len(requests), _BATCH)]
        reading_s, answering_s, useful = np.mean([_batch_cost(batch) for batch in batches], axis=0).tolist()
        spread = f"{tokens.mean():.0f}, {np.median(tokens):.0f}, {tokens.max()}"
        rows.append((kind, spread, f"{reading_s:.2f}", f"{answering_s:.2f}", f"{useful:.0%}"))
    return table(("prompts", "tokens: mean, median, most", "reading, s", "answering, s", "useful of answering"), rows)


def _batch_cost(batch: Sequence[Request]) -> tuple[float, float, float]:
    """Seconds until the prompts are read, and from there to the last answer; and of what steps read of the cache, the
    share that is neither padding nor of an answer that has ended.
    """
    times = PaddedTimes(times=_profile().times)
    reading_s = times.batch_s([replace(request, output_tokens=1) for request in batch])
    longest, steps = max(r.prompt_tokens for r in batch), max(r.output_tokens for r in batch)
    own = sum(r.prompt_tokens * r.output_tokens + r.output_tokens * (r.output_tokens + 1) / 2 for r in batch)
    return reading_s, times.batch_s(batch) - reading_s, own / (len(batch) * (longest * steps + steps * (steps + 1) / 2))


def offline(setting: Setting) -> list[str]:
    """Figure 5a and section II-B: all at once, padding, tokens per second and waits, by buckets and order."""
    rows = []
    for name in _NAMES:
        results = [_offline(_workload(setting, name, 2048, seed)) for seed in range(setting.runs)]
        for label in results[0]:
            waste, tokens_per_s, wait_s, batches, buckets = np.mean([one[label] for one in results], axis=0).tolist()
            shown = (f"{buckets:.1f}", f"{waste:.1%}", f"{tokens_per_s:.0f}", f"{wait_s:.0f}", f"{batches:.0f}")
            rows.append((name, label, *shown))
    heading = ("workload", "batches", "buckets", "padding", "output tokens/s", "mean wait, s", "batches or steps")
    return table(heading, rows)


def _offline(work: Workload) -> dict[str, tuple[float, ...]]:
    literal = _adjusted(BucketServeBuckets(BucketServeConfig(l_max=_MAX_TOKENS)), work)
    adaptive = _adjusted(AdaptiveBuckets(AdaptiveBucketsConfig()), work)
    found = {
        "one bucket": _in_buckets(work, (0.0, float(_MAX_TOKENS)), FCFS()),
        "Algorithm 1": _in_buckets(work, literal, FCFS()),
        "Algorithm 1, SJF": _in_buckets(work, literal, SJF()),
        "Algorithm 1, LJF": _in_buckets(work, literal, LJF()),
        "adaptive": _in_buckets(work, adaptive, FCFS()),
        "adaptive, SJF": _in_buckets(work, adaptive, SJF()),
        "adaptive, LJF": _in_buckets(work, adaptive, LJF()),
    }
    stock = run(_continuous(slots=_BATCH), work)
    waits_s = [(request.started_s or 0.0) - request.arrival_s for request in stock.requests]
    steps = float(sum(engine.totals.steps for engine in stock.engines))
    tokens_per_s = float(work.output_tokens.sum()) / stock.makespan_s
    return {**found, "continuous batching": (0.0, tokens_per_s, mean(waits_s), steps, 1.0)}


def _adjusted(policy: BucketPolicy, work: Workload) -> tuple[float, ...]:
    """The edges after the policy has seen the whole queue a few times."""
    waiting = work.prompt_tokens.tolist()
    for _ in range(8):
        policy.adjust(waiting, _BATCH)
    return policy.edges


def _in_buckets(work: Workload, edges: Sequence[float], order: Order) -> tuple[float, ...]:
    """Batches bucket by bucket, the shortest prompts' first, in the order inside each."""
    bucket = np.searchsorted(np.array(edges[1:-1]), work.prompt_tokens, side="right")
    requests = work.requests()
    batches: list[list[Request]] = []
    for index in range(len(edges) - 1):
        own = [requests[row] for row in np.flatnonzero(bucket == index)]
        own.sort(key=lambda request: order.key(request.arrival_s, None, 0.0, request.prompt_tokens))
        batches += [own[start : start + _BATCH] for start in range(0, len(own), _BATCH)]
    times = PaddedTimes(times=_profile().times)
    now_s, waited_s = 0.0, 0.0
    for batch in batches:
        waited_s += now_s * len(batch)
        now_s += times.batch_s(batch)
    padded = sum(len(batch) * max(r.prompt_tokens for r in batch) for batch in batches)
    waste, tokens_per_s = 1.0 - sum(work.prompt_tokens.tolist()) / padded, float(work.output_tokens.sum()) / now_s
    return waste, tokens_per_s, waited_s / len(work), float(len(batches)), float(len(edges) - 1)


# UELLM reads and answers on each of the four GPUs, in padded batches by predicted length. The others read and answer on
# different ones: DistServe reads in order of arrival, with and without padding, BucketServe by bucket.
_SPLIT_SYSTEMS = {"DistServe": "no padding", "DistServe, padded": "first come"}
_SPLIT_SYSTEMS |= {f"BucketServe, {reader}": reader for reader in ("Algorithm 1", "adaptive")}
_GPUS = 4
_UELLM_BINS = 4
_OFFLINE_REQUESTS = 2400  # of fewer the last long answers take a third of the time


def baselines(setting: Setting) -> list[str]:
    """Figure 5a: all at once, output tokens/s of four GPUs; the paper: 3.58 times UELLM's, 1.31 times DistServe's."""
    rows = []
    for name in _NAMES:
        works = [_workload(setting, name, _OFFLINE_REQUESTS, seed, "noise:0.44") for seed in range(setting.runs)]
        rates = {"UELLM": mean([_coupled_rate(work) for work in works])}
        shown = [f"{rates['UELLM']:.0f}"]
        for system, reader in _SPLIT_SYSTEMS.items():
            by_readers = [mean([_split_rate(work, reader, n) for work in works]) for n in range(1, _GPUS)]
            rates[system] = max(by_readers)
            shown.append(f"{rates[system]:.0f} ({1 + int(np.argmax(by_readers))})")
        ours = max(rate for system, rate in rates.items() if system.startswith("BucketServe"))
        gains = (f"x{ours / rates[system]:.2f}" for system in ("UELLM", "DistServe", "DistServe, padded"))
        rows.append((name, *shown, *gains))
    heading = (
        "workload", "UELLM", *(f"{system} (GPUs that read)" for system in _SPLIT_SYSTEMS),
        "best over UELLM", "over DistServe", "over DistServe, padded",
    )  # fmt: skip
    return table(heading, rows)


def _coupled_rate(work: Workload) -> float:
    """Output tokens/s of padded batches that run until their longest answer ends, by predicted length."""
    rows = _most_rows(int((work.prompt_tokens + work.output_tokens).max()))
    config = GangConfig(batch_size=rows, max_wait_s=float("inf"))
    bins = MultiBinConfig(bins=_UELLM_BINS, batch_size=rows)
    finished = run_gang(config, bins, PaddedTimes(times=_profile().times), work, _GPUS)
    return float(work.output_tokens.sum()) / finished.makespan_s


def _split_rate(work: Workload, reader: str, reading: int) -> float:
    return float(work.output_tokens.sum() / _split(work, reader, reading, _GPUS - reading)[2].max())


def figure_5(setting: Setting) -> list[str]:
    """Figures 5c to 5f and 6a: SLO attainment and server rate by client rate, and where the time goes."""
    cases = [(name, reader, rate) for name in _NAMES for reader in _READERS for rate in _RATES[name]]
    points: dict[tuple[str, str], list[_Point]] = {}
    for case, point in zip(cases, setting.each(partial(_point, setting), cases), strict=True):
        points.setdefault(case[:2], []).append(point)
    _draw_attainment(setting, points)
    rates = "; ".join(f"{name} {', '.join(f'{rate:g}' for rate in _RATES[name])}" for name in _NAMES)
    heading = ("workload", "prompts read", "attainment", "server requests/s", "at 80 %", "wait + reading + answer, s")
    rows = ((*key, *_cells(found)) for key, found in points.items())
    return [f"Client rates: {rates} requests/s; seconds are means at the last of them.", "", *table(heading, rows)]


def _draw_attainment(setting: Setting, points: Mapping[tuple[str, str], Sequence["_Point"]]) -> None:
    for name in _NAMES:
        found = {reader: points[name, reader] for reader in _READERS}
        lines = {key: ([p.server_rate for p in each], [p.attainment for p in each]) for key, each in found.items()}
        title = f"002, figure 5: {name}"
        setting.draw(f"002_figure_5_{name}", lines, x="server requests/s", y="SLO attainment", title=title)


def _cells(points: Sequence["_Point"]) -> tuple[str, ...]:
    attained = " / ".join(f"{point.attainment:.0%}" for point in points)
    served = " / ".join(f"{point.server_rate:.1f}" for point in points)
    return attained, served, _capacity(points), " + ".join(f"{seconds:.2f}" for seconds in points[-1].seconds)


@dataclass(frozen=True, slots=True)
class _Point:
    """Attributes:
    server_rate: requests that end per second.
    seconds: on the mean until its batch is read, while it is, and from there to the end of the answer.
    """

    attainment: float
    server_rate: float
    seconds: tuple[float, float, float]


def _point(setting: Setting, case: tuple[str, str, float]) -> _Point:
    name, reader, rate = case
    runs = [
        _served(_workload(setting, name, _REQUESTS[name], seed), reader, rate, seed) for seed in range(setting.runs)
    ]
    wait, reading, answer = (mean([run.seconds[at] for run in runs]) for at in range(3))
    return _Point(mean([r.attainment for r in runs]), mean([r.server_rate for r in runs]), (wait, reading, answer))


def _capacity(points: Sequence[_Point], attainment: float = 0.8) -> str:
    """Server rate at which the share `attainment` meets its targets, interpolated between the rates that were tried."""
    for lower, upper in pairwise(points):
        if lower.attainment >= attainment > upper.attainment:
            share = (lower.attainment - attainment) / (lower.attainment - upper.attainment)
            return f"{lower.server_rate + share * (upper.server_rate - lower.server_rate):.2f}"
    return f"above {points[-1].server_rate:.2f}" if points[-1].attainment >= attainment else "below all"


def _served(work: Workload, reader: str, rate: float, seed: int) -> _Point:
    """What arrives at that rate."""
    arriving = work.arriving(poisson(rate, len(work), np.random.default_rng(seed)))
    started_s, first_s, last_s = _split(arriving, reader, _READING, _ANSWERING)
    seconds = (started_s - arriving.arrival_s, first_s - started_s, last_s - first_s)
    per_token_s = (last_s - first_s) / np.maximum(1, arriving.output_tokens - 1)
    targets = np.array([_TARGETS[label] for label in arriving.slo_class or [work.name] * len(work)])
    met = (first_s - arriving.arrival_s <= targets[:, 0]) & (per_token_s <= targets[:, 1])
    return _Point(mean(met.astype(float)), _middle_rate(last_s), (mean(seconds[0]), mean(seconds[1]), mean(seconds[2])))


def _split(work: Workload, reader: str, reading: int, answering: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """When each request's batch is begun to be read, when it is read, and when its answer ends: both halves, one after
    the other, for nothing that answers holds up what reads."""
    read = _read(work, reader, reading)
    first_s = np.array([request.finished_s for request in read])
    transfer = TransferTimes(overhead_s=0.0, s_per_token=kv_bytes_per_token(40, 40, 128, 2) / _NVLINK_BYTES_PER_S)
    moved_s = first_s + transfer.s_per_token * work.prompt_tokens
    answers = Workload.of(
        work.name, moved_s, work.prompt_tokens, work.output_tokens - 1, cached_tokens=work.prompt_tokens
    )
    config = _continuous(slots=256, replicas=answering)
    ended = sorted(run(config, answers).requests, key=lambda request: int(request.request_id[1:]))
    last_s = np.empty(len(work))
    last_s[np.argsort(moved_s, kind="stable")] = [moved_s.min() + (request.finished_s or 0.0) for request in ended]
    last_s = np.where(work.output_tokens > 1, last_s, first_s)
    return np.array([request.started_s for request in read]), first_s, last_s


def _most_rows(tokens: int) -> int:
    """How many requests of so many tokens equation 6 allows, at most as many as engines have slots."""
    return max_safe_requests([tokens] * 256, int(_SAFE_SHARE * (_profile().cache_tokens or 0)), padded=True)


def _read(work: Workload, reader: str, reading: int) -> list[Request]:
    """The prompts alone: as batches that end when they are read, of as many as equation 6 allows of the longest."""
    most = _most_rows(_MAX_TOKENS)
    rules: Mapping[str, AdaptiveBucketsConfig | BucketServeConfig] = {
        "Algorithm 1": BucketServeConfig(l_max=_MAX_TOKENS, max_buckets=16),
        "adaptive": AdaptiveBucketsConfig(),
    }
    buckets = PromptBuckets(rules[reader], refit_every=64, max_requests=most) if reader in rules else None
    one_row = PrefillConfig(row_tokens=1 << 30, max_pass_tokens=1 << 40)
    times = PaddedTimes(times=_profile().times, prefill=one_row if reader == "no padding" else PADDED)
    prompts = replace(work, output_tokens=np.ones_like(work.output_tokens))
    return run_gang(GangConfig(batch_size=most, max_wait_s=0.0), _ONE_BIN, times, prompts, reading, buckets).requests


def _middle_rate(ends_s: FloatArray) -> float:
    """Requests per second while the middle 60 % of them end: without filling up and running empty."""
    low_s, high_s = np.quantile(ends_s, (0.2, 0.8))
    return float(0.6 * len(ends_s) / (high_s - low_s))
