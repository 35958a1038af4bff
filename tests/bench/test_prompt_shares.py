"""The bench of shares and bins, on an engine whose steps take a second each."""

import itertools
import statistics
from collections.abc import Iterator

import pytest

from bench.deployments.engine_in_process import Request, Told, closed_loop
from bench.deployments.prompt_shares import BLOCK, batches, of_steps, requests, run_batches, run_singly
from policies.types import Phase, StepResult


class Steps:
    """A token for each request in each step of a second; none in the step in which its prompt is read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.most = 0
        self.cleared = False
        self._left: dict[int, int] = {}
        self._new: list[int] = []

    def add(self, number: int, request: Request) -> None:
        assert number not in self._left
        self._left[number] = request.output_tokens
        self._new.append(number)

    def step(self) -> list[Told]:
        self.now_s += 1.0
        self.most = max(self.most, len(self._left))
        read, self._new = set(self._new), []
        told = []
        for number in [number for number in self._left if number not in read]:
            self._left[number] -= 1
            told.append(Told(number, 1, not self._left[number]))
            if not self._left[number]:
                del self._left[number]
        return told

    def clear(self) -> None:
        self._left.clear()
        self.cleared = True

    def now(self) -> float:
        return self.now_s


def same(prompt: int, output: int) -> Iterator[Request]:
    return itertools.repeat(Request(prompt, output))


def test_every_block_of_requests_has_the_mean_lengths_in_another_order() -> None:
    given = list(itertools.islice(requests(512, 128), 3 * BLOCK))
    blocks = [given[at : at + BLOCK] for at in range(0, len(given), BLOCK)]
    for block in blocks:
        assert statistics.mean(one.prompt_tokens for one in block) == pytest.approx(512, rel=0.01)
        assert statistics.mean(one.output_tokens for one in block) == pytest.approx(128, rel=0.01)
        assert sorted(one.output_tokens for one in block) == sorted(one.output_tokens for one in blocks[0])
    assert blocks[0] != blocks[1]
    assert given == list(itertools.islice(requests(512, 128), 3 * BLOCK))


def test_what_is_counted_lies_between_two_first_tokens_and_the_batch_is_full_all_the_time() -> None:
    engine, begun = Steps(), list[float]()
    window = closed_loop(
        engine, same(7, 4), clients=3, begin=3, end=9, now=engine.now, on_begin=lambda: begun.append(engine.now_s)
    )
    # Read in step 1, tokens in 2 to 5, the next three asked for before step 6.
    assert begun == [2.0]
    assert window.seconds == 10.0
    assert window.prompt_tokens == 6 * 7
    assert window.output_tokens == 2 * 3 * 4
    assert engine.most == 3 and engine.cleared
    figures = window.figures()
    assert figures["requests"] == 6
    assert figures["tokens_per_s"] == pytest.approx((42 + 24) / 10)
    assert figures["ttft_p99_s"] == 2.0
    assert figures["itl_p50_s"] == 1.0
    assert figures["tpot_p50_s"] is None  # of answers with more than 8 tokens


def test_without_bounds_all_requests_count_from_the_first_to_the_end_of_the_last() -> None:
    engine = Steps()
    window = closed_loop(engine, [Request(7, 2), Request(7, 12), Request(7, 3)], clients=2, now=engine.now)
    assert (window.seconds, window.prompt_tokens, window.output_tokens) == (13.0, 3 * 7, 2 + 12 + 3)
    assert window.first_tokens_s == [2.0, 2.0, 2.0] and window.means_s == [1.0]


def test_an_engine_that_fails_is_cleared() -> None:
    class Failing(Steps):
        def step(self) -> list[Told]:
            raise RuntimeError("no")

    engine = Failing()
    with pytest.raises(RuntimeError, match="no"):
        closed_loop(engine, same(1, 1), clients=2, begin=1, end=2, now=engine.now)
    assert engine.cleared


def test_batches_are_of_one_bin_and_go_when_they_are_full() -> None:
    assert batches([1, 8, 2, 7, 3, 6], 1, 2) == [[1, 8], [2, 7], [3, 6]]
    assert batches([1, 8, 2, 7, 3, 6], 2, 2) == [[1, 2], [8, 7], [3], [6]]
    every = batches(range(1, 257), 32)
    assert len(every) == 32
    assert all(max(batch) - min(batch) == 7 for batch in every)


def test_a_batch_takes_as_long_as_its_longest_answer_and_single_requests_wait_for_nobody() -> None:
    engine = Steps()
    assert run_batches(engine, [[1, 5], [2, 2]], now=engine.now) == (1 + 5) + (1 + 2)
    assert run_singly(engine, [1, 5, 2, 2], clients=2, now=engine.now) == (1 + 1) + (1 + 2) + (1 + 2)
    assert engine.most == 2


def step(prefill_tokens: int, decode_requests: int, seconds: float) -> StepResult:
    return StepResult(0.0, seconds, Phase.MIXED, prefill_tokens, 1, decode_requests, 0, 8, 8, 0)


def test_steps_are_told_apart_by_what_they_held() -> None:
    found = of_steps([step(5, 0, 3.0), step(0, 2, 1.0), step(0, 2, 2.0), step(5, 2, 4.0)])
    assert found["steps"] == {"prefill": 1, "decode": 2, "mixed": 1}
    assert found["mean_step_s"] == {"prefill": 3.0, "decode": 1.5, "mixed": 4.0}
