"""Microseconds that the scheduler plug-in adds to an engine step at 256 running requests; the aim is below 100.

Not collected by default; run with `pytest bench/deployments/test_speed_of_scheduler.py -s` on an idle machine. vLLM's
real scheduler runs over a model that does not exist. What the plug-in spends it counts itself (snapshot, plan, account,
observe), so vLLM's own scheduling, some milliseconds of Python, does not blur it. In windows of ten steps: the median,
and the tenth best in a hundred, which is nearer the truth where cores are shared; while lengths and step times are
still being learned (after 100 steps) and later (after 1500), with what vLLM spends on the same steps. Beside it
snapshot and plan made again and again: what they take while nothing drives them out of the caches.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from deployments.engines.vllm.request_metadata import RequestMetadata
from tests.virtual_engine import VirtualEngine

WINDOWS, WINDOW, REPEATS = 40, 10, 300
LEARNING, LATER = 100, 1500
# Settings, slots and blocks of the cache.
LOADS: dict[str, tuple[dict[str, Any], int, int]] = {
    "mixed": ({"mode": "mixed"}, 256, 40_000),
    "exclusive": ({"mode": "exclusive"}, 256, 40_000),
    "auto": ({"mode": "auto"}, 256, 40_000),
    "auto with promises": ({"mode": "auto", "ttft_s": 60.0, "tpot_s": 1.0}, 256, 40_000),
    "auto in a cache that hardly ever is full": ({"mode": "auto"}, 256, 16_000),
    "auto where promises bind": ({"mode": "auto", "ttft_s": 60.0, "tpot_s": 0.04}, 400, 60_000),
    "auto where the cache binds": ({"mode": "auto"}, 400, 6600),
    "exclusive where the cache binds": ({"mode": "exclusive"}, 400, 6600),
}


def loaded(name: str, depth: int) -> VirtualEngine:
    """Some 256 requests that run and a queue behind them that does not end; one or two end at each step. Each comes
    with what a router tells of it."""
    rng = random.Random(1)
    settings, slots, blocks = LOADS[name]
    engine = VirtualEngine(settings, slots=slots, blocks=blocks, budget=8192, depth=depth)
    for number in range(3600):
        told = RequestMetadata(predicted_output_tokens=200.0, bin_index=number % 4, ttft_left_s=float(number))
        tokens = min(1400, 1 + int(rng.expovariate(1 / 200)))
        engine.add(f"r{number}", rng.randint(20, 400), tokens, extra_args=told.as_extra_args())
    return engine


class Meter:
    """Seconds of this thread inside vLLM's scheduler, the plug-in's own among them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._inside_s = 0.0
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began_s = time.thread_time()
            answer = call(*args)
            self._inside_s += time.thread_time() - began_s
            return answer

        return timed

    def read_s(self) -> tuple[float, float]:
        """What the plug-in spent, and vLLM."""
        ours_s = self._scheduler.telemetry.overhead_s
        return ours_s, self._inside_s - ours_s


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "two steps in flight"])
@pytest.mark.parametrize("name", LOADS)
def test_what_planning_adds_to_a_step(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.thread_time)  # this thread's work, not that of its neighbours
    engine = loaded(name, depth)
    meter = Meter(engine.scheduler)
    print(f"\n{name}, {depth} in flight")
    for taken, wanted in ((0, LEARNING), (LEARNING + WINDOWS * WINDOW, LATER)):
        for _ in range(wanted - taken):
            engine.step()
        spent_us, vllm_us = windows_us(engine, meter)
        best = sorted(spent_us)[len(spent_us) // 10]
        running = statistics.mean(step.decodes for step in engine.log[-WINDOWS * WINDOW :])
        print(
            f"  after {wanted} steps, {running:.0f} decode: median {statistics.median(spent_us):.0f} us a step, "
            f"tenth best {best:.0f} us, mean {statistics.mean(spent_us):.0f} us; "
            f"vLLM itself {statistics.median(vllm_us):.0f} us"
        )
    print(f"  snapshot and plan from the caches {from_the_caches_us(engine):.0f} us")


def windows_us(engine: VirtualEngine, meter: Meter) -> tuple[list[float], list[float]]:
    """Microseconds a step that the plug-in spent, and vLLM, in each window."""
    spent_us, vllm_us = [], []
    for _ in range(WINDOWS):
        ours_s, vllm_s = meter.read_s()
        for _ in range(WINDOW):
            engine.step()
        ours_later_s, vllm_later_s = meter.read_s()
        spent_us.append(1e6 * (ours_later_s - ours_s) / WINDOW)
        vllm_us.append(1e6 * (vllm_later_s - vllm_s) / WINDOW)
    return spent_us, vllm_us


def from_the_caches_us(engine: VirtualEngine) -> float:
    scheduler = engine.scheduler
    taken_us = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        scheduler.planner.policy.plan(scheduler.planner.snapshot().state)
        taken_us.append(1e6 * (time.thread_time() - began_s))
    return statistics.median(taken_us)
