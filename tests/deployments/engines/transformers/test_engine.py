"""The Transformers engine as the relay sees it: real requests in, real outputs out, a tiny real model in between."""

import asyncio
import threading
from argparse import Namespace
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.config.engine import GangSection
from deployments.engines.base import Engine
from deployments.engines.transformers.engine import TransformersEngine, _max_model_len
from deployments.engines.vllm.request_metadata import RequestMetadata
from policies.errors import ConfigError, ReplicaLostError
from tests.deployments.tiny_models import CONTEXT, greedy, tiny_llama
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def asked(name: str, prompt: list[int], max_tokens: int | None = 6, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    nothing = dict.fromkeys(("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank"))
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, sampling_params=sampling, arrival_time=0.0, **nothing
    )


class Running:
    """An engine, and what came out of it by request, as decoded on a router's side."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine: Engine = engine  # the protocol holds
        self.made = engine
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, str] = {}
        self.outputs: list[Any] = []
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        codec = self.made.codec
        while True:
            batch = await self.engine.next_outputs()
            for output in codec.decode_outputs(codec.encode_outputs(batch, codec.outputs(batch))).outputs:
                self.outputs.append(output)
                self.tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    self.ends[output.request_id] = str(output.finish_reason)

    async def all_ended(self, count: int) -> None:
        await until(lambda: len(self.ends) == count)


@pytest.fixture
async def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Running]]:
    made: list[Running] = []

    def starting(max_model_len: int | None = None, gather_s: float = 0.01, **gang: Any) -> Running:
        monkeypatch.setattr("deployments.engines.transformers.engine.GATHER_S", gather_s)
        args = Namespace(
            model=str(folder), dtype="auto", revision=None, trust_remote_code=False, max_model_len=max_model_len
        )
        engine = TransformersEngine(args, GangSection(**gang), asyncio.get_running_loop())
        made.append(Running(engine))
        return made[-1]

    yield starting
    for running in made:
        await asyncio.to_thread(running.made.shutdown)
        running.reader.cancel()


def before_each_pass(running: Running, call: Callable[[], object]) -> Any:
    def hook(*_: Any) -> None:
        call()  # what a hook returns is the pass's input

    return running.made._model._model.model.register_forward_pre_hook(hook)


@pytest.fixture
async def held(start: Callable[..., Running]) -> AsyncIterator[tuple[Running, threading.Event]]:
    """An engine whose forward passes wait while the event is clear."""
    # It waits so long for the second of two that a test adds at once, and then for nobody.
    running, go = start(batch_size=2, gather_s=1.0), threading.Event()
    go.set()
    hook = before_each_pass(running, lambda: go.wait(PATIENCE_S))
    yield running, go
    go.set()
    hook.remove()


async def test_a_gang_is_answered_as_each_would_have_been_alone(start: Callable[..., Running], model: Any) -> None:
    running = start(batch_size=4, gather_s=5.0)
    prompts = {"a": [1, 2, 3], "b": [9], "c": list(range(40)), "d": [5, 5]}
    for name, prompt in prompts.items():
        await running.engine.add(asked(name, prompt))
    await running.all_ended(4)
    assert running.tokens == {name: greedy(model, prompt, 6) for name, prompt in prompts.items()}
    status = await running.engine.status()
    assert (status["batches"], status["finished"], status["running"], status["waiting"]) == (1, 4, 0, 0)
    assert running.engine.slots == 4


async def test_a_prompt_at_the_context_limit_has_one_token_and_one_beyond_fails(start: Callable[..., Running]) -> None:
    running = start(max_model_len=32)
    await running.engine.add(asked("last", list(range(31)), max_tokens=None))
    await running.engine.add(asked("beyond", list(range(32)), max_tokens=None))
    await running.all_ended(2)
    assert running.ends == {"last": "length", "beyond": "error"}
    assert len(running.tokens["last"]) == 1


async def test_what_is_not_supported_fails_and_what_has_no_tokens(start: Callable[..., Running]) -> None:
    running = start()
    await running.engine.add(asked("empty", []))
    await running.engine.add(asked("prompt-logprobs", [1], prompt_logprobs=1))
    await running.engine.add(asked("good", [1]))
    await running.all_ended(3)
    assert running.ends == {"empty": "error", "prompt-logprobs": "error", "good": "length"}


async def test_a_request_aborted_in_prefill_says_nothing_and_in_decode_nothing_more(
    held: tuple[Running, threading.Event], model: Any
) -> None:
    running, go = held
    go.clear()
    await running.engine.add(asked("prefill", [1, 2, 3], 20))
    await running.engine.add(asked("other", [4], 20))
    await until(lambda: bool(running.made._running))
    await running.engine.abort(["prefill", "never-heard-of"])
    passes = count(1)
    before_each_pass(running, lambda: next(passes) == 6 and go.clear())  # in the middle of its answer it is aborted
    go.set()
    await until(lambda: len(running.tokens["other"]) > 2 and not go.is_set())
    await running.engine.add(asked("next", [7], 4))
    await running.engine.abort(["other"])
    go.set()
    await running.all_ended(1)
    assert running.tokens["next"] == greedy(model, [7], 4)
    assert not running.tokens["prefill"]
    assert running.tokens["other"] == greedy(model, [4], 20)[: len(running.tokens["other"])]
    assert len(running.tokens["other"]) < 20


async def test_its_status_tells_how_long_a_forward_pass_takes_already(held: tuple[Running, threading.Event]) -> None:
    running, go = held
    assert (await running.engine.status())["pass_s"] == 0.0
    go.clear()
    await running.engine.add(asked("x", [1, 2, 3], 40))
    await until(lambda: bool(running.made._running))
    await asyncio.sleep(0.3)
    assert (await running.engine.status())["pass_s"] >= 0.2
    passes, seen = count(1), list[float]()
    before_each_pass(running, lambda: next(passes) <= 10 and go.clear())
    for _ in range(10):
        go.set()
        await until(lambda: not go.is_set())
        seen.append((await running.engine.status())["pass_s"])
    assert min(seen) < 0.2  # a machine that stands still shows in one of them, a time that goes on in all
    go.set()
    await running.all_ended(1)


async def test_what_waits_for_the_next_batch_can_be_aborted(held: tuple[Running, threading.Event]) -> None:
    running, go = held
    go.clear()
    for name in "abcd":
        await running.engine.add(asked(name, [1, 2], 3))
    await until(lambda: len(running.made._running) == 2)
    await running.engine.abort(["c"])
    go.set()
    await running.all_ended(3)
    assert set(running.ends) == {"a", "b", "d"}
    assert (await running.engine.status())["batches"] == 2


async def test_a_batch_is_no_larger_than_its_cache_can_hold(start: Callable[..., Running], model: Any) -> None:
    running, all_are_there = start(batch_size=8, kv_cache_tokens=3 * (4 + 6)), threading.Event()
    before_each_pass(running, lambda: all_are_there.wait(PATIENCE_S))
    for n in range(7):
        await running.engine.add(asked(f"x{n}", [n, 1, 2, 3]))
    all_are_there.set()
    await running.all_ended(7)
    assert (await running.engine.status())["batches"] == 3
    assert running.tokens["x6"] == greedy(model, [6, 1, 2, 3], 6)


async def test_a_bin_of_long_answers_is_offered_smaller_batches_when_memory_is_tight(
    start: Callable[..., Running],
) -> None:
    running = start(batch_size=8, kv_cache_tokens=8 * (2 + 3))
    assert tuple(running.engine.gang_sizes) == ()
    for n in range(24):
        for bin_index, max_tokens in ((0, 3), (2, 18)):
            extra = RequestMetadata(bin_index=bin_index).as_extra_args()
            await running.engine.add(asked(f"{bin_index}-{n}", [n, 1], max_tokens, extra_args=extra))
    await running.all_ended(48)
    await until(lambda: len(running.engine.gang_sizes) == 3)
    assert tuple(running.engine.gang_sizes) == (8, 8, 2)  # of the second nothing is known


async def test_a_model_that_fails_ends_the_replica_and_not_silently(start: Callable[..., Running]) -> None:
    running = start()

    def fail(*_: Any) -> None:
        raise RuntimeError("device-side assert")

    running.made._model._model.model.register_forward_pre_hook(fail)
    await running.engine.add(asked("x", [1]))
    with pytest.raises(ReplicaLostError, match="device-side assert"):
        await asyncio.wait_for(running.reader, PATIENCE_S)
    assert running.engine.dead


async def test_logprobs_and_seeds_travel_to_the_front_end(start: Callable[..., Running]) -> None:
    running = start(batch_size=3)
    for name in ("a", "b"):
        await running.engine.add(asked(name, [1, 2], 8, temperature=1.0, seed=5, logprobs=2))
    await running.engine.add(asked("c", [1, 2], 8, temperature=1.0, seed=6))
    await running.all_ended(3)
    assert running.tokens["a"] == running.tokens["b"] != running.tokens["c"]
    first = next(output for output in running.outputs if output.request_id == "a")
    token_ids, logprobs, ranks, _ = first.new_logprobs
    assert token_ids.shape == logprobs.shape == (1, 3)
    assert token_ids[0, 0] == running.tokens["a"][0]
    assert float(torch.tensor(logprobs).exp().sum()) < 2.0
    assert ranks.shape == (1,)


async def test_it_has_no_scheduler_to_be_told(start: Callable[..., Running]) -> None:
    with pytest.raises(ConfigError, match="itl_target_s"):
        await start().made.control({"itl_target_s": 0.1})


async def test_more_context_than_the_model_has_is_refused(start: Callable[..., Running]) -> None:
    with pytest.raises(ConfigError, match="positions"):
        start(max_model_len=CONTEXT + 1)


def test_contexts_that_stretch_the_positions_of_a_whole_batch_are_not_offered() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
    phi = SimpleNamespace(max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=rope)
    assert _max_model_len(phi, None) == 4096
    with pytest.raises(ConfigError, match="the model's 4096 positions"):
        _max_model_len(phi, 8192)
    plain = SimpleNamespace(max_position_embeddings=131072, rope_parameters={"rope_type": "default"})
    assert _max_model_len(plain, None) == 131072


async def test_a_folder_without_a_model_is_said_so(tmp_path: Path) -> None:
    args = Namespace(model=str(tmp_path), dtype="auto", revision=None, trust_remote_code=False, max_model_len=None)
    with pytest.raises(ConfigError, match="cannot load"):
        TransformersEngine(args, GangSection(), asyncio.get_running_loop())
