"""The share of questions answered within the deadline, by callers at a time, on a machine that does nothing else.

Not collected by default; run with `pytest -s bench/predictor/test_answers_in_time.py`. What a batch costs is measured
first, in CPU time on one core, so that other programs count little. Then the very batching and asking that serve run
under a clock of their own, which jumps from event to event: a batch takes what was measured. Each caller asks four
times a second, at random; no prompt comes twice.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bench.predictor.test_speed_of_serving import CALLERS, PAUSE_S, batch_of, fresh_prompts
from bench.summary import Spread
from policies.types import FloatArray
from predictor.asking import Asking, AskingConfig
from predictor.batching import Batcher, BatchingConfig
from predictor.calibration import DAY_0
from predictor.checkpoint import Ranker

BUDGETS, BATCHES, REPEATS, QUESTIONS = (1, 64, 128, 192, 256, 384, 512), 25, 3, 120


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves on at once to what is next; a batch takes `batch_s` of its tokens."""

    def __init__(self, batch_s: Callable[[int], float]) -> None:
        super().__init__()
        self._now_s, self._batch_s = 0.0, batch_s
        look: Callable[[float], Any] = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = partial(self._jump, look)  # type: ignore[attr-defined]

    def _jump(self, look: Callable[[float], Any], timeout: float | None = None) -> Any:
        self._now_s += timeout or 0.0
        return look(0)

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        async def wait(prompts: Sequence[list[int]]) -> FloatArray:
            await asyncio.sleep(self._batch_s(sum(map(len, prompts))))
            return np.zeros(len(prompts))

        return self.create_task(wait(*args))


def batch_costs(ranker: Ranker) -> tuple[list[float], list[float]]:
    """Mean tokens of batches by budget, and the lower quartiles of the CPU seconds that they take."""
    prompts = fresh_prompts()
    tokens, seconds = [], []
    for budget in BUDGETS:
        found = np.array([_batch_cost(ranker, batch_of(ranker, budget, prompts)) for _ in range(BATCHES)])
        tokens.append(float(found[:, 0].mean()))
        seconds.append(tokens[-1] * float(np.quantile(found[:, 1] / found[:, 0], 0.25)))
    return tokens, seconds


def _batch_cost(ranker: Ranker, batch: list[list[int]]) -> tuple[int, float]:
    started_s = time.process_time()
    ranker.outputs(batch)
    return sum(map(len, batch)), time.process_time() - started_s


async def answered(ranker: Ranker, callers: int, deadline_s: float, seed: int) -> float:
    def never(prompts: Sequence[list[int]]) -> FloatArray:
        raise AssertionError("the loop takes the place of the model")

    asking = Asking(
        Batcher(ranker.tokenizer.encode, never, BatchingConfig(max_age_s=deadline_s)),
        AskingConfig(deadline_s=deadline_s),
    )
    prompts, rng = fresh_prompts(), np.random.default_rng(seed)

    async def ask() -> None:
        for _ in range(QUESTIONS):
            await asyncio.sleep(rng.exponential(PAUSE_S))
            await asking.score(next(prompts))

    await asyncio.gather(*(ask() for _ in range(callers)))
    return asking.outcomes["answered"] / asking.outcomes.total()


def in_loop(work: Callable[[], Awaitable[float]], batch_s: Callable[[int], float]) -> float:
    loop = JumpingLoop(batch_s)
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


@pytest.mark.parametrize("deadline_s", [0.015, 0.03, 0.05])
def test_answers_within_the_deadline_on_a_quiet_machine(deadline_s: float) -> None:
    torch.set_num_threads(1)
    ranker = Ranker.load(DAY_0, dtype="auto")
    tokens, seconds = batch_costs(ranker)
    print("\n" + ", ".join(f"{n:.0f} tokens {1e3 * s:.1f} ms" for n, s in zip(tokens, seconds, strict=True)))
    for callers in CALLERS:
        found = [
            100
            * in_loop(
                partial(answered, ranker, callers, deadline_s, seed), lambda n: float(np.interp(n, tokens, seconds))
            )
            for seed in range(REPEATS)
        ]
        print(f"{1e3 * deadline_s:.0f} ms, {callers} callers: {Spread.of(found):.1f} % in time")
