"""Paper 000 (Guldogan et al., Multi-Bin Batching), figures 1a, 3 to 6, 8 and 9, and its batches under vLLM."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from policies.gang.batches import GangConfig
from policies.papers.bin_worth import (
    exponential_service_bound,
    latency_uniform,
    throughput_uniform,
    throughput_uniform_with_errors,
)
from policies.router.bin_edges import equal_mass_edges, exponential_edges, optimal_edges, uniform_edges
from policies.types import FloatArray
from simulator.cluster import ClusterConfig, GangRun, run, run_gang
from simulator.gang import LengthTimes
from simulator.predictors import predicted
from simulator.reproduce.common import (
    Setting,
    cluster,
    fixed_bins,
    mean,
    mean_ttft_s,
    output_rate,
    spread,
    table,
    walk_forward,
)
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, poisson, synthetic

# Tokens per unit of the paper's time: lengths are whole tokens here.
UNIT = 1000
_TIMES = LengthTimes(s_per_token=1.0 / UNIT)
_REQUESTS = 128_000


def _full(batch_size: int) -> GangConfig:
    return GangConfig(batch_size=batch_size, max_wait_s=math.inf)


def _uniform(k: int, rate: float, seed: int, error: float = 0.0) -> GangRun:
    rng = np.random.default_rng(seed)
    law = length_law(f"uniform:{UNIT}:{20 * UNIT}")
    drawn = synthetic("uniform", length_law("constant:1"), law, _REQUESTS, rng)
    arriving = drawn.arriving(poisson(rate, _REQUESTS, rng))
    work = predicted(arriving, f"neighbour:{k}:{error}" if error and k > 1 else "oracle", rng)
    return run_gang(_full(128), fixed_bins(uniform_edges(k, UNIT, 20 * UNIT)), _TIMES, work)


def _throughput(job: tuple[int, float, int]) -> float:
    return _uniform(*job).throughput


def _latency(job: tuple[int, float, int]) -> float:
    return _uniform(*job).mean_latency_s


def _with_errors(job: tuple[int, float, int]) -> float:
    """Throughput of all requests at once."""
    k, error, seed = job
    return _uniform(k, 1e6, seed, error).throughput


# The paper's GPU by published step times, and another by kernel times that were measured one by one.
_ENGINES = ("Llama-3.1-8B@a100_sxm", "kernels_rtxpro6000_llama-3.1-8b")
_ROOMY_TOKENS = 500_000


def _engine(name: str, slots: int, **changes: Any) -> ClusterConfig:
    return cluster(name, slots=slots, cache_tokens=_ROOMY_TOKENS, **changes)


def figure_1a(setting: Setting) -> list[str]:
    """Tokens per second against the size of a batch: prompts of 100 tokens, answers of 250, an 8B model on two GPUs."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    rates = {name: [_batch_rate(name, size) for size in sizes] for name in _ENGINES}
    series = {name: (sizes, found) for name, found in rates.items()}
    setting.draw("000_figure_1a", series, x="batch size", y="output tokens per second", title="000 figure 1a")
    rows = [
        (size, *(text for name in _ENGINES for text in _rate_cells(rates[name], i))) for i, size in enumerate(sizes)
    ]
    heading = [column for name in _ENGINES for column in (f"tokens/s, {name}", "against 1")]
    return table(("batch size", *heading), rows)


def _rate_cells(rates: Sequence[float], at: int) -> tuple[str, str]:
    return f"{rates[at]:.0f}", f"x{rates[at] / rates[0]:.1f}"


def _batch_rate(name: str, size: int) -> float:
    alike = synthetic("alike", length_law("constant:100"), length_law("constant:250"), size, np.random.default_rng(0))
    return output_rate(run(_engine(name, size), alike))


def figure_5(setting: Setting) -> list[str]:
    """Time of an answer against its tokens: answers to GSM8K, each alone on the engine, and the line through them."""
    tokens = np.unique(setting.workload("gsm8k").output_tokens)
    rows, series = [], dict[str, tuple[Sequence[float], Sequence[float]]]()
    for name in _ENGINES:
        times_s = np.array(setting.each(partial(_alone_s, name), tokens.tolist()))
        slope, intercept = np.polyfit(tokens, times_s, 1)
        line = intercept + slope * tokens
        unexplained = float(((times_s - line) ** 2).sum() / ((times_s - times_s.mean()) ** 2).sum())
        largest = float(np.abs(times_s - line).max() / times_s.mean())
        rows.append((name, f"{1e3 * slope:.2f}", f"{1e3 * intercept:.1f}", f"{1 - unexplained:.6f}", f"{largest:.2%}"))
        series[name] = (tokens.tolist(), times_s.tolist())
    setting.draw("000_figure_5", series, x="tokens of the answer", y="seconds", title="000 figure 5")
    return table(("engine", "ms per token", "intercept, ms", "R squared", "largest distance / mean time"), rows)


