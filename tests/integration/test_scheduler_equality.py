"""Token by token the same as stock vLLM: real engines on the CPU in this process, greedy, float32.

Greedy answers of one model depend on nothing but the prompt: whatever the plug-in does to the order and the make-up of
steps, every token must come out as under vLLM's own scheduler.
"""

import gc
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from PIL import Image
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.engines.vllm.layer_groups import layer_groups
from policies.types import StepResult
from tests.random_models import write_images, write_states, write_windows
from tests.tutorial import POLICY, put_on_path
from tests.virtual_engine import MODEL

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

REQUESTS, FEWER = 200, 100  # fewer wherever not all modes are compared
SESSIONS = 8
PLANNED: dict[str, dict[str, Any]] = {
    "mixed": {"mode": "mixed"},
    "exclusive k=1": {"mode": "exclusive", "papers": {"refill": 1}},
    "exclusive k=6": {"mode": "exclusive", "papers": {"refill": 6}},
    "exclusive k*": {"mode": "exclusive"},
    "auto": {"mode": "auto"},
}
ONE_OF_EACH = ("exclusive k=6", "auto")
Tokens = dict[str, list[tuple[int, ...]]]
Part = tuple[list[int], SamplingParams]


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # vLLM collects several times at each start and end: what a test made, not everything that was ever imported.
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)


class Session:
    """A client of streaming input: it sends the next part `pause` steps after an answer, or all at once (None).

    What reaches the engine is what vLLM's `AsyncLLM.generate` sends it for a stream of `StreamingInput`.
    """

    def __init__(self, engine: LLMEngine, name: str, parts: list[Part], pause: int | None) -> None:
        self._engine, self._name, self._pause = engine, name, pause
        self._unsent: deque[Part | None] = deque([*parts, None])
        self._heard: list[int] = []
        self._steps_left: float = 0
        self.answers: list[tuple[int, ...]] = []
        self.before_step()

    def before_step(self) -> None:
        while self._unsent and self._steps_left == 0:
            self._send(self._unsent.popleft())
            self._steps_left = 0 if self._pause is None else inf
        self._steps_left -= 1

    def hear(self, output: CompletionOutput) -> None:
        self._heard += output.token_ids
        if output.finish_reason is not None:
            self.answers.append(tuple(self._heard))
            self._heard.clear()
            self._steps_left = self._pause or 0

    def _send(self, part: Part | None) -> None:
        prompt, params = part or ([0], SamplingParams())
        request = self._engine.input_processor.process_inputs(
            self._name,
            {"prompt_token_ids": list(prompt)},
            params,
            supported_tasks=self._engine.get_supported_tasks(),
            resumable=part is not None,
        )
        request.external_req_id = self._name
        self._engine.output_processor.add_request(request, None)
        # Both sides append to a session's prompt; elsewhere they are two processes.
        own = msgspec.structs.replace(request, prompt_token_ids=list(request.prompt_token_ids or ()))
        self._engine.engine_core.add_request(own)


class Engine:
    """A real engine, and what its steps held."""

    def __init__(self, settings: dict[str, Any] | None, **args: Any) -> None:
        planned = {"scheduler_cls": SCHEDULER_CLASS, "additional_config": {"sluice": settings}} if settings else {}
        options = {
            "model": str(MODEL),
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 24,
            "max_num_batched_tokens": 1024,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False,
        }
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                enforce_eager=True,
                disable_log_stats=True,
                structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
                **options | planned | args,
            )
        )
        self.core = self.engine.engine_core.engine_core
        self.steps: list[StepResult] = []
        if settings:
            self.core.scheduler.on_step = self.steps.append
        self.blocks = self.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        self.tokens: Tokens = {}
        self.preemptions = 0
        self.cached_tokens = 0
        self.sessions: dict[str, Session] = {}

    def open(self, name: str, parts: list[Part], pause: int | None) -> None:
        self.sessions[name] = session = Session(self.engine, name, parts, pause)
        self.tokens[name] = session.answers

    def add(self, request_id: str, prompt: list[int], params: SamplingParams, priority: int = 0) -> None:
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params, priority=priority)

    def run(self, each_step: Callable[[int], None] = lambda step: None) -> Tokens:
        step, preempted = 0, dict[str, int]()
        while self.engine.has_unfinished_requests():
            each_step(step)
            step += 1
            for request in self.core.scheduler.requests.values():
                preempted[request.request_id] = request.num_preemptions
            for session in self.sessions.values():
                session.before_step()
            for output in self.engine.step():
                if output.request_id in self.sessions:
                    self.sessions[output.request_id].hear(output.outputs[0])
                elif output.finished:
                    self.tokens[output.request_id] = [tuple(one.token_ids) for one in output.outputs]
                    self.cached_tokens += output.num_cached_tokens or 0
        self.preemptions = sum(preempted.values())
        if self.steps:
            self.core.scheduler.report()
        return self.tokens

    @property
    def preempts(self) -> bool:
        return self.preemptions > 0

    def close(self) -> None:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.blocks - 1
        assert not self.core.scheduler.requests
        self.engine.engine_core.shutdown()


