"""Predicted against measured: replays recorded vLLM runs with kernel tables of the same GPU and model.

    python -m simulator.validate FOLDER [--plot FILE.png]

FOLDER holds the runs of casys-kaist/LLMServingSim, bench/examples (MIT): 300 requests at 10 per second under vLLM 0.19,
max_num_batched_tokens 2048. Nothing is fitted to the runs but the 4090's cache size, which its own record of cache use
gives (and which vLLM prints at start); the kernel tables are measured apart.
"""

import argparse
import csv
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from policies.types import FloatArray
from simulator.cluster import ClusterConfig, Run, run
from simulator.engine import EngineConfig, StepClock
from simulator.kernels import built_in_clock, linear_fit
from simulator.router import RouterConfig
from simulator.workload import Workload

AMPLE_BLOCKS = 60_000  # 96 GB hold more than any of these runs asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run on record; slots as its time series shows them."""

    name: str
    kernels: str
    slots: int


RUNS = (
    Recorded(name="vllm_run_rtxpro6000_llama-3_1-8b", kernels="kernels_rtxpro6000_llama-3.1-8b", slots=128),
    Recorded(name="vllm_run_rtx4090_llama-3_1-8b", kernels="kernels_rtx4090_llama-3.1-8b", slots=256),
    Recorded(
        name="vllm_run_rtxpro6000_qwen3-30b-a3b-instruct-2507", kernels="kernels_rtxpro6000_qwen3-30b-a3b", slots=256
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a run came to."""

    makespan_s: float
    tpot_s: float
    ttft_s: FloatArray


def columns(path: Path) -> dict[str, FloatArray]:
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def measured(record: dict[str, FloatArray]) -> Outcome:
    tpot_s = (record["last_token_s"] - record["first_token_s"]) / (record["output_tokens"] - 1)
    return Outcome(
        makespan_s=float(record["last_token_s"].max()),
        tpot_s=float(tpot_s.mean()),
        ttft_s=record["first_token_s"] - record["queued_s"],
    )


def simulated(record: dict[str, FloatArray], clock: StepClock, engine: EngineConfig) -> Outcome:
    workload = Workload.of(
        "recorded",
        record["queued_s"],
        record["prompt_tokens"].astype(np.int64),
        record["output_tokens"].astype(np.int64),
    )
    times = linear_fit(clock, max_batch_tokens=engine.max_batch_tokens)
    config = ClusterConfig(times=times, clock=clock, engine=engine, router=RouterConfig(credit_lookahead=None))
    return _outcome(run(config, workload))


def _outcome(result: Run) -> Outcome:
    requests = result.requests
    return Outcome(
        makespan_s=result.makespan_s,
        tpot_s=float(np.mean([r.tpot_s for r in requests if r.tpot_s is not None])),
        ttft_s=np.array([r.ttft_s for r in requests if r.ttft_s is not None]),
    )


def cache_blocks(record: dict[str, FloatArray], series: dict[str, FloatArray], block_size: int = 16) -> int:
    """The cache's size from its use on record: while the first requests run and none has ended, prompts and tokens so
    far over the share in use. AMPLE_BLOCKS where the share was not recorded."""
    if series["kv_cache_pct"].max() == 0.0:
        return AMPLE_BLOCKS
    first_end_s = record["last_token_s"].min()
    estimates = []
    for t, percent, waiting in zip(series["t"], series["kv_cache_pct"], series["waiting"], strict=True):
        decoding = record["first_token_s"] <= t
        if t < first_end_s and 0 < percent < 99 and decoding.any() and waiting == 0:
            rate = (record["output_tokens"] - 1) / (record["last_token_s"] - record["first_token_s"])
            held = record["prompt_tokens"] + rate * (t - record["first_token_s"])
            estimates.append(float(held[decoding].sum()) / (percent / 100.0))
    return int(np.median(estimates)) // block_size


def compare(folder: Path, recorded: Recorded, *, linear: bool) -> tuple[Outcome, Outcome, EngineConfig]:
    """Measured and simulated outcome, by kernel tables or by the linear forms fitted to them."""
    record = columns(folder / f"{recorded.name}.csv.gz")
    blocks = cache_blocks(record, columns(folder / f"{recorded.name}_timeseries.csv.gz"))
    engine = EngineConfig(slots=recorded.slots, total_blocks=blocks, max_batch_tokens=2048)
    clock: StepClock = built_in_clock(recorded.kernels)
    if linear:
        clock = linear_fit(clock, max_batch_tokens=2048)
    return measured(record), simulated(record, clock, engine), engine


def line(recorded: Recorded, real: Outcome, ours: Outcome) -> str:
    span, tpot = ours.makespan_s / real.makespan_s - 1, ours.tpot_s / real.tpot_s - 1
    real_p, ours_p = (np.percentile(each.ttft_s, (50, 90, 99)) for each in (real, ours))
    return (
        f"{recorded.name:<50} makespan {real.makespan_s:6.1f} -> {ours.makespan_s:6.1f} s ({span:+6.1%})   "
        f"TPOT {1e3 * real.tpot_s:5.1f} -> {1e3 * ours.tpot_s:5.1f} ms ({tpot:+6.1%})   TTFT p50/p90/p99 "
        f"{'/'.join(f'{x:.2f}' for x in real_p)} -> {'/'.join(f'{x:.2f}' for x in ours_p)} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m simulator.validate", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the recorded runs")
    parser.add_argument("--plot", type=Path, help="draw the distributions of the time to first token here")
    options = parser.parse_args(arguments)
    drawn = []
    for linear in (False, True):
        print("by linear forms fitted to the kernel tables:" if linear else "by kernel tables:")
        for recorded in RUNS:
            real, ours, engine = compare(options.folder, recorded, linear=linear)
            print(f"  {line(recorded, real, ours)}   ({engine.capacity_tokens} tokens of cache)")
            if not linear:
                drawn.append((recorded.kernels.removeprefix("kernels_"), real.ttft_s, ours.ttft_s))
    if options.plot:
        from simulator.plots import draw_distributions

        draw_distributions(drawn, options.plot)


if __name__ == "__main__":
    main()
