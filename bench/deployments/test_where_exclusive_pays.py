"""Where exclusive batching wins, and whether auto finds it: what no CPU shows, swept on a virtual clock.

Not collected by default; run with `pytest bench/deployments/test_where_exclusive_pays.py -s`. vLLM's real scheduler
over step times that are made up: x is what a token costs more in a mixed step, a the ratio of the fixed cost of a
prefill step to that of a decode step. Throughput between a half and nine tenths of the requests, relative to stock: by
then auto has tried both modes.
"""

import random
from typing import Any

import pytest

from policies.types import StepCoefficients, StepTimes
from tests.virtual_engine import VirtualEngine, run_closed

DECODE_OVERHEAD_S, PREFILL_S, DECODE_S = 0.006, 2e-5, 4e-5
MEAN_OUTPUT = 80
GRID = [(n, a, x) for n in (16, 64, 256) for a in (0.4, 1.0, 4.0) for x in (0.0, 0.05, 0.1, 0.2)]


def made_up(a: float, x: float) -> StepTimes:
    return StepTimes(
        prefill=StepCoefficients(overhead_s=a * DECODE_OVERHEAD_S, prefill_s=PREFILL_S),
        decode=StepCoefficients(overhead_s=DECODE_OVERHEAD_S, decode_s=DECODE_S),
        mixed=StepCoefficients(
            overhead_s=max(1.0, a) * DECODE_OVERHEAD_S, prefill_s=(1 + x) * PREFILL_S, decode_s=(1 + x) * DECODE_S
        ),
    )


def throughput(settings: dict[str, Any], slots: int, times: StepTimes) -> tuple[float, VirtualEngine]:
    """Output tokens per second of virtual time."""
    rng = random.Random(4)
    requests = [
        (rng.randint(200, 800), min(1000, 1 + int(rng.expovariate(1 / MEAN_OUTPUT)))) for _ in range(24 * slots)
    ]
    engine = VirtualEngine(settings, slots=slots, blocks=60 * slots + 200, budget=8192, times=times)
    run_closed(engine, requests, clients=2 * slots)
    ends = sorted(answer.times_s[-1] for answer in engine.answers.values())
    first, last = ends[len(ends) // 2], ends[9 * len(ends) // 10]
    tokens = sum(first < at <= last for answer in engine.answers.values() for at in answer.times_s)
    return tokens / (last - first), engine


@pytest.mark.parametrize(("slots", "a", "x"), GRID)
def test_auto_finds_the_better_mode(slots: int, a: float, x: float) -> None:
    times = made_up(a, x)
    stock, _ = throughput({"mode": "stock"}, slots, times)
    exclusive, _ = throughput({"mode": "exclusive"}, slots, times)
    auto, engine = throughput({"mode": "auto"}, slots, times)
    ended = "exclusive" if engine.scheduler.status()["exclusive"] else "mixed"
    print(f"\n| {slots} | {a:g} | {100 * x:g} % | {exclusive / stock:.3f} | {auto / stock:.3f} | {ended} |")