def _alone_s(name: str, output_tokens: int) -> float:
    one = Workload.of("one", np.zeros(1), np.full(1, 100), np.full(1, output_tokens))
    return run(_engine(name, 1), one).makespan_s


_BATCH = 32
_WAYS: tuple[tuple[str, int, float], ...] = (
    ("1 bin", 1, 0.0), ("4 bins", 4, 0.0), ("4 bins, shortest first", 4, 60.0),
)  # fmt: skip


def dispatch(setting: Setting) -> list[str]:
    """Whole batches of 32 to an engine with continuous batching against single requests to its 32 slots."""
    rng = np.random.default_rng(0)
    made_up = synthetic("made up", length_law("lognormal:600:1"), length_law("lognormal:250:0.8"), 8000, rng)
    sources = {"azure_conv": setting.workload("azure_conv"), "made up": made_up}
    known = {"known": "oracle", "predicted": "noise:0.44"}
    found = setting.grid(partial(_dispatched, sources), list(sources), list(known.values()))
    rows = []
    for (name, source), (kind, predictions) in product(zip(sources, found, strict=True), enumerate(known)):
        single, *batched = np.moveaxis(source[kind], 1, 0)
        rows.append(
            (name, predictions, "single requests", f"{mean(single[:, 0]):.0f}", "", f"{mean(single[:, 1]):.2f}")
        )
        for (label, _, _), each in zip(_WAYS, batched, strict=True):
            shown = (f"{mean(each[:, 0]):.0f}", f"x{spread(each[:, 0] / single[:, 0])}", f"{mean(each[:, 1]):.2f}")
            rows.append((name, predictions, f"batches, {label}", *shown))
    heading = (
        "lengths", "predictions", "dispatch", "output tokens/s, all at once", "against single",
        "mean first token at half that load, s",
    )  # fmt: skip
    return table(heading, rows)


def _dispatched(sources: Mapping[str, Workload], job: tuple[str, str, int]) -> list[tuple[float, float]]:
    """Tokens per second and mean time to the first token, of single requests and of each way to form batches."""
    name, predictor, seed = job
    rng = np.random.default_rng(seed)
    ((past, later),) = walk_forward(sources[name], 2)
    work = predicted(later.sample(2000, rng).without_prefixes(), predictor, rng)
    single = run(_engine(_ENGINES[1], _BATCH), work)
    arriving = work.arriving(poisson(0.5 * len(work) / single.makespan_s, len(work), rng))
    found = [(output_rate(single), mean_ttft_s(run(_engine(_ENGINES[1], _BATCH), arriving)))]
    for _, k, patience_s in _WAYS:
        batches = GangConfig(batch_size=_BATCH, max_wait_s=1.0, patience_s=patience_s)
        bins = fixed_bins(optimal_edges(past.output_tokens, k, _BATCH, resolution=512))
        config = _engine(_ENGINES[1], _BATCH, bins=bins, router=RouterConfig(batches=batches))
        found.append((output_rate(run(config, work)), mean_ttft_s(run(config, arriving))))
    return found


def figure_3(setting: Setting) -> list[str]:
    """Throughput against arrival rate; B = 128, lengths uniform on [1, 20], one server."""
    bins, rates = (1, 2, 3, 4, 5), (2.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 14.0)
    found = setting.grid(_throughput, bins, rates).mean(axis=2)
    _draw(setting, "000_figure_3", bins, rates, found, "throughput", _throughput_line)
    rows = [
        (k, float(line.max()), _most(k), f"{line.max() / _most(k) - 1:+.2%}")
        for k, line in zip(bins, found, strict=True)
    ]
    return table(("k", "highest throughput, simulated", "Theorem 4.2", "difference"), rows)


def _most(k: int) -> float:
    return throughput_uniform(k, 128, 1.0, 20.0)


def _throughput_line(k: int, rate: float) -> float:
    return min(rate, _most(k))


def _draw(
    setting: Setting,
    name: str,
    bins: Sequence[int],
    rates: Sequence[float],
    found: FloatArray,
    y: str,
    formula: Callable[[int, float], float] | None,
) -> None:
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for k, line in zip(bins, found, strict=True):
        series[f"k = {k}"] = (rates, line.tolist())
        if formula is not None:
            series[f"formula, k = {k}"] = (rates, [formula(k, rate) for rate in rates])
    setting.draw(name, series, x="arrival rate", y=y, title=name.replace("_", " "))