def workload(
    requests: int = FEWER, seed: int = 7, shared: int = 0, most_prompt: int = 60, branches: bool = True
) -> list[tuple[str, list[int], SamplingParams]]:
    """Mixed lengths; every twentieth answer is JSON, and every twentieth is two answers, sampled under a seed.

    vLLM on the CPU cannot wind a seeded generator back, which it must after a preemption or a cut prompt.
    """
    rng = random.Random(seed)
    prefix = [rng.randint(10, 4000) for _ in range(shared)]
    made = []
    for number in range(requests):
        prompt = prefix + [rng.randint(10, 4000) for _ in range(rng.randint(4, most_prompt))]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1 + min(45, int(rng.expovariate(1 / 14))))
        if branches and number % 20 == 7:
            params.n = 2
            params.temperature, params.seed = 0.8, number
        if number % 20 == 13:
            params.ignore_eos = False
            params.structured_outputs = StructuredOutputsParams(json=json.dumps({"type": "boolean"}))
        made.append((f"q{number}", prompt, params))
    return made


def conversations(seed: int = 3) -> list[tuple[list[Part], int | None]]:
    """One to four parts each; every third session sends them at once, the others up to 12 steps after an answer.

    Short, because a session keeps its cache between its parts: all of them together must fit the tightest one.
    """
    rng = random.Random(seed)
    talks: list[tuple[list[Part], int | None]] = []
    for number in range(SESSIONS):
        parts = [
            (
                [rng.randint(10, 4000) for _ in range(rng.randint(1, 25))],
                SamplingParams(
                    temperature=0.0, ignore_eos=True, max_tokens=rng.randint(1, 9), output_kind=RequestOutputKind.DELTA
                ),
            )
            for _ in range(1 + number % 4)
        ]
        talks.append((parts, None if number % 3 == 1 else rng.randint(0, 12)))
    return talks


def answers(
    settings: dict[str, Any] | None,
    requests: list[tuple[str, list[int], SamplingParams]],
    disturb: Callable[[Engine, int], None] = lambda engine, step: None,
    sessions: list[tuple[list[Part], int | None]] | None = None,
    **args: Any,
) -> tuple[Tokens, Engine]:
    engine = Engine(settings, **args)
    unopened = deque(enumerate(sessions or ()))
    for number, (request_id, prompt, params) in enumerate(requests):
        if number % 12 == 0 and unopened:
            session, (parts, pause) = unopened.popleft()
            engine.open(f"s{session}", parts, pause)
        engine.add(request_id, prompt, params.clone(), priority=number % 3 if "scheduling_policy" in args else 0)
    tokens = engine.run(lambda step: disturb(engine, step))
    engine.close()
    return tokens, engine


@cache
def stock_answers(requests: int = FEWER, branches: bool = True) -> Tokens:
    """The answers of an engine without further arguments: several tests compare with the same."""
    return answers(None, workload(requests, branches=branches), sessions=conversations() if branches else None)[0]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prefix cache": ({"shared": 64}, {"enable_prefix_caching": True}),
    "prompts longer than the budget": ({"most_prompt": 150, "branches": False}, {"max_num_batched_tokens": 64}),
    "a cache so tight that stock preempts": ({"branches": False}, {"num_gpu_blocks_override": 45}),
}


