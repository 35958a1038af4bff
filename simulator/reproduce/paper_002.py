"""Paper 002 (Zheng et al., BucketServe): throughput, SLO attainment and padding waste, on padded batches.

Alpaca-like prompts are HaluEval's general queries, long ones arXiv summaries (the paper: LongBench), mixed half each.
Step times are OPT-13B's on an A100 (the paper: Llama2-13B on A100 40 GB). Bucketing is of prompts, in batches that run
padded until their longest answer ends; what the paper compares with (UELLM, DistServe) is not rebuilt, so its ratios
are not either. Beside it stands continuous batching, where nothing is padded.
"""

from itertools import product

import numpy as np

from policies.gang.batches import GangConfig
from policies.gang.buckets import (
    AdaptiveBuckets,
    AdaptiveBucketsConfig,
    BucketPolicy,
    BucketServeBuckets,
    BucketServeConfig,
    optimal_bucket_edges,
)
from simulator import plots
from simulator.cluster import ClusterConfig, run, run_gang
from simulator.engine import EngineConfig
from simulator.engines import EngineProfile, engine_profile
from simulator.gang import PaddedTimes
from simulator.reproduce.common import Setting, drawn, fixed_bins, mean, table
from simulator.requests import Request
from simulator.workload import Workload, mixed, poisson

_BATCH = 16
_MAX_TOKENS = 4096
_NAMES = ("alpaca", "long", "mixed")


def _profile() -> EngineProfile:
    return engine_profile("opt-13b@A100-80G")


def _workload(setting: Setting, name: str, count: int, seed: int) -> Workload:
    if name == "mixed":
        parts = (_workload(setting, part, count // 2, seed) for part in ("alpaca", "long"))
        both = mixed("mixed", *parts)
        return both.rows(np.random.default_rng(seed).permutation(len(both)))
    source = setting.workload("alpaca" if name == "alpaca" else "arxiv")
    return drawn(source, count, seed, "none", _MAX_TOKENS)


def offline(setting: Setting) -> list[str]:
    """All requests at once: padding waste and tokens per second without buckets, by Algorithm 1, by adaptive ones."""
    rows = []
    for name in _NAMES:
        results = [_offline(_workload(setting, name, 2048, seed)) for seed in range(setting.runs)]
        for label in results[0]:
            waste, tokens_per_s, batches, buckets = (mean([one[label][at] for one in results]) for at in range(4))
            rows.append((name, label, f"{buckets:.1f}", f"{waste:.1%}", f"{tokens_per_s:.0f}", f"{batches:.0f}"))
    return table(("workload", "batches", "buckets", "padding", "output tokens/s", "batches or steps"), rows)


def _offline(work: Workload) -> dict[str, tuple[float, ...]]:
    edges = {
        "one bucket": (0.0, float("inf")),
        "Algorithm 1": _adjusted(BucketServeBuckets(BucketServeConfig(l_max=_MAX_TOKENS)), work),
        "adaptive": _adjusted(AdaptiveBuckets(AdaptiveBucketsConfig()), work),
    }
    found = {name: _in_buckets(work, bounds) for name, bounds in edges.items()}
    stock = run(ClusterConfig(times=_profile().times, engine=_engine()), work)
    output = sum(request.output_tokens for request in stock.requests)
    steps = float(sum(engine.totals.steps for engine in stock.engines))
    return {**found, "continuous batching": (0.0, output / stock.makespan_s, steps, 1.0)}


def _engine() -> EngineConfig:
    return EngineConfig(slots=_BATCH, total_blocks=(_profile().cache_tokens or 0) // 16, max_batch_tokens=2048)


def _adjusted(policy: BucketPolicy, work: Workload) -> tuple[float, ...]:
    """The edges after the policy has seen the whole queue a few times."""
    waiting = work.prompt_tokens.tolist()
    for _ in range(8):
        policy.adjust(waiting, _BATCH)
    return policy.edges


def _in_buckets(work: Workload, edges: tuple[float, ...]) -> tuple[float, ...]:
    bucket = np.searchsorted(np.array(edges[1:-1]), work.prompt_tokens, side="right")
    requests = work.requests()
    batches: list[list[Request]] = []
    for index in range(len(edges) - 1):
        own = [requests[row] for row in np.flatnonzero(bucket == index)]
        batches += [own[start : start + _BATCH] for start in range(0, len(own), _BATCH)]
    times = PaddedTimes(times=_profile().times)
    seconds = sum(times.batch_s(batch) for batch in batches)
    padded = sum(len(batch) * max(r.prompt_tokens for r in batch) for batch in batches)
    waste = 1.0 - sum(work.prompt_tokens.tolist()) / padded
    return waste, float(work.output_tokens.sum()) / seconds, float(len(batches)), float(len(edges) - 1)


def online(setting: Setting) -> list[str]:
    """Poisson arrivals: share of requests that end within 10 s plus 0.1 s per token, by arrival rate."""
    rates = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
    rows = []
    for name in _NAMES:
        series: dict[str, tuple[list[float], list[float]]] = {}
        for label, rate in product(("one bucket", "4 buckets", "continuous batching"), rates):
            shares = [
                _attainment(label, _workload(setting, name, 600, seed), rate, seed) for seed in range(setting.runs)
            ]
            xs, ys = series.setdefault(label, ([], []))
            xs.append(rate)
            ys.append(mean(shares))
        rows += [(name, label, *(f"{y:.1%}" for y in ys)) for label, (_, ys) in series.items()]
        if (path := setting.figure(f"002_online_{name}")) is not None:
            plots.draw_lines(series, path, x="requests per second", y="attainment", title=f"002, {name}")
    return table(("workload", "batches", *(f"{rate}/s" for rate in rates)), rows)


def _attainment(label: str, work: Workload, rate: float, seed: int) -> float:
    arriving = work.arriving(poisson(rate, len(work), np.random.default_rng(seed)))
    if label == "continuous batching":
        return _share_met(run(ClusterConfig(times=_profile().times, engine=_engine()), arriving).requests)
    k = 4 if label == "4 buckets" else 1
    # The bins' assignment works on any length: here it is the prompt's, which makes them buckets.
    bins = fixed_bins(optimal_bucket_edges(work.prompt_tokens, k))
    by_prompt = _by_prompt(arriving)
    config = GangConfig(batch_size=_BATCH, max_wait_s=4.0)
    return _share_met(run_gang(config, bins, PaddedTimes(times=_profile().times), by_prompt).requests)


def _by_prompt(work: Workload) -> Workload:
    return Workload.of(
        work.name,
        work.arrival_s,
        work.prompt_tokens,
        work.output_tokens,
        predicted_output_tokens=work.prompt_tokens.astype(np.float64),
    )


def _share_met(requests: list[Request]) -> float:
    return mean([float((r.latency_s or 0.0) <= 10.0 + 0.1 * r.output_tokens) for r in requests])
