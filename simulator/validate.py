"""Predicted against measured: replays recorded runs on an engine of the same model and GPU.

    python -m simulator.validate --run FILE --engine NAME [--cache-tokens N] [--slots N] ...
    python -m simulator.validate FOLDER [--plot FILE.png]

FILE is a run of one's own (formats: `simulator.recorded`). FOLDER holds the runs of casys-kaist/LLMServingSim,
bench/examples (MIT): 300 requests at 10 per second under vLLM 0.19, max_num_batched_tokens 2048. Nothing is fitted to
those but the 4090's cache size, which its own record of cache use gives (and which vLLM prints at start); the kernel
tables are measured apart.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from policies.errors import ConfigError, SluiceError
from policies.types import FloatArray
from simulator.cluster import ClusterConfig, Run, run
from simulator.engine import EngineConfig, StepClock
from simulator.engines import engine_profile
from simulator.kernels import built_in_clock, linear_fit
from simulator.presets import SYSTEMS, system
from simulator.recorded import COLUMNS, Record, columns, read_run
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
    """What a run came to; times of requests in seconds, those per token without answers of one token."""

    makespan_s: float
    output_tokens: int
    ttft_s: FloatArray
    tpot_s: FloatArray


def measured(record: Record) -> Outcome:
    further = record["output_tokens"] - 1
    decoded_s = record["last_token_s"] - record["first_token_s"]
    return Outcome(
        makespan_s=float(record["last_token_s"].max()),
        output_tokens=int(record["output_tokens"].sum()),
        ttft_s=record["first_token_s"] - record["queued_s"],
        tpot_s=decoded_s[further > 0] / further[further > 0],
    )


def simulated(record: Record, config: ClusterConfig) -> Outcome:
    """The same requests, at the same times where the configuration has no clients."""
    workload = Workload.of(
        "recorded",
        record["queued_s"],
        record["prompt_tokens"].astype(np.int64),
        record["output_tokens"].astype(np.int64),
    )
    return _outcome(run(config, workload))


def _outcome(result: Run) -> Outcome:
    """Raises ConfigError: requests of the record do not fit into the cache."""
    if result.refused:
        raise ConfigError(f"{len(result.refused)} requests of the record are longer than the whole KV cache")
    requests = result.requests
    return Outcome(
        makespan_s=result.makespan_s,
        output_tokens=sum(r.output_tokens for r in requests),
        ttft_s=np.array([r.ttft_s for r in requests if r.ttft_s is not None]),
        tpot_s=np.array([r.tpot_s for r in requests if r.tpot_s is not None]),
    )


def cache_blocks(record: Record, series: Record, block_size: int = 16) -> int:
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
    record = columns(folder / f"{recorded.name}.csv.gz", COLUMNS)
    series = columns(folder / f"{recorded.name}_timeseries.csv.gz", ("t", "kv_cache_pct", "waiting"))
    blocks = cache_blocks(record, series)
    engine = EngineConfig(slots=recorded.slots, total_blocks=blocks, max_batch_tokens=2048)
    clock: StepClock = built_in_clock(recorded.kernels)
    if linear:
        clock = linear_fit(clock, max_batch_tokens=2048)
    times = linear_fit(clock, max_batch_tokens=engine.max_batch_tokens)
    config = ClusterConfig(times=times, clock=clock, engine=engine, router=RouterConfig(credit_lookahead=None))
    return measured(record), simulated(record, config), engine


def line(recorded: Recorded, real: Outcome, ours: Outcome) -> str:
    span, real_s, ours_s = ours.makespan_s / real.makespan_s - 1, real.tpot_s.mean(), ours.tpot_s.mean()
    real_p, ours_p = (np.percentile(each.ttft_s, (50, 90, 99)) for each in (real, ours))
    return (
        f"{recorded.name:<50} makespan {real.makespan_s:6.1f} -> {ours.makespan_s:6.1f} s ({span:+6.1%})   "
        f"TPOT {1e3 * real_s:5.1f} -> {1e3 * ours_s:5.1f} ms ({ours_s / real_s - 1:+6.1%})   TTFT p50/p90/p99 "
        f"{'/'.join(f'{x:.2f}' for x in real_p)} -> {'/'.join(f'{x:.2f}' for x in ours_p)} s"
    )


def report(real: Outcome, ours: Outcome) -> list[str]:
    """A line for each quantity: measured, simulated, error relative to what was measured."""
    rows = {
        "output tokens/s": (real.output_tokens / real.makespan_s, ours.output_tokens / ours.makespan_s),
        "requests/s": (len(real.ttft_s) / real.makespan_s, len(ours.ttft_s) / ours.makespan_s),
        **_milliseconds("TTFT", real.ttft_s, ours.ttft_s),
        **_milliseconds("TPOT", real.tpot_s, ours.tpot_s),
    }
    heading = f"{'':<18}{'measured':>12}{'simulated':>12}{'error':>9}"
    return [heading, *(f"{name:<18}{x:>12.2f}{y:>12.2f}{y / x - 1:>+9.1%}" for name, (x, y) in rows.items())]


def _milliseconds(name: str, real_s: FloatArray, ours_s: FloatArray) -> dict[str, tuple[float, float]]:
    """None where no answer has a second token."""
    if not len(real_s):
        return {}
    pairs = ((1e3 * float(np.percentile(each, q)) for each in (real_s, ours_s)) for q in (50, 99))
    return {f"{name} p{q}, ms": (x, y) for q, (x, y) in zip((50, 99), pairs, strict=True)}


def validate_run(options: argparse.Namespace) -> list[str]:
    """The lines that `--run` prints.

    Raises:
        ConfigError, InputError: the engine, its cache or the record is not known.
    """
    if options.engine is None:
        raise ConfigError("--run needs --engine: a name that `sluice simulate --list-engines` lists, or a calibration")
    record, profile = read_run(options.run), engine_profile(options.engine)
    blocks = profile.cache(options.cache_tokens) // EngineConfig().block_size
    engine = EngineConfig(slots=options.slots, total_blocks=blocks, max_batch_tokens=options.max_batch_tokens)
    config = system(options.system, profile, engine, options.replicas, clients=options.clients)
    heading = f"{len(record['queued_s'])} requests on {options.replicas} x {profile.name}"
    return [heading, *report(measured(record), simulated(record, config))]


def validate_folder(folder: Path, plot: Path | None) -> None:
    """Prints each run as soon as it is known."""
    drawn = []
    for linear in (False, True):
        print("by linear forms fitted to the kernel tables:" if linear else "by kernel tables:")
        for recorded in RUNS:
            real, ours, engine = compare(folder, recorded, linear=linear)
            print(f"  {line(recorded, real, ours)}   ({engine.capacity_tokens} tokens of cache)")
            if not linear:
                drawn.append((recorded.kernels.removeprefix("kernels_"), real.ttft_s, ours.ttft_s))
    if plot:
        from simulator.plots import draw_distributions

        draw_distributions(drawn, plot)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        if options.run:
            print("\n".join(validate_run(options)))
        else:
            validate_folder(options.folder, options.plot)
    except SluiceError as error:
        sys.exit(f"simulator.validate: {error}")


_EPILOG = """\
formats of FILE:
  .json       as `vllm bench serve --save-result --save-detailed` writes it, against vLLM or against Sluice
  .csv, .gz   a row per request with queued_s, prompt_tokens, output_tokens, first_token_s, last_token_s (seconds on one
              clock); other columns are passed over