def test_every_mode_gives_the_tokens_of_stock() -> None:
    all_give(stock_answers(REQUESTS), tuple(PLANNED), {"requests": REQUESTS})


@pytest.mark.parametrize("case", list(CASES))
def test_a_mode_of_each_kind_gives_the_tokens_of_stock(case: str) -> None:
    shape, args = CASES[case]
    expected, stock = answers(None, workload(**shape), sessions=conversations(), **args)
    assert stock.preempts == (case == "a cache so tight that stock preempts")
    assert (stock.cached_tokens > 0) == (case == "prefix cache")
    all_give(expected, ONE_OF_EACH, shape, **args)


def test_a_policy_out_of_another_package_gives_the_tokens_of_stock_and_keeps_some_cache_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings that docs/guides/write-a-policy.md serves."""
    put_on_path(tmp_path, monkeypatch)
    args = {"max_model_len": 512, "num_gpu_blocks_override": 28}
    settings = yaml.safe_load((tmp_path / "keep-free.yaml").read_text())["engine"]["scheduler"]
    expected, stock = answers(None, workload(branches=False), **args)
    tokens, engine = answers(settings, workload(branches=False), **args)
    assert tokens == expected and len(tokens) == FEWER
    assert engine.core.scheduler.status()["policy"] == POLICY
    assert stock.preemptions > 4 * engine.preemptions


def repeating() -> list[tuple[str, list[int], SamplingParams]]:
    """Prompts that repeat themselves, so that drafts are made and some prove right."""
    rng, requests = random.Random(5), []
    for number in range(FEWER):
        words = [rng.randint(10, 4000) for _ in range(rng.randint(2, 6))]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(1, 60))
        requests.append((f"q{number}", words * rng.randint(2, 8), params))
    return requests


def drafted(settings: dict[str, Any]) -> tuple[Tokens, int]:
    """Answers with drafts, and how many times a request decoded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    tokens, engine = answers(settings, repeating(), speculative_config=drafts)
    assert sys.modules["numba"].config.NUMBA_NUM_THREADS == 1, "it shares OpenMP's threads with torch, which waits"
    return tokens, sum(step.decode_requests for step in engine.steps)


def test_drafts_change_no_token() -> None:
    """Each engine in a process of its own: vLLM 0.32 starts none on CPUs where numba, which drafts, is loaded."""
    expected, _ = answers(None, repeating())
    further = sum(len(each[0]) - 1 for each in expected.values())
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in ONE_OF_EACH:
            tokens, decodes = processes.submit(drafted, PLANNED[name]).result(timeout=300)
            assert tokens == expected, name
            assert decodes < 0.95 * further, "drafts proved right"


def test_a_model_with_sliding_windows_gives_the_tokens_of_stock(tmp_path: Path) -> None:
    """Its prompts are longer than a window, and cut; those of one conversation hit what each kind of layer has kept."""
    write_windows(tmp_path, window=48)
    args = {"model": str(tmp_path), "enable_prefix_caching": True}
    shape = {"shared": 80, "most_prompt": 150, "branches": False}
    expected, stock = answers(None, workload(**shape), sessions=conversations(), **args)
    assert stock.cached_tokens > 0
    groups = layer_groups(stock.core.scheduler.kv_cache_manager.coordinator)
    assert groups is not None and {group.window for group in groups} == {None, 2}
    all_give(expected, ONE_OF_EACH, shape, max_num_batched_tokens=128, **args)


def test_a_model_with_states_gives_the_tokens_of_stock(tmp_path: Path) -> None:
    """Without a prefix cache, beside which vLLM 0.32 computes no Mamba 2 on CPUs."""
    write_states(tmp_path)
    shape = {"most_prompt": 150, "branches": False}
    expected, stock = answers(None, workload(**shape), sessions=conversations(), model=str(tmp_path))
    assert layer_groups(stock.core.scheduler.kv_cache_manager.coordinator) is None
    all_give(expected, ONE_OF_EACH, shape, max_num_batched_tokens=128, model=str(tmp_path))


