import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from policies.errors import AdmissionError, PredictorError
from policies.types import FloatArray
from predictor.batching import Batcher, BatchingConfig
from tests.waiting import PATIENCE_S


def encode(prompts: Sequence[str]) -> list[list[int]]:
    return [[ord(letter) for letter in prompt] for prompt in prompts]


class Model:
    """A score is the sum of the ids. Remembers its batches; waits while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.busy, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def score(self, prompts: Sequence[list[int]]) -> FloatArray:
        self.batches.append(list(prompts))
        self.busy.set()
        assert self.gate.wait(PATIENCE_S)
        return np.array([float(sum(prompt)) for prompt in prompts])


Make = Callable[..., Batcher]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def make(model: Model) -> AsyncIterator[Make]:
    """Makes batchers, of this model unless told otherwise, which are closed in the end."""
    made: list[Batcher] = []

    def batcher(score: Callable[[Sequence[list[int]]], FloatArray] = model.score, **config: Any) -> Batcher:
        made.append(Batcher(encode, score, BatchingConfig(**config)))
        return made[-1]

    yield batcher
    model.gate.set()
    for each in made:
        await each.close()


async def started(model: Model) -> None:
    assert await asyncio.to_thread(model.busy.wait, PATIENCE_S)


async def test_every_caller_gets_the_score_of_its_prompt(make: Make) -> None:
    batcher = make()
    prompts = [f"prompt {number}" for number in range(50)]
    scores = await asyncio.gather(*(batcher.score(prompt) for prompt in prompts))
    assert scores == [sum(map(ord, prompt)) for prompt in prompts]


async def test_prompts_that_come_together_share_batches_within_the_budget(make: Make, model: Model) -> None:
    batcher = make(max_batch_tokens=20, max_age_s=60.0)
    await asyncio.gather(*(batcher.score(f"{number:05}") for number in range(10)))
    assert [len(batch) for batch in model.batches] == [4, 4, 2]


@pytest.mark.slow
async def test_batches_shrink_until_they_fit_into_half_of_what_a_prompt_may_wait(make: Make) -> None:
    sizes: list[int] = []

    def score(prompts: Sequence[list[int]]) -> FloatArray:
        sizes.append(sum(map(len, prompts)))
        time.sleep(1e-4 * sizes[-1])  # 512 tokens: 51 ms
        return np.zeros(len(prompts))

    batcher = make(score, max_batch_s=0.02, max_age_s=0.04)
    for turn in range(40):
        asked = (batcher.score(f"{turn:04}-{number:04}-12345") for number in range(64))
        await asyncio.gather(*asked, return_exceptions=True)
    assert max(sizes[-5:]) < 256 < sizes[0]


async def test_batches_grow_while_they_are_quick(make: Make, model: Model) -> None:
    batcher = make(max_batch_tokens=600, max_batch_s=30.0, max_age_s=60.0)
    await asyncio.gather(*(batcher.score(f"{number:0100}") for number in range(40)))
    assert [len(batch) for batch in model.batches] == [5, 5, 6, 6, 6, 6, 6]  # 512, 563 and 600 tokens


async def test_a_prompt_beyond_the_budget_is_scored_alone(make: Make, model: Model) -> None:
    batcher = make(max_batch_tokens=4, max_age_s=60.0)
    await asyncio.gather(batcher.score("a"), batcher.score("long prompt"), batcher.score("b"))
    assert [len(batch) for batch in model.batches] == [1, 1, 1]


async def test_identical_prompts_are_scored_once_waiting_running_or_known(make: Make, model: Model) -> None:
    batcher = make()
    model.gate.clear()
    first = [asyncio.create_task(batcher.score("same")) for _ in range(3)]
    await started(model)
    running = asyncio.create_task(batcher.score("same"))
    await asyncio.sleep(0)
    model.gate.set()
    assert len(set(await asyncio.gather(*first, running, batcher.score("same")))) == 1
    await batcher.score("same")
    assert model.batches == [encode(["same"])]


async def test_the_cache_forgets_what_was_used_least_lately(make: Make, model: Model) -> None:
    batcher = make(cache_entries=2)
    for prompt in ("a", "b", "a", "c", "a", "b"):
        await batcher.score(prompt)
    assert [batch[0] for batch in model.batches] == encode("abcb")


async def test_more_than_may_wait_is_refused_at_once(make: Make, model: Model) -> None:
    batcher = make(max_waiting=2, max_age_s=60.0)
    model.gate.clear()
    running = asyncio.create_task(batcher.score("running"))
    await started(model)
    waiting = [asyncio.create_task(batcher.score(prompt)) for prompt in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(AdmissionError, match="2 prompts wait"):
        await batcher.score("c")
    model.gate.set()
    await asyncio.gather(running, *waiting)


async def test_under_overload_the_newest_go_first_and_the_oldest_are_given_up(
    make: Make, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    batcher = make(max_batch_tokens=1, max_age_s=600.0)
    model.gate.clear()
    running = asyncio.create_task(batcher.score("r"))
    await started(model)
    old = [asyncio.create_task(batcher.score(prompt)) for prompt in "abc"]
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 601.0)
    new = asyncio.create_task(batcher.score("n"))
    await asyncio.sleep(0)
    model.gate.set()
    assert (await running, await new) == (ord("r"), ord("n"))
    for task in old:
        with pytest.raises(AdmissionError, match="no time for it in 600.0 s"):
            await task
    assert [batch[0] for batch in model.batches] == encode("rn")


async def test_a_caller_that_leaves_takes_nothing_from_the_others(make: Make, model: Model) -> None:
    batcher = make()
    model.gate.clear()
    leaving, staying = [asyncio.create_task(batcher.score("same")) for _ in range(2)]
    await started(model)
    leaving.cancel()
    model.gate.set()
    assert await staying == sum(map(ord, "same"))


async def test_a_failing_batch_fails_its_callers_and_the_next_one_runs(make: Make) -> None:
    def failing(prompts: Sequence[list[int]]) -> FloatArray:
        if prompts[0] == [ord("x")]:
            raise ValueError("out of memory")
        return np.zeros(len(prompts))

    batcher = make(failing)
    with pytest.raises(PredictorError, match="out of memory"):
        await batcher.score("x")
    assert await batcher.score("y") == 0.0


async def test_a_failed_batch_whose_callers_left_leaves_no_error_that_nobody_reads(make: Make, model: Model) -> None:
    unread = list[str]()

    def failing(prompts: Sequence[list[int]]) -> FloatArray:
        model.score(prompts)
        raise ValueError("out of memory")

    batcher = make(failing)
    model.gate.clear()
    leaving = [asyncio.create_task(batcher.score(prompt)) for prompt in ("a", "b")]
    await started(model)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))
    model.gate.set()
    await batcher.close()
    gc.collect()
    assert unread == []


async def test_closing_tells_those_who_wait(make: Make, model: Model) -> None:
    batcher = make()
    model.gate.clear()
    running = asyncio.create_task(batcher.score("running"))
    await started(model)
    waiting = asyncio.create_task(batcher.score("waiting"))
    await asyncio.sleep(0)
    await batcher.close()
    model.gate.set()
    for task in (running, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
