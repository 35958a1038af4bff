"""A router's front end around vLLM's own, mostly with a client that stands for the routed one."""

import asyncio
import importlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.async_utils import make_async
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.llm_engine import LLMEngine

from deployments.config.application import AppConfig
from deployments.config.engine import EngineSection, PrefillSection
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.config.scheduler import SCHEDULER_CLASS
from deployments.engines.vllm import engine as vllm_engine
from deployments.engines.vllm.args import generating_config, parse_vllm_args
from deployments.engines.vllm.calibration_engine import calibration_engine
from deployments.engines.vllm.engine import VllmEngine
from deployments.engines.vllm.front_end import (
    SHORT_TEXT_CHARS,
    TEXT_THREADS,
    RoutedAsyncLLM,
    front_end_config,
    let_short_texts_pass,
)
from deployments.engines.vllm.version import ENGINE_VERSION
from deployments.serving import front_end_kinds
from deployments.serving.front_end import FrontEnd
from deployments.serving.front_end_start import opened_front_end, router_metrics
from deployments.serving.live_settings import InForce
from policies.errors import ConfigError, SluiceError
from policies.live import Live
from router.redis_store import RedisStateStore, connect
from router.state_store import ReplicaInfo, StateStore
from tests.deployments.engines.vllm.links import core_link
from tests.deployments.refused_args import REFUSED_ARGS
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow


class Outputs:
    """What a routed client hands on."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next_outputs(self) -> EngineCoreOutputs:
        return await self.queue.get()


def test_a_router_that_reaches_no_engine_though_they_live_is_passed_over() -> None:
    answering = SimpleNamespace(reaches_no_engine=True)
    reader, clients = SimpleNamespace(errored=False), SimpleNamespace(answering=answering)
    front_end: Any = SimpleNamespace(reader=reader, name="demo", clients=clients)
    with pytest.raises(SluiceError, match="no engine replica of demo can be reached from here"):
        FrontEnd.check_health(front_end)
    answering.reaches_no_engine = False
    FrontEnd.check_health(front_end)


async def test_a_router_whose_output_loop_has_ended_is_replaced() -> None:
    outputs = Outputs()
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats"])
    llm = RoutedAsyncLLM(args, outputs, None)
    answering = SimpleNamespace(reaches_no_engine=False)
    # A whole one is made for a process of its own.
    front_end: Any = SimpleNamespace(reader=llm, name="demo", clients=SimpleNamespace(answering=answering))
    llm._run_output_handler()
    await outputs.queue.put(EngineCoreOutputs())
    await until(lambda: outputs.queue.empty())
    FrontEnd.check_health(front_end)
    await outputs.queue.put(None)
    await until(lambda: llm.output_handler.done())
    with pytest.raises(SluiceError, match="demo"):
        FrontEnd.check_health(front_end)


async def test_a_long_text_whose_client_has_left_keeps_its_turn_until_its_thread_is_free() -> None:
    """Else a few clients that leave would have all threads at once, and short texts wait behind theirs."""
    goes_on, begun = threading.Event(), list[str]()

    def tokenize(prompt: dict[str, str], _: Any) -> str:
        begun.append(prompt["prompt"][0])
        if len(prompt["prompt"]) > SHORT_TEXT_CHARS:
            goes_on.wait()
        return prompt["prompt"][0]

    with ThreadPoolExecutor(TEXT_THREADS) as threads:
        renderer: Any = SimpleNamespace(
            model_config=SimpleNamespace(renderer_num_workers=TEXT_THREADS),
            _tokenize_prompt=tokenize,
            _tokenize_prompt_async=make_async(tokenize, threads),
        )
        let_short_texts_pass(renderer)

        def asked(name: str, chars: int) -> "asyncio.Task[str]":
            return asyncio.create_task(renderer._tokenize_prompt_async({"prompt": name * chars}, None))

        try:
            left = asked("a", SHORT_TEXT_CHARS + 1)
            await until(lambda: begun == ["a"])
            left.cancel()
            await asyncio.wait([left])
            long = asked("b", SHORT_TEXT_CHARS + 1)
            await asyncio.sleep(0.02)
            assert await asyncio.wait_for(asked("c", SHORT_TEXT_CHARS), 5.0) == "c"
            assert begun == ["a", "c"]
        finally:
            goes_on.set()
        assert await asyncio.wait_for(long, PATIENCE_S) == "b"


def test_what_nobody_set_is_as_vllm_serve_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's fallback for no use in particular is 128 slots and 2048 tokens on an H100, where `vllm serve` has 1024 and
    8192. On CPUs the two differ from two workers on."""
    argv = ["--tensor-parallel-size", "2", "--disable-log-stats"]

    def engine_args() -> AsyncEngineArgs:
        return AsyncEngineArgs.from_cli_args(parse_vllm_args(["--model", str(DEMO_MODEL), *argv]))

    def limits(config: Any) -> tuple[int, int]:
        return config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens

    served = limits(engine_args().create_engine_config(UsageContext.OPENAI_API_SERVER))
    assert served != limits(engine_args().create_engine_config())
    monkeypatch.setattr(LLMEngine, "from_vllm_config", lambda config: config)
    engine = generating_config(parse_vllm_args(["--model", str(DEMO_MODEL), *argv]))
    assert limits(engine) == served
    assert limits(calibration_engine(str(DEMO_MODEL), argv, SCHEDULER_CLASS)) == served


