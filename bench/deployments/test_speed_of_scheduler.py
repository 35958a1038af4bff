"""Seconds that the scheduler plug-in adds to an engine step at 256 running requests; the aim is below 100 microseconds.

Not collected by default; run with `pytest bench/deployments -s`. vLLM's real scheduler runs over a model that does not
exist, so the step itself costs nothing and what is left is scheduling: stock against planned, and the plug-in's own
count of what it spends.
"""

import random
import statistics
import time
from typing import Any

import pytest

from tests.virtual_engine import VirtualEngine

RUNNING, STEPS, REPEATS = 256, 600, 5
MODES: dict[str, dict[str, Any]] = {
    "mixed": {"mode": "mixed"},
    "exclusive": {"mode": "exclusive"},
    "auto": {"mode": "auto"},
    "auto with a latency target": {"mode": "auto", "itl_target_s": 1.0},
}


def loaded(settings: dict[str, Any], depth: int) -> VirtualEngine:
    """256 requests that run and a queue behind them; one in 200 ends at each step."""
    rng = random.Random(1)
    engine = VirtualEngine(settings, slots=RUNNING, blocks=40_000, budget=8192, depth=depth)
    for number in range(2200):
        engine.add(f"r{number}", rng.randint(20, 400), min(1400, 1 + int(rng.expovariate(1 / 200))))
    for _ in range(150):
        engine.step()
    return engine


def schedule_us(engine: VirtualEngine) -> float:
    """Mean microseconds of schedule() and update_from_output() in a run of steps."""
    scheduler, spent_s = engine.scheduler, 0.0
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def timed(call: Any) -> Any:
        def run(*args: Any) -> Any:
            nonlocal spent_s
            began = time.perf_counter()
            result = call(*args)
            spent_s += time.perf_counter() - began
            return result

        return run

    scheduler.schedule, scheduler.update_from_output = timed(schedule), timed(update)
    for _ in range(STEPS):
        engine.step()
    return 1e6 * spent_s / STEPS


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
def test_what_a_planned_step_costs_beyond_a_stock_one(depth: int) -> None:
    figures: dict[str, list[float]] = {name: [] for name in ("stock", *MODES)}
    own: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(REPEATS):
        for name, settings in {"stock": {"mode": "stock"}, **MODES}.items():
            engine = loaded(settings, depth)
            if name in MODES:
                engine.scheduler.telemetry.__init__()
            figures[name].append(schedule_us(engine))
            if name in MODES:
                own[name].append(engine.scheduler.telemetry.of_steps()["overhead_us_per_step"])
    stock = figures["stock"]
    print(f"\nstock: {statistics.median(stock):.0f} us of vLLM's own scheduling, [{min(stock):.0f}, {max(stock):.0f}]")
    for name, spent in own.items():
        more = statistics.median(b - a for a, b in zip(stock, figures[name], strict=True))
        print(
            f"{name}: {statistics.median(spent):.0f} us, [{min(spent):.0f}, {max(spent):.0f}]; {more:+.0f} us on vLLM"
        )
        assert spent
