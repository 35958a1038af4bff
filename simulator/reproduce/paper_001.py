"""Paper 001 (Pang, Li, Wang, memory-aware and SLA-constrained dynamic batching): tables I and II, figures 3 and 4.

The paper names neither its GPUs nor its length laws; only means are printed. Taken here: step times of Llama2-70B on
8 A100 (table I) and on 4 H100 (table II, whose 29.4 ms + 0.232 ms per request is the nearest to its figure 3), lengths
lognormal with a sigma of 0.7 where the paper used prompts of its own, constant where it says 128/128. Static batching
is vLLM's default of 256 slots; its dynamic counterpart may use 1024. The 38B and 135B models have no profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from simulator.cluster import ClusterConfig, run
from simulator.engines import engine_profile
from simulator.predictors import predicted
from simulator.reproduce.common import Setting, cluster, mean, output_rate, spread, steady_rate, table
from simulator.router import RouterConfig
from simulator.workload import Workload, arrival_law, length_law, synthetic

_SLA_S = 0.050


class _Row(NamedTuple):
    """A line of a table: what the paper used and found, and what stands for it here."""

    model: str
    prompts: str
    outputs: str
    requests: int
    engine: str
    cache_tokens: int
    static: str
    dynamic: str


# Cache of a 65B model with all heads: (0.9 * 640 GB - 130 GB) / 2.62 MB; of PanGu-7B: (72 GB - 15 GB) / 0.52 MB.
_A100S, _H100S = "llama2-70b@a100-80gb/8", "llama2-70b@h100-80gb/4"
_TABLE_1 = (
    _Row("LLaMA-65B", "lognormal:68.4:0.7", "lognormal:344.5:0.7", 1319, _A100S, 170_000, "1983", "2146 (+8.2 %)"),
    _Row("LLaMA3-70B", "lognormal:68.4:0.7", "lognormal:454.4:0.7", 1319, _A100S, 1_300_000, "3153", "3357 (+6.5 %)"),
    _Row("LLaMA3-70B", "lognormal:191:0.7", "lognormal:381.9:0.7", 3000, _A100S, 1_300_000, "2296", "2575 (+12.2 %)"),
    _Row("PanGu-7B", "constant:128", "constant:128", 1000, "Llama-3.1-8B@a100_sxm", 108_000, "2305", "2956 (+28.2 %)"),
)
_TABLE_2 = (
    _Row("LLaMA-65B", "lognormal:237.7:0.7", "lognormal:416.2:0.7", 3000, _H100S, 60_000, "3.0", "3.3"),
    _Row("LLaMA3-70B", "lognormal:256.6:0.7", "lognormal:61.5:0.7", 3000, _H100S, 457_000, "5.4", "6.6"),
    _Row("LLaMA3-70B", "lognormal:256.6:0.7", "lognormal:447.5:0.7", 3000, _H100S, 457_000, "3.0", "3.8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    batch: str
    slots: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, row: _Row) -> ClusterConfig:
        return cluster(
            row.engine,
            slots=self.slots,
            cache_tokens=row.cache_tokens,
            max_batch_tokens=8192,
            clock=None,
            batch=self.batch,
            batch_settings=self.settings,
            router=RouterConfig(credit_lookahead=None),
        )


_STATIC = _System(batch="stock", slots=256)
_ALL_SLOTS = _System(batch="stock", slots=1024)
_MEMORY = _System(batch="memory_aware", slots=1024)
_FORECAST = _System(batch="forecast_admission", slots=1024)
_LITERAL = _System(batch="sla_constrained_literal", slots=512, settings={"itl_target_s": _SLA_S, "max_batch_size": 512})
_CORRECTED = _System(batch="sla_constrained", slots=512, settings={"itl_target_s": _SLA_S})


def _workload(row: _Row, seed: int, arrivals: str) -> Workload:
    rng = np.random.default_rng(seed)
    made = synthetic(row.model, length_law(row.prompts), length_law(row.outputs), row.requests, rng)
    return predicted(made.arriving(arrival_law(arrivals)(row.requests, rng)), "none", rng)


def _tokens_per_s(job: tuple[_Row, _System, int]) -> float:
    row, system, seed = job
    return output_rate(run(system.config(row), _workload(row, seed, "all")))


def table_1(setting: Setting) -> list[str]:
    """Output tokens per second, all requests at once: static batch of 256 against Algorithm 1."""
    systems = (_STATIC, _MEMORY, _FORECAST, _ALL_SLOTS)
    rows = []
    for row, results in zip(_TABLE_1, setting.grid(_tokens_per_s, _TABLE_1, systems), strict=True):
        gains = [f"{spread(100 * (each / results[0] - 1))} %" for each in results[1:]]
        rows.append((row.model, row.static, row.dynamic, f"{mean(results[0]):.0f}", *gains))
    heading = (
        "model", "paper: static", "paper: dynamic", "simulated: static", "eq. 12", "forecast", "1024 slots, no policy"
    )  # fmt: skip
    return table(heading, rows)


# Figure 3's line of decoding times, read off; the text has 50 ms, 1900 tokens/s at 100 requests, 80 and 2700 at 230.
_PAPER_OVERHEAD_S, _PAPER_S_PER_REQUEST = 26.92e-3, 0.2308e-3
_PRINTED = {100: "1900", 230: "2700"}
_FIGURE_3_BATCHES = (1, 16, 32, 64, 100, 128, 160, 192, 230, 256)


def _full_batch(job: tuple[int, int]) -> tuple[float, float]:
    """Decoding time (seconds between two tokens, mean over requests) and output tokens/s with that many slots full."""
    slots, seed = job
    row = _TABLE_2[2]
    system = _System(batch="stock", slots=slots)
    config = replace(system.config(row), clients=2 * slots)
    finished = run(config, _workload(row._replace(requests=max(200, 8 * slots)), seed, "all"))
    tpot_s = mean([request.tpot_s for request in finished.requests if request.tpot_s is not None])
    return tpot_s, steady_rate(finished) * mean([request.output_tokens for request in finished.requests])


def figure_3(setting: Setting) -> list[str]:
    """Decoding time and output tokens per second against the batch size, static batches of the 70B model."""
    sizes = _FIGURE_3_BATCHES
    tpot_s, rates = setting.grid(_full_batch, sizes).mean(axis=1).T
    paper_s = np.array([_PAPER_OVERHEAD_S + _PAPER_S_PER_REQUEST * slots for slots in sizes])
    paper_rates = np.array(sizes) / paper_s
    drawn = {"decoding_time": ("seconds per token", paper_s, tpot_s), "throughput": ("tokens/s", paper_rates, rates)}
    for name, (y, paper, ours) in drawn.items():
        lines = {"formula: paper": (sizes, paper), "simulated": (sizes, ours)}
        setting.draw(f"001_figure_3_{name}", lines, x="batch size", y=y, title="001, figure 3")
    step = engine_profile(_TABLE_2[2].engine).times.decode
    heading = (
        "batch size", "paper: decoding time, ms", "decode step here, ms", "with prefills between, ms",
        "paper: tokens/s, eq. 6", "paper: tokens/s, printed", "simulated, with prefills",
    )  # fmt: skip
    times_ms = [(1e3 * paper_s[i], 1e3 * step.step_s(decode_requests=n), 1e3 * tpot_s[i]) for i, n in enumerate(sizes)]
    rows = [
        (n, *(f"{each:.1f}" for each in times_ms[i]), f"{paper_rates[i]:.0f}", _PRINTED.get(n, ""), f"{rates[i]:.0f}")
        for i, n in enumerate(sizes)
    ]
    return table(heading, rows)


_FIGURE_4_RATES = (2.0, 4.0, 5.4, 6.6, 8.0, 9.0, 10.0, 11.0)
_PAPER_CAPACITY = {"static": 5.4, "Algorithm 2 as printed": 6.6, "Algorithm 2, corrected": 6.6}


def _pace(job: tuple[_System, float, int]) -> tuple[float, float]:
    """Mean seconds per token, and the median wait, at that rate of the second row of table II."""
    system, rate, seed = job
    return _tpot_and_wait_s(_TABLE_2[1], system, seed, rate)


def figure_4(setting: Setting) -> list[str]:
    """Mean time per token against the rate, SLA 50 ms: static batch against Algorithm 2; the 70B model, 256.6/61.5."""
    systems = {"static": _STATIC, "Algorithm 2 as printed": _LITERAL, "Algorithm 2, corrected": _CORRECTED}
    found = setting.grid(_pace, list(systems.values()), _FIGURE_4_RATES).mean(axis=2)
    lines = {name: (_FIGURE_4_RATES, each[:, 0]) for name, each in zip(systems, found, strict=True)}
    lines["formula: SLA"] = (_FIGURE_4_RATES, [_SLA_S] * len(_FIGURE_4_RATES))
    setting.draw("001_figure_4", lines, x="requests/s", y="mean seconds per token", title="001, figure 4")
    rows = [
        (name, _PAPER_CAPACITY[name], *(f"{1e3 * tpot_s:.0f} / {wait_s:.1f}" for tpot_s, wait_s in each))
        for name, each in zip(systems, found, strict=True)
    ]
    return table(("batch", "paper: capacity", *(f"{rate:g}/s" for rate in _FIGURE_4_RATES)), rows)


def _meets(row: _Row, system: _System, seed: int, rate: float) -> bool:
    """Mean time per token within the SLA, and a median wait of at most 2 s (the capacity of Sarathi-Serve)."""
    tpot_s, wait_s = _tpot_and_wait_s(row, system, seed, rate)
    return tpot_s <= _SLA_S and wait_s <= 2.0


def _tpot_and_wait_s(row: _Row, system: _System, seed: int, rate: float) -> tuple[float, float]:
    """Mean seconds per token, and the median wait until a request starts."""
    finished = run(system.config(row), _workload(row, seed, f"poisson:{rate}"))
    tpot_s = [request.tpot_s for request in finished.requests if request.tpot_s is not None]
    waits = [(request.started_s or 0.0) - request.arrival_s for request in finished.requests]
    return mean(tpot_s), float(np.median(waits))


def _capacity(job: tuple[_Row, _System, int]) -> float:
    """The highest rate that meets, by bisection to 3 %."""
    row, system, seed = job
    meets = partial(_meets, row, system, seed)
    low, high = 0.1, 0.2
    while meets(high):
        low, high = high, 2.0 * high
    while high / low > 1.03:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _rate_without_waits(job: tuple[_Row, _System, int]) -> tuple[float, float]:
    """Requests per second with all of them there at once, and their mean seconds per token."""
    row, system, seed = job
    finished = run(system.config(row), _workload(row, seed, "all"))
    tpot_s = mean([request.tpot_s for request in finished.requests if request.tpot_s is not None])
    return steady_rate(finished), tpot_s


def _at_once(row: _Row, rate: float) -> float:
    """Requests that decode at that rate and the SLA's time per token, by Little's law."""
    return rate * float(row.outputs.split(":")[1]) * _SLA_S


def table_2(setting: Setting) -> list[str]:
    """Requests per second within 50 ms per token: static batch of 256 against Algorithm 2, printed and corrected."""
    systems = (_STATIC, _LITERAL, _CORRECTED)
    endless = setting.grid(_rate_without_waits, _TABLE_2, (_CORRECTED,)).mean(axis=2)[:, 0]
    rows = []
    for row, results, full in zip(_TABLE_2, setting.grid(_capacity, _TABLE_2, systems), endless, strict=True):
        ours = [spread(each) for each in results]
        lengths = f"{row.prompts.split(':')[1]} / {row.outputs.split(':')[1]}"
        paper = float(row.static), float(row.dynamic)
        shown = f"{paper[0]} -> {paper[1]} ({paper[1] / paper[0] - 1:+.0%})"
        batches = " -> ".join(f"{_at_once(row, rate):.0f}" for rate in paper)
        gain = f"{mean(results[2]) / mean(results[0]) - 1:+.0%}"
        rows.append((row.model, lengths, shown, batches, *ours, gain, f"{full[0]:.2f} at {1e3 * full[1]:.0f} ms"))
    heading = (
        "model", "prompt / output tokens", "paper: static -> dynamic", "requests at once, by Little's law",
        "simulated: static", "Algorithm 2 as printed", "corrected", "gain", "corrected, with an endless queue",
    )  # fmt: skip
    return table(heading, rows)


def _used(job: tuple[_Row, _System, int]) -> tuple[float, float, float]:
    """Means over the time: requests in a step, share of the cache, and share of the time that its tokens would take
    if a GPU computed as fast as it reads prompts, without waiting for memory."""
    row, system, seed = job
    finished = run(system.config(row), _workload(row, seed, "all"))
    engine = finished.engines[0]
    totals = engine.totals
    computed_s = engine_profile(row.engine).times.prefill.prefill_s * (totals.prefill_tokens + totals.decode_tokens)
    share = totals.blocks_s / (totals.busy_s * engine.config.total_blocks)
    return totals.batch_s / totals.busy_s, share, computed_s / totals.busy_s


def utilization(setting: Setting) -> list[str]:
    """Section III-A: how much of batch, cache and computing power table I's systems use (the paper: 40 to 50 %)."""
    systems = (_STATIC, _MEMORY, _FORECAST, _ALL_SLOTS)
    rows = [
        (row.model, *(f"{batch:.0f}, {cache:.0%}, {computed:.0%}" for batch, cache, computed in found))
        for row, found in zip(_TABLE_1, setting.grid(_used, _TABLE_1, systems).mean(axis=2), strict=True)
    ]
    return table(("model", "static", "eq. 12", "forecast", "1024 slots, no policy"), rows)