def figure_4(setting: Setting) -> list[str]:
    """Latency against arrival rate; B = 128, lengths uniform on [1, 20], one server, k = 1, 2, 3."""
    bins, rates = (1, 2, 3), (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    found = setting.grid(_latency, bins, rates).mean(axis=2)
    _draw(setting, "000_figure_4", bins, rates, np.minimum(found, 300.0), "latency (cut at 300)", _latency_line)
    rows = [
        (k, rate, float(latency), _latency_line(k, rate), f"{latency / _latency_line(k, rate) - 1:+.1%}")
        for k, line in zip(bins, found, strict=True)
        for rate, latency in zip(rates, line, strict=True)
        if rate in (1.0, 3.0, 6.0)
    ]
    return table(("k", "arrival rate", "latency, simulated", "Lemma 5.1", "difference"), rows)


def _latency_line(k: int, rate: float) -> float:
    return latency_uniform(k, 128, 1.0, 20.0, rate)


def figure_6(setting: Setting) -> list[str]:
    """Throughput and latency of 8 servers with B = 8 on answers to GSM8K, equiprobable bins, oracle lengths."""
    source = setting.workload("gsm8k")
    bins, rates = (1, 2, 4, 8, 16, 32), (2.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0)
    throughput, latency = np.moveaxis(setting.grid(partial(_gsm8k, source), bins, rates).mean(axis=2), 2, 0)
    _draw(setting, "000_figure_6_throughput", bins, rates, throughput, "requests per second", None)
    _draw(setting, "000_figure_6_latency", bins, rates, np.minimum(latency, 60.0), "latency, s (cut at 60)", None)
    best, most = latency.argmin(axis=1), throughput.max(axis=1)
    rows = [
        (k, float(most[i]), f"x{most[i] / most[0]:.2f}", float(latency[i].min()), rates[best[i]])
        for i, k in enumerate(bins)
    ]
    return table(("k", "highest requests/s", "against k = 1", "least mean latency, s", "at rate"), rows)


def _gsm8k(source: Workload, job: tuple[int, float, int]) -> tuple[float, float]:
    (k, rate, seed), count = job, 16_000
    rng = np.random.default_rng(seed)
    work = predicted(source.sample(count, rng).arriving(poisson(rate, count, rng)), "oracle", rng)
    bins = fixed_bins(equal_mass_edges(work.output_tokens, k))
    result = run_gang(_full(8), bins, LengthTimes(s_per_token=0.025), work, replicas=8)
    return result.throughput, result.mean_latency_s


def figure_8(setting: Setting) -> list[str]:
    """Throughput against the error probability; B = 128, lengths uniform on [1, 20], all requests at once."""
    bins, errors = (1, 2, 3, 4, 5), (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    found = setting.grid(_with_errors, bins, errors).mean(axis=2)
    _draw(setting, "000_figure_8", bins, errors, found, "throughput", _error_line)
    rows = []
    for k, line in zip(bins, found, strict=True):
        off = max(abs(value / _error_line(k, error) - 1) for error, value in zip(errors, line, strict=True))
        rows.append((k, *(float(line[errors.index(error)]) for error in (0.01, 0.1, 0.5)), f"{off:.2%}"))
    return table(("k", "p_e = 0.01", "p_e = 0.1", "p_e = 0.5", "largest distance from the closed form"), rows)


def _error_line(k: int, error: float) -> float:
    return throughput_uniform_with_errors(k, 128, 1.0, 20.0, error)


def figure_9(setting: Setting) -> list[str]:
    """Throughput and latency for exponential lengths, mu = 0.1, B = 200, N = 200 000, edges of Lemma A.1."""
    bins, rates = (1, 2, 3, 4, 5), (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0)
    throughput, latency = np.moveaxis(setting.grid(_exponential, bins, rates).mean(axis=2), 2, 0)
    _draw(setting, "000_figure_9a", bins, rates, throughput, "throughput", _exponential_line)
    _draw(setting, "000_figure_9b", bins, rates, np.minimum(latency, 1500.0), "latency (cut at 1500)", None)
    rows = [
        (k, float(line.max()), 200.0 / exponential_service_bound(k, 0.1, 200), mean(latency[i][:2]))
        for i, (k, line) in enumerate(zip(bins, throughput, strict=True))
    ]
    heading = ("k", "highest throughput, simulated", "bound of equation 60 (corrected)", "latency at rates 1, 2")
    return table(heading, rows)


def _exponential_line(k: int, rate: float) -> float:
    return min(rate, 200.0 / exponential_service_bound(k, 0.1, 200))


def _exponential(job: tuple[int, float, int]) -> tuple[float, float]:
    (k, rate, seed), count = job, 200_000
    rng = np.random.default_rng(seed)
    drawn = synthetic("exponential", length_law("constant:1"), length_law(f"exponential:{10 * UNIT}"), count, rng)
    work = predicted(drawn.arriving(poisson(rate, count, rng)), "oracle", rng)
    result = run_gang(_full(200), fixed_bins(exponential_edges(k, 0.1 / UNIT, 200)), _TIMES, work)
    return result.throughput, result.mean_latency_s