Give the engine the sizes that the real one had: vLLM prints its KV cache at start. Where the load was closed
(--max-concurrency), say --clients: then a request comes when another ends, not when it came on record. A client's times
hold the network and the server's front end as well, which the simulator does not know."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulator.validate",
        description=(__doc__ or "").splitlines()[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("folder", type=Path, nargs="?", help="folder of LLMServingSim's recorded runs")
    source.add_argument("--run", type=Path, metavar="FILE", help="a run of your own")
    parser.add_argument("--plot", type=Path, help="of FOLDER: draw the distributions of the time to first token here")
    own = parser.add_argument_group("of --run")
    own.add_argument("--engine", help="name or calibration file, as of `sluice simulate`")
    own.add_argument("--replicas", type=int, default=1, help="engines (default: %(default)s)")
    own.add_argument("--system", choices=SYSTEMS, default="stock", help="policies (default: %(default)s)")
    own.add_argument("--clients", type=int, help="closed loop: this many requests in the system")
    own.add_argument("--slots", type=int, default=256, help="max_num_seqs (default: %(default)s)")
    own.add_argument("--max-batch-tokens", type=int, default=8192, help="per step (default: %(default)s)")
    own.add_argument("--cache-tokens", type=int, help="KV cache (default: what the GPU's memory leaves)")
    return parser


if __name__ == "__main__":
    main()
