"""Predicted against measured on a real engine: `python -m pytest bench/simulator/test_prediction_of_cpu_engine.py -s`.

vLLM's engine with the demo model, in this process, on one core. Steps of a calibration run are fitted as
`sluice simulate --engine steps.csv` fits them; then three other workloads are run and simulated. Time is the process's
CPU time, so that what else the machine does counts little.
"""

import csv
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.deployments.engine_in_process import Request, VllmEngine, closed_loop, new_engine
from bench.deployments.engine_steps import StepRecorder
from policies.types import StepResult, StepTimes
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import read_calibration
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, synthetic

MODEL = Path(__file__).parents[2] / "deployments" / "demo_model"
SLOTS, MAX_TOKENS, CACHE_TOKENS = 32, 2048, 20_000
COLUMNS = ("prefill_tokens", "decode_requests", "kv_tokens", "step_s")
WORKLOADS = {
    "short prompts, long answers": ("uniform:20:100", "uniform:100:300"),
    "long prompts, short answers": ("uniform:300:900", "uniform:10:60"),
    "chat": ("lognormal:200:0.8", "lognormal:120:0.7"),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SLUICE_BENCH_MODEL", str(MODEL))
        yield VllmEngine(
            new_engine(
                tmp_path_factory.mktemp("model"),
                max_model_len=2048,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=MAX_TOKENS,
                dtype="bfloat16",
                enforce_eager=True,
                kv_cache_memory_bytes=256 << 20,
            )
        )


def serve(engine: VllmEngine, work: Workload) -> list[StepResult]:
    """All requests at once; returns the steps, in CPU seconds."""
    recorder = StepRecorder(engine.scheduler, time.process_time)
    given = [Request(each.prompt_tokens, each.output_tokens) for each in work.requests()]
    try:
        closed_loop(engine, given, clients=len(given))
    finally:
        recorder.close()
    return recorder.steps


def made(name: str, laws: tuple[str, str], count: int, seed: int) -> Workload:
    work = synthetic(name, length_law(laws[0]), length_law(laws[1]), count, np.random.default_rng(seed))
    return work.shorter_than(1500)


def calibrated(engine: VllmEngine, steps: Path, seed: int) -> StepTimes:
    """Short and long prompts: mixed steps must be seen with few prompt tokens and with many."""
    calibration = serve(engine, made("calibration", ("lognormal:150:1.3", "uniform:10:300"), 120, seed))
    with steps.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([getattr(step, column) for column in COLUMNS] for step in calibration)
    return read_calibration(steps)[0]


def test_throughput_of_a_real_engine_is_predicted(engine: VllmEngine, tmp_path: Path) -> None:
    """Calibrated again before each round, because a shared machine is not equally fast for long."""
    serve(engine, made("warm-up", ("constant:100", "constant:20"), 20, 0))
    sizes = EngineConfig(slots=SLOTS, total_blocks=CACHE_TOKENS // 16, max_batch_tokens=MAX_TOKENS)
    for seed in (2, 3, 4):
        times = calibrated(engine, tmp_path / "steps.csv", 10 + seed)
        config = ClusterConfig(times=times, engine=sizes, router=RouterConfig(credit_lookahead=None))
        for name, laws in WORKLOADS.items():
            work = made(name, laws, 100, seed)
            real_s = sum(step.step_s for step in serve(engine, work))
            ours_s = run(config, work).makespan_s
            tokens = int(work.output_tokens.sum())
            print(f"{name}: {tokens / real_s:.0f} -> {tokens / ours_s:.0f} tokens/s ({real_s / ours_s - 1:+.1%})")
