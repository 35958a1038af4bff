"""Grammars compile out of the way, in the real process, with vLLM's own checks and backends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1 import structured_output

from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm import core_plugin
from deployments.engines.vllm import grammars as grammars_module
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import front_end_config
from deployments.engines.vllm.grammar_child import outcome
from deployments.engines.vllm.grammars import MAX_AT_ONCE, Compiled, Grammars
from policies.errors import InputError, ReplicaLostError, SluiceError
from policies.live import Live
from router.admission import Tenant
from router.background import BackgroundTasks
from router.timing import HttpContext, current
from tests.slow_grammars import COMPUTES, NOTHING, SLEEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TIMEOUT_S = 2.0
SMALL = {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}
LATE = "grammar_timeout_s"


@pytest.fixture(autouse=True)
def _with_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "CHILD", "tests.slow_grammars")


@asynccontextmanager
async def compiling(*argv: str) -> AsyncIterator[Grammars]:
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats", *argv])
    background = BackgroundTasks(lambda task: pytest.fail(f"{task} failed"))
    grammars = Grammars(front_end_config(AsyncEngineArgs.from_cli_args(args)), Live(TIMEOUT_S), background)
    try:
        yield grammars
    finally:
        await grammars.close()
        await background.close()


AS_VLLM = {
    "a schema": (SMALL, None),
    "any object": ({"json_object": True}, None),
    "choices": ({"choice": ["a", "b"]}, 'root ::= "a" | "b"'),
    "a regular expression": ({"regex": "[a-z]+"}, None),
}
REFUSED = {
    "what allows no token": ({"regex": NOTHING}, "no first token"),
    "a schema that names what is not there": ({"json": '{"$ref": "#/definitions/x"}'}, "definitions"),
    "an open parenthesis": ({"regex": "(a"}, "not closed"),
    "two at once": ({"regex": "a", "choice": ["a"]}, "one kind"),
    "what computes without end": ({"regex": COMPUTES}, LATE),
    "what sleeps without end": ({"regex": SLEEPS}, LATE),
}


async def test_what_compiles_is_as_vllm_leaves_it_and_what_does_not_is_refused_in_words() -> None:
    async with compiling() as grammars:
        for fields, grammar in AS_VLLM.values():
            both = await asyncio.gather(grammars.compiled(fields), grammars.compiled(fields))
            assert (both[0].backend, both[0].grammar) == ("xgrammar", grammar)
            assert both[0] is both[1] is await grammars.compiled(fields), "compiled more than once"
        for name, (fields, why) in REFUSED.items():
            with pytest.raises(InputError, match=why):
                await grammars.compiled(fields)
                pytest.fail(f"{name} was not refused")


async def test_what_is_missing_on_the_server_is_no_fault_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(fields: dict[str, Any]) -> Compiled:
        raise ImportError("no such package") if fields["choice"] else ValueError("no such choice")

    grammars = Grammars(None, Live(TIMEOUT_S), BackgroundTasks(lambda task: None))

    async def made(key: bytes, fields: dict[str, Any]) -> Compiled:
        return outcome(lacks, fields)

    monkeypatch.setattr(grammars, "_made", made)
    with pytest.raises(InputError, match="no such choice"):
        await grammars.compiled({"choice": []})
    with pytest.raises(SluiceError, match="no such package") as caught:
        await grammars.compiled({"choice": ["a"]})
    assert not isinstance(caught.value, InputError)


async def test_a_grammar_without_end_holds_up_no_other() -> None:
    async with compiling() as grammars:
        await grammars.compiled(SMALL)
        endless = [asyncio.create_task(grammars.compiled({"regex": f"{COMPUTES}{n}"})) for n in range(3)]
        await asyncio.sleep(0.2)
        await grammars.compiled({"json": json.dumps({"type": "string", "maxLength": 5})})
        assert not any(each.done() for each in endless)
        for each in endless:
            with pytest.raises(InputError, match=LATE):
                await each


async def test_the_slow_grammars_of_one_key_leave_room_for_those_of_others() -> None:
    async def of_key(name: str, regex: str) -> Compiled:
        current.set(HttpContext(0.0, "standard", Tenant(name=name)))
        return await grammars.compiled({"regex": regex})

    async with compiling() as grammars:
        await grammars.compiled(SMALL)
        slow = [asyncio.create_task(of_key("mine", f"{COMPUTES}{n}")) for n in range(2 * MAX_AT_ONCE)]
        await asyncio.sleep(0.2)
        await of_key("yours", "[0-9]+")
        assert not any(each.done() for each in slow)
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.long
async def test_after_the_end_of_its_process_the_next_grammar_starts_another() -> None:
    async with compiling() as grammars:
        await grammars.compiled(SMALL)
        endless = asyncio.create_task(grammars.compiled({"regex": COMPUTES}))
        await asyncio.sleep(0.2)
        assert grammars._process is not None
        child = psutil.Process(grammars._process.result()._child.pid)
        forks = child.children()
        child.kill()
        with pytest.raises(ReplicaLostError, match="try again"):
            await endless
        gone, _ = psutil.wait_procs(forks, timeout=10)
        assert gone == forks, "a compilation goes on without anybody to read it"
        await grammars.compiled({"regex": "[0-9]"})


def test_an_engine_compiles_more_than_one_grammar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(manager: Any, config: Any) -> None:
        manager.executor = SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr(structured_output.StructuredOutputManager, "__init__", start)
    core_plugin.compile_grammars_side_by_side()
    config: Any = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=False))
    manager = structured_output.StructuredOutputManager(config)
    assert manager.executor._max_workers == core_plugin.GRAMMAR_THREADS
    manager.executor.shutdown()
