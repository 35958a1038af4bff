"""Microseconds that the scheduler plug-in adds to an engine step at 256 running requests; the aim is below 100.

Not collected by default; run with `pytest bench/deployments/test_speed_of_scheduler.py -s` on an idle machine. vLLM's
real scheduler runs over a model that does not exist. What the plug-in spends it counts itself (snapshot, plan, account,
observe), so vLLM's own scheduling, some milliseconds of Python, does not blur it. In windows of ten steps: the median,
and the tenth best in a hundred, which is nearer the truth where cores are shared. Beside it what vLLM spends on the
same steps, and snapshot and plan made again and again: what they take while nothing drives them out of the caches.
"""

import random
import statistics
import time
from typing import Any

import pytest

from tests.virtual_engine import VirtualEngine

RUNNING, WINDOWS, WINDOW, REPEATS = 256, 40, 10, 300
MODES: dict[str, dict[str, Any]] = {
    "mixed": {"mode": "mixed"},
    "exclusive": {"mode": "exclusive"},
    "auto": {"mode": "auto"},
    "auto with a latency target": {"mode": "auto", "itl_target_s": 1.0},
}


def loaded(settings: dict[str, Any], depth: int) -> VirtualEngine:
    """256 requests that run and a queue behind them; one or two end at each step."""
    rng = random.Random(1)
    engine = VirtualEngine(settings, slots=RUNNING, blocks=40_000, budget=8192, depth=depth)
    for number in range(1200):
        engine.add(f"r{number}", rng.randint(20, 400), min(1400, 1 + int(rng.expovariate(1 / 200))))
    for _ in range(100):
        engine.step()
    return engine


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
@pytest.mark.parametrize("name", MODES)
def test_what_planning_adds_to_a_step(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # this thread's work, not that of its neighbours
    engine = loaded(MODES[name], depth)
    spent_us, whole_us = [], []
    for _ in range(WINDOWS):
        overhead_s, began_s = engine.scheduler.telemetry.overhead_s, time.thread_time()
        for _ in range(WINDOW):
            engine.step()
        whole_us.append(1e6 * (time.thread_time() - began_s) / WINDOW)
        spent_us.append(1e6 * (engine.scheduler.telemetry.overhead_s - overhead_s) / WINDOW)
    spent, whole = statistics.median(spent_us), statistics.median(whole_us)
    best = sorted(spent_us)[len(spent_us) // 10]
    print(
        f"\n{name}, {depth} in flight: median {spent:.0f} us a step, tenth best {best:.0f} us, "
        f"vLLM itself {whole - spent:.0f} us; snapshot and plan from the caches {from_the_caches_us(engine):.0f} us"
    )


def from_the_caches_us(engine: VirtualEngine) -> float:
    scheduler = engine.scheduler
    taken_us = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        scheduler._policy.plan(scheduler._taken(scheduler.clock.now()).state)
        taken_us.append(1e6 * (time.thread_time() - began_s))
    return statistics.median(taken_us)
