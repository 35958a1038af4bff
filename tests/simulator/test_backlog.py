"""Batches fill what other requests leave, and cost those next to nothing."""

import numpy as np
import pytest

from simulator.cluster import Run, run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target
from simulator.requests import Request
from simulator.workload import Workload, poisson, square_wave

ENGINE = engine_profile("kernels_rtxpro6000_llama-3.1-8b")
CHAT, IDLE = Target(ttft_s=1.0, tpot_s=0.06), Target(ttft_s=np.inf, tpot_s=np.inf)
CONFIG = system(
    "sluice", ENGINE, EngineConfig(total_blocks=(ENGINE.cache_tokens or 0) // 16), 1, {"chat": CHAT, "offline": IDLE}
)


def lengths(count: int, prompt_tokens: float, output_tokens: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    prompts = rng.lognormal(np.log(prompt_tokens), 1.0, count).clip(1, 8000)
    return prompts.astype(np.int64), rng.exponential(output_tokens, count).clip(1, 2000).astype(np.int64)


def chat(arrival_s: np.ndarray) -> Workload:
    return Workload.of("chat", arrival_s, *lengths(len(arrival_s), 500, 250, 1), slo_class=["chat"] * len(arrival_s))


def batch(count: int) -> Workload:
    return Workload.of("batch", np.zeros(count), *lengths(count, 800, 200, 2))


def in_time(requests: list[Request]) -> float:
    return float(np.mean([CHAT.ttft_met(request) and CHAT.tpot_met(request) for request in requests]))


def tokens(finished: Run) -> int:
    """Tokens of answers that ended before the last request came."""
    last_s = max(request.arrival_s for request in finished.requests)
    every = (*finished.requests, *finished.backlog)
    return sum(r.output_tokens for r in every if r.finished_s is not None and r.finished_s <= last_s)


ARRIVALS = {
    "half": poisson(4.0, 600, np.random.default_rng(3)),
    "swings": square_wave(1.6, 6.4, 120.0, 600, np.random.default_rng(3)),
}


@pytest.mark.long
@pytest.mark.parametrize("arrival_s", ARRIVALS.values(), ids=ARRIVALS)
def test_batches_make_more_tokens_and_cost_others_no_more_than_a_point(arrival_s: np.ndarray) -> None:
    alone, beside = run(CONFIG, chat(arrival_s)), run(CONFIG, chat(arrival_s), backlog=batch(10_000))
    assert in_time(beside.requests) > in_time(alone.requests) - 0.01
    assert tokens(beside) > 1.3 * tokens(alone)


def test_requests_of_batches_are_counted_by_themselves_and_stop_with_the_others() -> None:
    finished = run(CONFIG, chat(np.arange(20) / 2.0), backlog=batch(10_000))
    assert len(finished.requests) == 20
    assert 0 < len(finished.backlog) < 10_000
    assert all(request.finished_s is not None for request in finished.backlog)
    assert max(request.arrival_s for request in finished.backlog) <= finished.makespan_s
