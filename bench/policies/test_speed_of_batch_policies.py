"""Seconds of the calls that an engine makes at every step, and of those that it makes now and then.

Not collected by default; run with `pytest bench/policies`. A step of a driver is snapshot + plan + observe; together
they should stay below 100 microseconds at 256 running requests.
"""

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.phases import best_phase_of_survival
from policies.engine.step_time import StepTimeModel
from policies.lengths.statistics import LengthStatistics, geometric_law
from policies.registry import build
from policies.types import (
    BatchPolicy,
    BatchState,
    FinishedRequest,
    Phase,
    RequestView,
    RunningRequests,
    StepCoefficients,
    StepResult,
    StepTimes,
)

RUNNING, MEAN_OUTPUT, BLOCK_SIZE = 256, 200, 16
TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.005, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=3e-5, kv_s=6e-8),
    mixed=StepCoefficients(overhead_s=0.01, prefill_s=5e-5, decode_s=3e-5, kv_s=6e-8),
)
POLICIES: dict[str, Callable[[], BatchPolicy]] = {
    "stock": lambda: build("stock"),
    "memory_aware": lambda: build("memory_aware"),
    "sla_constrained": lambda: build("sla_constrained", itl_target_s=0.05),
    "forecast_admission": lambda: build("forecast_admission", classes=3),
    "exclusive_mixed": lambda: build("exclusive_mixed", mode="exclusive"),
    "auto": lambda: build("auto", classes=3, step_times=TIMES),
    "auto that searches": lambda: build("auto", classes=3, sla="search", itl_target_s=0.05),
}


def make_state(free_tokens: int, waiting: int) -> BatchState:
    rng = np.random.default_rng(1)
    running = RunningRequests.of(
        prompt_tokens=rng.integers(100, 2000, RUNNING),
        output_tokens=rng.geometric(1 / MEAN_OUTPUT, RUNNING),
        class_index=rng.integers(0, 3, RUNNING),
    )
    held = int((running.prompt_tokens + running.output_tokens).sum())
    return BatchState(
        now_s=0.0,
        running=running,
        waiting=tuple(
            RequestView(request_id=f"w{i}", arrival_s=0.0, prompt_tokens=int(rng.integers(100, 2000)))
            for i in range(waiting)
        ),
        waiting_count=waiting,
        slots=512,
        free_blocks=free_tokens // BLOCK_SIZE,
        total_blocks=(held + free_tokens) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_batch_tokens=8192,
        departed=0,
    )


def make_result(finished: int, seed: int = 0) -> StepResult:
    rng = np.random.default_rng(seed)
    return StepResult(
        now_s=0.0,
        step_s=0.02 + 1e-3 * float(rng.random()),
        phase=Phase.MIXED,
        prefill_tokens=1000,
        prefill_requests=1,
        decode_requests=RUNNING - 1,
        kv_tokens=300_000,
        max_batch_size=RUNNING,
        running_count=RUNNING,
        waiting_count=10,
        finished=tuple(
            FinishedRequest(
                prompt_tokens=int(rng.integers(100, 2000)),
                output_tokens=int(rng.geometric(1 / MEAN_OUTPUT)),
                class_index=int(rng.integers(0, 3)),
            )
            for _ in range(finished)
        ),
    )


def taught(make: Callable[[], BatchPolicy]) -> BatchPolicy:
    policy = make()
    for seed in range(600):
        policy.observe(make_result(2, seed))
    return policy


STATES = {"full cache": (0, 64), "room for some": (40_000, 64), "empty queue": (40_000, 0)}


@pytest.mark.parametrize("state", list(STATES.values()), ids=list(STATES))
@pytest.mark.parametrize("make", list(POLICIES.values()), ids=list(POLICIES))
def test_plan(benchmark: BenchmarkFixture, make: Callable[[], BatchPolicy], state: tuple[int, int]) -> None:
    policy, snapshot = taught(make), make_state(*state)
    policy.plan(snapshot)
    benchmark(policy.plan, snapshot)


@pytest.mark.parametrize("finished", [0, 2])
@pytest.mark.parametrize("make", list(POLICIES.values()), ids=list(POLICIES))
def test_observe(benchmark: BenchmarkFixture, make: Callable[[], BatchPolicy], finished: int) -> None:
    benchmark(taught(make).observe, make_result(finished))


def test_snapshot_of_buffers_that_a_driver_keeps(benchmark: BenchmarkFixture) -> None:
    state = make_state(0, 64)
    running = state.running
    buffers = [getattr(running, name) for name in RunningRequests.__annotations__]

    def snapshot() -> BatchState:
        views = RunningRequests(*(buffer[:RUNNING] for buffer in buffers))
        return BatchState(
            now_s=0.0,
            running=views,
            waiting=state.waiting,
            waiting_count=64,
            slots=512,
            free_blocks=0,
            total_blocks=state.total_blocks,
            block_size=BLOCK_SIZE,
            max_batch_tokens=8192,
            departed=0,
        )

    benchmark(snapshot)


def test_refresh_of_one_length_law(benchmark: BenchmarkFixture) -> None:
    policy = taught(lambda: ForecastAdmission(ForecastAdmissionConfig(classes=3)))
    snapshot = make_state(0, 64)
    assert isinstance(policy, ForecastAdmission)
    policy.plan(snapshot)
    benchmark(policy._learn, snapshot, 0)


def test_life_table_of_a_full_window(benchmark: BenchmarkFixture) -> None:
    statistics = LengthStatistics()
    for seed in range(600):
        statistics.observe(make_result(2, seed))
    benchmark(statistics.table, 0, make_state(0, 0).running.output_tokens)


def test_step_time_observe(benchmark: BenchmarkFixture) -> None:
    benchmark(StepTimeModel().observe, make_result(0))


def test_step_times_of_the_fit(benchmark: BenchmarkFixture) -> None:
    model = StepTimeModel()
    for seed in range(64):
        model.observe(make_result(0, seed))
    benchmark(model.times)


def test_thinned_phase_of_a_long_law(benchmark: BenchmarkFixture) -> None:
    survival = geometric_law(1500).unit_survival(15_000)
    benchmark(lambda: best_phase_of_survival(survival, 0.02, 0.01, thinned=True))
