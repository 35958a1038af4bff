"""How fast the simulator is: `python -m pytest bench/simulator -s --benchmark-only`, some three minutes.

100 000 requests of LMSYS-like lengths (lognormal, mean 207 tokens) through 8 engines with continuous batching, and
128 000 requests through gang batches of 128 in 5 bins.
"""

import math

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies.gang.batches import GangConfig
from policies.router.multi_bin import MultiBinConfig
from simulator.cluster import GangRun, Run, run, run_gang
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.gang import LengthTimes
from simulator.predictors import predicted
from simulator.presets import system
from simulator.workload import Workload, length_law, poisson, synthetic


def workload(count: int, rate: float, prompts: str, outputs: str, predictor: str) -> Workload:
    rng = np.random.default_rng(0)
    drawn = synthetic("made up", length_law(prompts), length_law(outputs), count, rng)
    return predicted(drawn.arriving(poisson(rate, count, rng)), predictor, rng)


@pytest.mark.parametrize("name", ["stock", "sluice"])
def test_100_000_requests_on_8_replicas(benchmark: BenchmarkFixture, name: str) -> None:
    work = workload(100_000, 300.0, "lognormal:92:1.2", "lognormal:207:0.9", "noise:0.44")
    profile = engine_profile("Llama-3.1-8B@h100_sxm")
    config = system(name, profile, EngineConfig(slots=256, total_blocks=26_000), 8)
    result: Run = benchmark.pedantic(lambda: run(config, work), rounds=3)  # type: ignore[no-untyped-call]
    steps = sum(engine.totals.steps for engine in result.engines)
    benchmark.extra_info.update(events=result.events, steps=steps)
    print(f"\n{name}: {result.events} events, {steps} steps")


def test_128_000_requests_in_gang_batches(benchmark: BenchmarkFixture) -> None:
    work = workload(128_000, 12.0, "constant:1", "uniform:1000:20000", "oracle")
    edges = tuple(np.linspace(1000, 20_000, 6).tolist())
    bins = MultiBinConfig(bins=5, rule="fixed", initial_edges=edges)
    times = LengthTimes(s_per_token=0.001)
    gang = GangConfig(batch_size=128, max_wait_s=math.inf)
    result: GangRun = benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda: run_gang(gang, bins, times, work), rounds=3
    )
    benchmark.extra_info["events"] = result.events
