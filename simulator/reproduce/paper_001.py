"""Paper 001 (Pang, Li, Wang, memory-aware and SLA-constrained dynamic batching): tables I and II, figures 3 and 4.

The paper names neither its GPUs nor its length laws; only means are printed. Taken here: step times of Llama2-70B on
8 A100 (table I) and on 4 H100 (table II, whose 29.4 ms + 0.232 ms per request is the nearest to its figure 3), lengths
lognormal with a sigma of 0.7 where the paper used prompts of its own, constant where it says 128/128. Static batching
is vLLM's default of 256 slots; its dynamic counterpart may use 1024. The 38B and 135B models have no profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.plots import draw_lines
from simulator.predictors import predicted
from simulator.reproduce.common import Setting, mean, spread, steady_rate, table
from simulator.router import RouterConfig
from simulator.workload import Workload, arrival_law, length_law, synthetic

_SLA_S = 0.050


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A line of a table: what the paper used, and what stands for it here."""

    model: str
    prompts: str
    outputs: str
    requests: int
    engine: str
    cache_tokens: int
    static: str
    dynamic: str


# Cache of a 65B model with all heads: (0.9 * 640 GB - 130 GB) / 2.62 MB; of PanGu-7B: (72 GB - 15 GB) / 0.52 MB.
_TABLE_1 = (
    _Row(
        model="LLaMA-65B", prompts="lognormal:68.4:0.7", outputs="lognormal:344.5:0.7", requests=1319,
        engine="llama2-70b@a100-80gb/8", cache_tokens=170_000, static="1983", dynamic="2146 (+8.2 %)",
    ),
    _Row(
        model="LLaMA3-70B", prompts="lognormal:68.4:0.7", outputs="lognormal:454.4:0.7", requests=1319,
        engine="llama2-70b@a100-80gb/8", cache_tokens=1_300_000, static="3153", dynamic="3357 (+6.5 %)",
    ),
    _Row(
        model="LLaMA3-70B", prompts="lognormal:191:0.7", outputs="lognormal:381.9:0.7", requests=3000,
        engine="llama2-70b@a100-80gb/8", cache_tokens=1_300_000, static="2296", dynamic="2575 (+12.2 %)",
    ),
    _Row(
        model="PanGu-7B", prompts="constant:128", outputs="constant:128", requests=1000,
        engine="Llama-3.1-8B@a100_sxm", cache_tokens=108_000, static="2305", dynamic="2956 (+28.2 %)",
    ),
)  # fmt: skip
_TABLE_2 = (
    _Row(
        model="LLaMA-65B", prompts="lognormal:237.7:0.7", outputs="lognormal:416.2:0.7", requests=3000,
        engine="llama2-70b@h100-80gb/4", cache_tokens=60_000, static="3.0", dynamic="3.3",
    ),
    _Row(
        model="LLaMA3-70B", prompts="lognormal:256.6:0.7", outputs="lognormal:61.5:0.7", requests=3000,
        engine="llama2-70b@h100-80gb/4", cache_tokens=457_000, static="5.4", dynamic="6.6",
    ),
    _Row(
        model="LLaMA3-70B", prompts="lognormal:256.6:0.7", outputs="lognormal:447.5:0.7", requests=3000,
        engine="llama2-70b@h100-80gb/4", cache_tokens=457_000, static="3.0", dynamic="3.8",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _System:
    batch: str
    slots: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def config(self, row: _Row) -> ClusterConfig:
        profile = engine_profile(row.engine)
        engine = EngineConfig(slots=self.slots, total_blocks=row.cache_tokens // 16)
        router = RouterConfig(credit_lookahead=None)
        return ClusterConfig(
            times=profile.times, engine=engine, batch=self.batch, batch_settings=self.settings, router=router
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
    finished = run(system.config(row), _workload(row, seed, "all"))
    return sum(request.output_tokens for request in finished.requests) / finished.makespan_s


def table_1(setting: Setting) -> list[str]:
    """Output tokens per second, all requests at once: static batch of 256 against Algorithm 1."""
    systems = (_STATIC, _MEMORY, _FORECAST, _ALL_SLOTS)
    jobs = [(row, system, seed) for row in _TABLE_1 for system in systems for seed in range(setting.runs)]
    found = np.array(setting.each(_tokens_per_s, jobs)).reshape(len(_TABLE_1), len(systems), setting.runs)
    rows = []
    for row, results in zip(_TABLE_1, found, strict=True):
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
    finished = run(config, _workload(replace(row, requests=max(200, 8 * slots)), seed, "all"))
    tpot_s = mean([request.tpot_s for request in finished.requests if request.tpot_s is not None])
    return tpot_s, steady_rate(finished) * mean([request.output_tokens for request in finished.requests])


def figure_3(setting: Setting) -> list[str]:
    """Decoding time and output tokens per second against the batch size, static batches of the 70B model."""
    sizes = _FIGURE_3_BATCHES
    jobs = [(slots, seed) for slots in sizes for seed in range(setting.runs)]
    tpot_s, rates = np.array(setting.each(_full_batch, jobs)).reshape(len(sizes), setting.runs, 2).mean(axis=1).T
    paper_s = np.array([_PAPER_OVERHEAD_S + _PAPER_S_PER_REQUEST * slots for slots in sizes])
    paper_rates = np.array(sizes) / paper_s
    drawn = {"decoding_time": ("seconds per token", paper_s, tpot_s), "throughput": ("tokens/s", paper_rates, rates)}
    for name, (y, paper, ours) in drawn.items():
        if path := setting.figure(f"001_figure_3_{name}"):
            lines = {"formula: paper": (sizes, paper), "simulated": (sizes, ours)}
            draw_lines(lines, path, x="batch size", y=y, title="001, figure 3")
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


def _pace(job: tuple[_System, int, float]) -> tuple[float, float]:
    """Mean seconds per token, and the median wait, at that rate of the second row of table II."""
    system, seed, rate = job
    return _tpot_and_wait_s(_TABLE_2[1], system, seed, rate)


def figure_4(setting: Setting) -> list[str]:
    """Mean time per token against the rate, SLA 50 ms: static batch against Algorithm 2; the 70B model, 256.6/61.5."""
    systems = {"static": _STATIC, "Algorithm 2 as printed": _LITERAL, "Algorithm 2, corrected": _CORRECTED}
    jobs = [
        (system, seed, rate) for system in systems.values() for rate in _FIGURE_4_RATES for seed in range(setting.runs)
    ]
    found = (
        np.array(setting.each(_pace, jobs)).reshape(len(systems), len(_FIGURE_4_RATES), setting.runs, 2).mean(axis=2)
    )
    if path := setting.figure("001_figure_4"):
        lines = {name: (_FIGURE_4_RATES, each[:, 0]) for name, each in zip(systems, found, strict=True)}
        lines["formula: SLA"] = (_FIGURE_4_RATES, [_SLA_S] * len(_FIGURE_4_RATES))
        draw_lines(lines, path, x="requests/s", y="mean seconds per token", title="001, figure 4")
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


def table_2(setting: Setting) -> list[str]:
    """Requests per second within 50 ms per token: static batch of 256 against Algorithm 2, printed and corrected."""
    systems = (_STATIC, _LITERAL, _CORRECTED)
    jobs = [(row, system, seed) for row in _TABLE_2 for system in systems for seed in range(setting.runs)]
    found = np.array(setting.each(_capacity, jobs)).reshape(len(_TABLE_2), len(systems), setting.runs)
    rows = []
    for row, results in zip(_TABLE_2, found, strict=True):
        ours = [spread(each) for each in results]
        lengths = f"{row.prompts.split(':')[1]} / {row.outputs.split(':')[1]}"
        rows.append((row.model, lengths, row.static, row.dynamic, *ours))
    heading = (
        "model", "prompt / output tokens", "paper: static", "paper: dynamic", "simulated: static",
        "Algorithm 2 as printed", "corrected",
    )  # fmt: skip
    return table(heading, rows)