# Of a token, on all GPUs together: 2 x 2 bytes, layers and the width of keys.
_KV_BYTES = {"LLaMA-65B": 80 * 8192 * 4, "LLaMA3-70B": 80 * 1024 * 4, "PanGu-7B": 32 * 4096 * 4}
_PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 with 16 lanes, of which each GPU has its own, as copies reach it


def _lost(job: tuple[_Row, _System, int]) -> tuple[float, float, float]:
    """Preemptions, tokens whose keys and values they lost, and seconds in all."""
    row, system, seed = job
    finished = run(system.config(row), _workload(row, seed, "all"))
    totals = finished.engines[0].totals
    return totals.preemptions, totals.recomputed_tokens, finished.makespan_s


def swapping(setting: Setting) -> list[str]:
    """Section II: what preempted requests cost if they are computed again, and if they are swapped out and in."""
    systems = {"static": _STATIC, "1024 slots, no policy": _ALL_SLOTS, "eq. 12": _MEMORY}
    rows = []
    found = setting.grid(_lost, _TABLE_1, list(systems.values())).mean(axis=2)
    for row, results in zip(_TABLE_1, found, strict=True):
        again_s, swapped_s = _token_costs_s(row)
        for name, (preemptions, tokens, seconds) in zip(systems, results.tolist(), strict=True):
            shares = (f"{tokens * each_s / seconds:.2%}" for each_s in (again_s, swapped_s))
            costs = f"{1e6 * again_s:.0f} / {1e6 * swapped_s:.0f}"
            rows.append((row.model, costs, name, f"{preemptions:.0f}", f"{tokens:.0f}", *shares))
    heading = (
        "model", "us a token: again / swapped", "batch", "preemptions", "tokens lost", "time: computed again", "swapped"
    )  # fmt: skip
    return table(heading, rows)


def _token_costs_s(row: _Row) -> tuple[float, float]:
    """Seconds for a lost token: computed again in a full prefill; moved over PCIe to the host and back."""
    profile = engine_profile(row.engine)
    swapped_s = 2.0 * _KV_BYTES[row.model] / (_PCIE_BYTES_PER_S * profile.gpus)
    return profile.times.prefill.prefill_s, swapped_s
