"""Gang batches of a real, tiny model: every answer is the one that the request would have had alone."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from vllm import SamplingParams

from deployments.engines.base import RowOutput
from deployments.engines.transformers.batch import GangRunner, Row
from deployments.engines.transformers.model import GangCache, GangModel
from deployments.engines.transformers.sampling import RowSampling
from policies.gang.prefill import PrefillConfig
from tests.deployments.tiny_models import CONTEXT, VOCABULARY, greedy, tiny_llama

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8, 9], [3], list(range(30)), [40, 2], [11, 12, 13]]
LENGTHS = [7, 3, 12, 1, 9]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def row(name: str, prompt: Sequence[int], max_tokens: int = 8, **params: Any) -> Row:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    return Row(
        request_id=name,
        token_ids=list(prompt),
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        sampling=RowSampling(asked, len(prompt), VOCABULARY, torch.device("cpu")),
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
    )


def rows() -> list[Row]:
    return [row(f"x{n}", prompt, length) for n, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))]


class Told:
    """What a batch sent, and who was cancelled."""

    def __init__(self, gang: GangModel, *, shrink: bool = True, max_model_len: int = CONTEXT) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.last: dict[str, RowOutput] = {}
        self.cancelled: set[str] = set()
        self.after_step: Callable[[], None] = lambda: None
        self.runner = GangRunner(
            model=gang,
            max_model_len=max_model_len,
            shrink=shrink,
            emit=self._take,
            is_cancelled=self.cancelled.__contains__,
        )

    def _take(self, outputs: list[RowOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends
            self.tokens[output.request_id] += output.token_ids
            self.last[output.request_id] = output
            if output.finish:
                self.ends[output.request_id] = output.finish
        self.after_step()


@pytest.mark.parametrize("pack_decode_from", [1.0, math.inf])
@pytest.mark.parametrize("shrink", [True, False])
def test_every_answer_is_the_one_it_would_have_had_alone(model: Any, shrink: bool, pack_decode_from: float) -> None:
    told = Told(GangModel(model, PrefillConfig(pack_decode_from=pack_decode_from)), shrink=shrink)
    told.runner.run(rows())
    for n, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert told.tokens[f"x{n}"] == greedy(model, prompt, length)
    assert set(told.ends.values()) == {"length"}
    counts = told.runner.counts
    assert (counts.batches, counts.decode_steps, counts.finished) == (1, max(LENGTHS) - 1, len(LENGTHS))
    useful = sum(LENGTHS) - len(LENGTHS)  # the first token of each is the prefill's
    static = len(LENGTHS) * (max(LENGTHS) - 1)
    assert counts.row_steps == (useful if shrink else static)
    assert counts.wasted_row_steps == (0 if shrink else static - useful)


@pytest.mark.parametrize("pack_decode_from", [1.0, math.inf])
def test_a_row_that_ended_at_the_context_limit_may_be_computed_on(pack_decode_from: float) -> None:
    """By a model that looks its positions up in a table."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    model: Any = GPT2LMHeadModel(config).eval()
    told = Told(GangModel(model, PrefillConfig(pack_decode_from=pack_decode_from)), shrink=False, max_model_len=48)
    told.runner.run([row("full", range(46)), row("short", [1]), row("shorter", [2])])
    assert told.tokens == {
        "full": greedy(model, list(range(46)), 2),
        "short": greedy(model, [1], 8),
        "shorter": greedy(model, [2], 8),
    }


def test_stop_tokens_end_an_answer_and_the_context_does(model: Any) -> None:
    alone = greedy(model, PROMPTS[0], 8)
    stop = alone[3]
    told = Told(GangModel(model, PrefillConfig()), max_model_len=40)
    ends_itself = row("eos", PROMPTS[0])
    ends_itself.eos_token_id = stop
    told.runner.run(
        [
            row("stops", PROMPTS[0], stop_token_ids=[stop]),
            ends_itself,
            row("full", list(range(39)), max_tokens=100),
            row("fills", list(range(35)), max_tokens=100),
        ]
    )
    until = alone[: alone.index(stop) + 1]
    assert told.tokens["stops"] == told.tokens["eos"] == until
    assert told.ends == {"stops": "stop", "eos": "stop", "full": "length", "fills": "length"}
    assert (told.last["stops"].stop_reason, told.last["eos"].stop_reason) == (stop, None)
    assert (len(told.tokens["full"]), len(told.tokens["fills"])) == (1, 5)


