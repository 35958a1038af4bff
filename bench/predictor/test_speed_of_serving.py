"""Milliseconds from a prompt to its score at 1, 16 and 64 callers at a time, by runtime, on this machine's CPU.

Not collected by default; run with `pytest -s bench/predictor/test_speed_of_serving.py`. Each caller asks for another
prompt as soon as it has its score; no prompt comes twice, so the cache never helps. The runtimes take
turns within a repeat. Then, as a router asks: with the deadline of 15 ms, each caller every quarter of a second.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.summary import Spread
from predictor.asking import Asking, AskingConfig
from predictor.batching import Batcher, BatchingConfig
from predictor.calibration import DAY_0
from predictor.checkpoint import Ranker
from predictor.samples import read_samples

PROMPTS = Path(__file__).parents[2] / "tests" / "predictor" / "data" / "prompts.jsonl.gz"
CALLERS, SCORES, REPEATS = (1, 16, 64), 256, 3
PAUSE_S, QUESTIONS = 0.25, 12
WARM_UPS, BATCHES = 3, 30
PATIENT = BatchingConfig(max_batch_tokens=512, max_age_s=60.0)


def runtimes() -> dict[str, Ranker]:
    float32, bfloat16 = Ranker.load(DAY_0), Ranker.load(DAY_0, dtype="bfloat16")
    int8, compiled = Ranker.load(DAY_0), Ranker.load(DAY_0, dtype="bfloat16")
    int8.encoder.model = torch.ao.quantization.quantize_dynamic(int8.encoder.model, {torch.nn.Linear}, torch.qint8)
    compiled.encoder.model.encoder = torch.compile(compiled.encoder.model.encoder, dynamic=True)
    return {"float32": float32, "bfloat16": bfloat16, "int8 dynamic": int8, "bfloat16 compiled": compiled}


def fresh_prompts() -> Iterator[str]:
    """Real prompts, each told from its other turns by a number."""
    texts = [sample.prompt for sample in read_samples([PROMPTS])]
    order = np.random.default_rng(0).permutation(len(texts))
    return (f"{texts[index]} {turn}" for turn in itertools.count() for index in order)


def batcher_of(ranker: Ranker, config: BatchingConfig) -> Batcher:
    return Batcher(ranker.tokenizer.encode, lambda batch: ranker.outputs(batch)[:, 0], config)


async def answered_fraction(ranker: Ranker, callers: int, prompts: Iterator[str]) -> float:
    batcher = batcher_of(ranker, BatchingConfig())
    asking = Asking(batcher, AskingConfig())

    async def ask(number: int) -> None:
        await asyncio.sleep(PAUSE_S * number / callers)
        for _ in range(QUESTIONS):
            await asking.score(next(prompts))
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(ask(number) for number in range(callers)))
    await batcher.close()
    return asking.outcomes["answered"] / (callers * QUESTIONS)


async def waits_s(ranker: Ranker, callers: int, prompts: Iterator[str]) -> list[float]:
    batcher = batcher_of(ranker, PATIENT)
    waits: list[float] = []

    async def ask() -> None:
        while len(waits) < SCORES:
            started_s = time.perf_counter()
            await batcher.score(next(prompts))
            waits.append(time.perf_counter() - started_s)

    await asyncio.gather(*(ask() for _ in range(callers)))
    await batcher.close()
    return waits


def test_latency_by_runtime_and_callers() -> None:
    rankers, prompts = runtimes(), fresh_prompts()
    found: dict[tuple[str, int], list[Any]] = {}
    for _, callers, (name, ranker) in itertools.product(range(REPEATS + 1), CALLERS, rankers.items()):
        waits = np.array(asyncio.run(waits_s(ranker, callers, prompts)))
        figures = (*np.quantile(waits, (0.5, 0.99)) * 1e3,)
        found.setdefault((name, callers), []).append(figures)
    print(f"\n{'runtime':<20}{'callers':>8}{'p50 ms':>22}{'p99 ms':>24}")
    for (name, callers), repeats in found.items():
        p50, p99 = zip(*repeats[1:], strict=True)  # the first round warms up and compiles
        print(f"{name:<20}{callers:>8}{format(Spread.of(p50), '.1f'):>22}{format(Spread.of(p99), '.1f'):>24}")


def batch_of(ranker: Ranker, tokens: int, prompts: Iterator[str]) -> list[list[int]]:
    """Prompts of at least this many tokens, and at least one prompt."""
    batch = ranker.tokenizer.encode([next(prompts)])
    while sum(map(len, batch)) < tokens:
        batch += ranker.tokenizer.encode([next(prompts)])
    return batch


@pytest.mark.parametrize("tokens", [1, 128, 512])
def test_cost_of_a_prompt_by_runtime(tokens: int) -> None:
    """CPU time on one core; the runtimes take turns at each batch."""
    torch.set_num_threads(1)
    rankers, prompts = runtimes(), fresh_prompts()
    found: dict[str, list[float]] = {name: [] for name in rankers}
    for turn in range(WARM_UPS + BATCHES):
        batch = batch_of(rankers["bfloat16"], tokens, prompts)
        for name, ranker in rankers.items():
            started_s = time.process_time()
            ranker.outputs(batch)
            if turn >= WARM_UPS:
                found[name].append((time.process_time() - started_s) / len(batch))
    for name, costs in found.items():
        ratios = np.array(costs) / found["bfloat16"]
        quartiles = np.quantile(ratios, (0.25, 0.5, 0.75))
        cost_ms = 1e3 * statistics.median(costs)
        print(f"{tokens} tokens, {name:<20} {cost_ms:5.1f} ms a prompt, times bfloat16: {quartiles}")


def test_answers_within_the_deadline() -> None:
    ranker, prompts = Ranker.load(DAY_0, dtype="auto"), fresh_prompts()
    asyncio.run(answered_fraction(ranker, 1, prompts))
    for callers in CALLERS:
        found = [asyncio.run(answered_fraction(ranker, callers, prompts)) * 100 for _ in range(REPEATS)]
        print(f"\n{callers / PAUSE_S:.0f} questions/s: {Spread.of(found):.1f} % answered within 15 ms")
