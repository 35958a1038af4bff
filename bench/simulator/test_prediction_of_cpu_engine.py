"""Predicted against measured on a real engine: `python -m pytest bench/simulator/test_prediction_of_cpu_engine.py -s`.

vLLM's engine with the demo model, in this process, on one core. Steps of a calibration run are fitted as
`sluice simulate --engine steps.csv` fits them; then three other workloads are run and simulated. Time is the process's
CPU time, so that what else the machine does counts little.
"""

import csv
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.types import StepTimes
from simulator.cluster import ClusterConfig, run
from simulator.engine import EngineConfig
from simulator.engines import read_calibration
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, synthetic

MODEL = Path(__file__).parents[2] / "deployments" / "demo_model"
SLOTS, MAX_TOKENS, CACHE_TOKENS = 32, 2048, 20_000
WORKLOADS = {
    "short prompts, long answers": ("uniform:20:100", "uniform:100:300"),
    "long prompts, short answers": ("uniform:300:900", "uniform:10:60"),
    "chat": ("lognormal:200:0.8", "lognormal:120:0.7"),
}


@dataclass
class Recorded:
    """An engine whose steps are timed, each with what it held."""

    engine: Any
    steps: list[tuple[int, int, int, float]] = field(default_factory=list)

    def step(self) -> None:
        start_s = time.process_time()
        scheduler = self.engine.engine_core.engine_core.scheduler
        before = {request.request_id: request.num_computed_tokens for request in scheduler.running}
        self.engine.step()
        self._note(before, scheduler, time.process_time() - start_s)

    def _note(self, before: dict[str, int], scheduler: Any, step_s: float) -> None:
        prefill, decodes, kv_tokens = 0, 0, 0
        for name, tokens, prompt in scheduler.last_scheduled:
            computed = before.get(name, 0)
            if computed < prompt:
                prefill += tokens
            else:
                decodes += 1
                kv_tokens += computed + 1
        if prefill or decodes:
            self.steps.append((prefill, decodes, kv_tokens, step_s))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
    from vllm import EngineArgs, LLMEngine

    made = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL), max_model_len=2048, max_num_seqs=SLOTS, max_num_batched_tokens=MAX_TOKENS,
            dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
        )
    )  # fmt: skip
    scheduler = made.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def noted(*args: Any, **settings: Any) -> Any:
        output = schedule(*args, **settings)
        scheduler.last_scheduled = [
            (name, tokens, scheduler.requests[name].num_prompt_tokens)
            for name, tokens in output.num_scheduled_tokens.items()
        ]
        return output

    scheduler.schedule = noted
    yield made


def serve(engine: Any, work: Workload) -> Recorded:
    from vllm import SamplingParams

    rng = np.random.default_rng(1)
    for request in work.requests():
        tokens = rng.integers(10, 4000, request.prompt_tokens).tolist()
        sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
        engine.add_request(f"{work.name}-{request.request_id}", {"prompt_token_ids": tokens}, sampling)
    recorded = Recorded(engine)
    while engine.has_unfinished_requests():
        recorded.step()
    return recorded


def made(name: str, laws: tuple[str, str], count: int, seed: int) -> Workload:
    work = synthetic(name, length_law(laws[0]), length_law(laws[1]), count, np.random.default_rng(seed))
    return work.shorter_than(1500)


def calibrated(engine: Any, steps: Path, seed: int) -> StepTimes:
    """Short and long prompts: mixed steps must be seen with few prompt tokens and with many."""
    calibration = serve(engine, made("calibration", ("lognormal:150:1.3", "uniform:10:300"), 120, seed))
    with steps.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("prefill_tokens", "decode_requests", "kv_tokens", "step_s"))
        writer.writerows(calibration.steps)
    return read_calibration(steps)[0]


def test_throughput_of_a_real_engine_is_predicted(engine: Any, tmp_path: Path) -> None:
    """Calibrated again before each round, because a shared machine is not equally fast for long."""
    serve(engine, made("warm-up", ("constant:100", "constant:20"), 20, 0))
    sizes = EngineConfig(slots=SLOTS, total_blocks=CACHE_TOKENS // 16, max_batch_tokens=MAX_TOKENS)
    for seed in (2, 3, 4):
        times = calibrated(engine, tmp_path / "steps.csv", 10 + seed)
        config = ClusterConfig(times=times, engine=sizes, router=RouterConfig(credit_lookahead=None))
        for name, laws in WORKLOADS.items():
            work = made(name, laws, 100, seed)
            real_s = sum(step_s for *_, step_s in serve(engine, work).steps)
            ours_s = run(config, work).makespan_s
            tokens = int(work.output_tokens.sum())
            print(f"{name}: {tokens / real_s:.0f} -> {tokens / ours_s:.0f} tokens/s ({real_s / ours_s - 1:+.1%})")