@pytest.mark.parametrize("shrink", [True, False])
def test_a_cancelled_row_says_nothing_more_and_disturbs_nobody(model: Any, shrink: bool) -> None:
    told = Told(GangModel(model, PrefillConfig()), shrink=shrink)

    def cancel() -> None:
        if len(told.tokens["x2"]) == 4:
            told.cancelled.add("x2")

    told.after_step = cancel
    told.runner.run(rows())
    assert told.tokens["x2"] == greedy(model, PROMPTS[2], 4)
    assert "x2" not in told.ends
    for n in (0, 1, 3, 4):
        assert told.tokens[f"x{n}"] == greedy(model, PROMPTS[n], LENGTHS[n])
    assert told.runner.counts.decode_steps == max(LENGTHS[n] for n in (0, 1, 3, 4)) - 1


def test_a_row_that_is_cancelled_during_prefill_says_nothing_at_all(model: Any) -> None:
    told = Told(GangModel(model, PrefillConfig()))
    hook = model.lm_head.register_forward_hook(lambda *_: told.cancelled.update(["x0", "x2"]))
    told.runner.run(rows())
    hook.remove()
    assert set(told.tokens) == {"x1", "x3", "x4"}
    assert told.tokens["x4"] == greedy(model, PROMPTS[4], LENGTHS[4])


def test_a_batch_of_cancelled_rows_is_over_at_once(model: Any) -> None:
    told = Told(GangModel(model, PrefillConfig()))
    told.cancelled |= {f"x{n}" for n in range(5)}
    told.runner.run(rows())
    assert (dict(told.tokens), told.runner.counts.decode_steps) == ({}, 0)


class Small(GangModel):
    """A real model on a device with little memory: prefill and decode fail beyond this many cache places."""

    def __init__(self, model: Any, places: int, error: type[Exception]) -> None:
        self._places, self._error = 10**9, error
        super().__init__(model, PrefillConfig())
        self._places = places

    def _charge(self, places: int) -> None:
        if places > self._places:
            raise self._error("can't allocate memory: you tried to allocate too much")

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, GangCache]:
        self._charge(len(prompts) * max(map(len, prompts)))
        return super().prefill(prompts)

    def decode(self, token_ids: torch.Tensor, held: GangCache) -> tuple[torch.Tensor, GangCache]:
        self._charge(len(token_ids) * (int(held.lengths.max()) + 1))
        return super().decode(token_ids, held)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("places", [5 * 30, 4 * 30, 50])
def test_a_batch_without_memory_is_split_and_every_answer_goes_on(
    model: Any, places: int, error: type[Exception]
) -> None:
    """At 150 prefill fits and decode does not, after tokens were sent; below, prefill does not."""
    told = Told(Small(model, places, error), shrink=places < 150)
    told.runner.run(rows())
    for n, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        assert told.tokens[f"x{n}"] == greedy(model, prompt, length)
    assert told.runner.counts.splits > 0


def test_a_request_that_does_not_fit_by_itself_fails_alone(model: Any) -> None:
    told = Told(Small(model, 35, MemoryError))
    told.runner.run(rows())
    assert told.ends.pop("x2") == "error"
    assert set(told.ends.values()) == {"length"}
    assert told.tokens["x0"] == greedy(model, PROMPTS[0], LENGTHS[0])


def test_another_failure_of_the_model_is_not_taken_for_a_lack_of_memory(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("shape mismatch")

    told = Told(GangModel(model, PrefillConfig()))
    with model.model.register_forward_hook(fail), pytest.raises(RuntimeError, match="shape"):
        told.runner.run(rows())