async def test_an_engine_of_batches_offers_a_whole_one_whatever_memory_let_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def status(_: str) -> dict[str, int]:
        return {"batch_size": 3, "late_requests": 2, "free_blocks": 9}

    monkeypatch.setattr(vllm_engine, "CoreLink", lambda *_: core_link(call=status))
    single, batches = VllmEngine([]), VllmEngine([], batch_size=24)
    for engine in (single, batches):
        await engine.status()
    assert (single.slots, batches.slots) == (3 + 2, 24)


Opening = Callable[[], AbstractAsyncContextManager[FrontEnd]]


@pytest.fixture
async def opening(redis_url: str, namespace: str) -> AsyncIterator[Opening]:
    """Opens the front end of a model whose one replica has registered."""
    config = AppConfig(model="demo", name=namespace, engine=EngineSection(prefill=PrefillSection()))
    redis = connect(redis_url)
    info = ReplicaInfo(
        replica_id="r", host="127.0.0.1", port=1, max_model_len=2048, max_batch_tokens=300, silence_s=600.0
    )
    await RedisStateStore(redis, config.namespace(ENGINE_VERSION)).register_replica(info, 1)
    in_force = Live(InForce(config))

    def opened() -> AbstractAsyncContextManager[FrontEnd]:
        metrics = router_metrics(config, "router", speaks_for_process=False)
        return opened_front_end(
            in_force, router_id="router", metrics=metrics, client=redis, wake=None, predictor=None, responses=None
        )

    yield opened
    await redis.aclose()


async def test_a_router_splits_by_the_longest_step_that_its_replicas_take(opening: Opening) -> None:
    """vLLM's arguments mostly leave that to the hardware, which a router has not."""
    async with opening() as front_end:
        assert front_end.clients.routed.policy.config.max_batch_tokens == 300
        assert (await front_end.store.snapshot()).routers == 1


async def test_a_front_end_that_does_not_open_leaves_no_router_behind(
    opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[StateStore] = []

    async def fail(in_force: Live[InForce], llm: Any, *_: Any) -> None:
        stores.append(llm._routed.decoding.store)
        assert (await stores[0].snapshot()).routers == 1
        raise ValueError("no such template")

    monkeypatch.setattr(front_end_kinds, "_vllms_application", fail)
    with pytest.raises(ValueError, match="no such template"):
        async with opening():
            pass
    assert (await stores[0].snapshot()).routers == 0


DRAFT = {"model": str(DEMO_MODEL), "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2}


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-sleep-mode"],
        ["--enable-cumem-allocator"],
        ["-tp", "4", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", '{"num_redundant_experts": 4}'],
        ["-tp", "4", "-dcp", "2"],
        ["-tp", "2", "--speculative-config", json.dumps(DRAFT)],
        ["-tp", "2", "--enable-batch-sharded-sampling"],
        ["--enable-fault-tolerance"],
    ],
    ids=" ".join,
)
def test_a_router_without_a_gpu_takes_arguments_that_only_engines_with_one_do(argv: list[str]) -> None:
    args = AsyncEngineArgs.from_cli_args(parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, *argv]))
    assert front_end_config(args).parallel_config.world_size == 1