def test_a_model_with_images_gives_the_tokens_of_stock(tmp_path: Path) -> None:
    """Every other prompt has an image, and prompts are cut, also beside them."""
    write_images(tmp_path)
    rng, image = random.Random(5), {number: picture(number) for number in range(4)}
    asked = [
        (
            " ".join(rng.choice(("river", "moon", "seven", "apples", "of", "the")) for _ in range(rng.randint(2, 200))),
            image[number % 4] if number % 2 else None,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=rng.randint(1, 30)),
        )
        for number in range(60)
    ]
    found = []
    for settings in (None, *(PLANNED[name] for name in ONE_OF_EACH)):
        engine = Engine(settings, model=str(tmp_path), max_num_batched_tokens=128 if settings else 1024)
        for number, (prompt, seen, params) in enumerate(asked):
            media = {} if seen is None else {"multi_modal_data": {"image": seen}}
            engine.engine.add_request(f"q{number}", {"prompt": prompt, **media}, params.clone())
        found.append(engine.run())
        engine.close()
    assert found[0] == found[1] == found[2]
    assert len({tokens[0] for tokens in found[0].values()}) > 50


def picture(number: int) -> Image.Image:
    """Another for each number."""
    return Image.effect_mandelbrot((64, 64), (-3.0, -2.5, 2.0, 2.5), 10 + 20 * number).convert("RGB")


def test_priorities_change_no_token() -> None:
    all_give(stock_answers(), ONE_OF_EACH, {}, scheduling_policy="priority")


def all_give(expected: Tokens, names: tuple[str, ...], shape: dict[str, Any], **args: Any) -> None:
    requests, sessions = workload(**shape), conversations()
    assert expected.keys() == {*(name for name, *_ in requests), *(f"s{number}" for number in range(SESSIONS))}
    assert [len(expected[f"s{number}"]) for number in range(SESSIONS)] == [len(parts) for parts, _ in sessions]
    for name in names:
        tokens, engine = answers(PLANNED[name], requests, sessions=sessions, **args)
        assert tokens == expected, name
        if PLANNED[name]["mode"] == "exclusive":
            assert not [step for step in engine.steps if step.prefill_tokens and step.decode_requests]


def test_auto_with_forced_switches_and_pauses_gives_the_tokens_of_stock() -> None:
    requests, sessions, expected = workload(), conversations(), stock_answers()
    changes = [{"mode": "exclusive", "papers": {"refill": 3}}, {"mode": "mixed"}, {"mode": "stock"}, {"mode": "auto"}]
    pauses = {5: PauseState.PAUSED_NEW, 8: PauseState.PAUSED_ALL, 11: PauseState.UNPAUSED}

    def switch(engine: Engine, step: int) -> None:
        if step % 7 == 0:
            engine.core.scheduler.control(changes[step // 7 % len(changes)])
        if step % 13 in pauses:
            engine.core.scheduler.set_pause_state(pauses[step % 13])

    tokens, _ = answers({"mode": "auto"}, requests, switch, sessions)
    assert tokens == expected


@pytest.mark.parametrize("name", ["mixed", "exclusive k=6", "auto"])
def test_aborts_at_every_phase_leave_the_others_answers_alone(name: str) -> None:
    requests, expected = workload(branches=False), stock_answers(branches=False)
    rng, aborted = random.Random(2), set[str]()

    def abort(engine: Engine, step: int) -> None:
        alive = list(engine.core.scheduler.requests.values())
        if step % 5 == 0 and len(alive) > 1:
            internal = rng.choice(alive).request_id
            engine.engine.abort_request([internal], internal=True)
            aborted.add(internal.rpartition("-")[0])  # vLLM made it of our own and something random

    tokens, _ = answers(PLANNED[name], requests, abort)
    others = expected.keys() - aborted
    assert len(expected) == FEWER and aborted <= expected.keys() and len(aborted) > 10 and len(others) > 50
    assert tokens == {request_id: expected[request_id] for request_id in others}
