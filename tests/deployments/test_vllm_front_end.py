"""A router's front end around vLLM's own, with a client that stands for the routed one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs

from deployments.config import DEMO_ARGS, DEMO_MODEL, AppConfig
from deployments.front_end import FrontEnd
from deployments.router import Router
from deployments.vllm_adapter import RoutedAsyncLLM, parse_vllm_args
from policies.errors import SluiceError
from router.redis_store import connect
from tests.waiting import until

pytestmark = pytest.mark.slow


class Outputs:
    """What a routed client hands on."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def next_outputs(self) -> EngineCoreOutputs:
        return await self.queue.get()


async def test_a_router_whose_output_loop_has_ended_is_replaced() -> None:
    outputs = Outputs()
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats"])
    front_end = FrontEnd(AppConfig(model="demo"), connect("redis://127.0.0.1:1/0"), None)
    front_end._llm = RoutedAsyncLLM(args, outputs, None)
    router: Any = SimpleNamespace(_front_ends=[front_end])  # a whole one is made for a process of its own
    front_end._llm._run_output_handler()
    await outputs.queue.put(EngineCoreOutputs())
    await until(lambda: outputs.queue.empty())
    Router.check_health(router)
    await outputs.queue.put(None)
    await until(lambda: front_end._llm.output_handler.done())
    with pytest.raises(SluiceError, match="demo"):
        Router.check_health(router)