@pytest.mark.parametrize(("argv", "where"), REFUSED_ARGS)
def test_a_file_of_arguments_holds_none_that_are_refused_elsewhere(argv: list[str], where: str, tmp_path: Path) -> None:
    given = AppConfig(model="m", vllm_args=("--config", in_file(argv, tmp_path))).vllm_argv()
    with pytest.raises(ConfigError, match=where):
        parse_vllm_args(given)


@pytest.mark.parametrize("asked", ["-h", "--help", "--help=all"])
def test_whoever_asks_for_help_is_not_served(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="help"):
        parse_vllm_args(["--model", "m", asked])


def in_file(argv: list[str], folder: Path) -> str:
    """The same arguments for `--config`, which knows no short names."""
    items: dict[str, Any] = {}
    for arg in argv:
        if arg.startswith("-"):
            name, _, value = arg.partition("=")
            name = {"-tp": "tensor-parallel-size", "-dp": "data-parallel-size"}.get(name, name.lstrip("-"))
            items[name] = value or True
        else:
            items[name] = arg
    file = folder / "args.yaml"
    file.write_text(yaml.safe_dump(items))
    return str(file)


def test_ranks_are_named_where_replicas_see_them(tmp_path: Path) -> None:
    argv = ["--data-parallel-size", "2"]
    assert parse_vllm_args(["--model", "m", *argv]).data_parallel_size == 2
    with pytest.raises(ConfigError, match="name it in vllm_args itself"):
        parse_vllm_args(["--model", "m", "--config", in_file(argv, tmp_path)])


def test_a_short_form_of_a_refused_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^vllm_args: unrecognized arguments: --otlp-traces-end"):
        parse_vllm_args(["--model", "m", "--otlp-traces-end", "http://collector:4317"])


def test_a_file_of_arguments_that_is_not_there_is_said_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"vllm_args: .*No such file"):
        parse_vllm_args(["--model", "m", "--config", "/nowhere/args.yaml"])


def test_a_file_of_arguments_says_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text("max-model-len: 8\nseed: 1\nmax-model-len: 16\n")
    with pytest.raises(ConfigError, match="args.yaml: line 3 repeats a name of line 1: 'max-model-len'"):
        parse_vllm_args(["--model", "m", "--config", str(tmp_path / "args.yaml")])


@pytest.mark.parametrize("way", ["object", "dotted", "file"])
def test_a_backend_of_grammars_that_cannot_work_is_refused_before_an_engine_starts(way: str, tmp_path: Path) -> None:
    def naming(backend: str) -> list[str]:
        option, value = "--structured-outputs-config", json.dumps({"backend": backend})
        file = tmp_path / "grammars.yaml"
        file.write_text(f"{option.lstrip('-')}: '{value}'\n")
        given = {"object": [option, value], "dotted": [f"{option}.backend", backend], "file": ["--config", str(file)]}
        return ["--model", "m", *given[way]]

    with pytest.raises(ConfigError, match="name auto, xgrammar, guidance or outlines"):
        parse_vllm_args(naming("lm-format-enforcer"))
    for backend in ("xgrammar", "guidance", "outlines"):
        parse_vllm_args(naming(backend))


def test_the_backend_of_grammars_that_is_refused_still_cannot_work() -> None:
    with pytest.raises(ImportError):
        importlib.import_module("lmformatenforcer.integrations.vllm")


def test_a_model_that_embeds_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="is a pooling model"):
        generating_config(parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--runner", "pooling"]))
