"""On an engine replica: vLLM's engine core behind the relay; and the engine of `sluice calibrate`."""

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from deployments.config.scheduler import KEY
from deployments.engines.vllm.args import engine_config, lora_requests, parse_vllm_args
from deployments.engines.vllm.codec import ENGINE_VERSION, VllmCodec
from deployments.engines.vllm.measurement import loads, measure
from policies.errors import ConfigError
from policies.router.credit import late_uncounted
from router.cached_blocks import BlockChanges

logger = logging.getLogger(__name__)

DEAD_LOOK_S = 1.0  # between two looks whether an engine core that was asked something still lives


def _refuse_pooling(config: VllmConfig) -> None:
    """Raises ConfigError for a model that embeds, classifies or scores: routers serve what generates."""
    if config.model_config.runner_type == "pooling":
        raise ConfigError(
            f"{config.model_config.model} is a pooling model, and Sluice serves models that generate text"
        )


class VllmEngine:
    """vLLM's engine core in a child process, for the relay."""

    engine_version = ENGINE_VERSION

    def __init__(self, args: Namespace, batch_size: int | None = None) -> None:
        """Starts the engine and blocks until it is ready: run it in a thread.

        Args:
            batch_size: of whole batches that it is given when it is idle; None is given single requests.

        Raises:
            ConfigError: the model does not generate text.
        """
        self._config: VllmConfig = engine_config(AsyncEngineArgs.from_cli_args(args))
        _refuse_pooling(self._config)
        self.codec = VllmCodec()
        self._loras = lora_requests(args)
        self._batch_size = batch_size
        self._admits: int | None = None
        self._late = 0
        self._tells_blocks = True
        self._core: AsyncMPClient = EngineCoreClient.make_async_mp_client(
            self._config, Executor.get_class(self._config), log_stats=False
        )

    @property
    def gang_sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def slots(self) -> int:
        """Requests that it may be given: its slots, and those that wait there and are late, by its last status: they
        delay no other. Of a batch those that do not fit into its cache wait in the engine: a size that followed
        what memory has let run would only shrink, for no more is ever given."""
        slots = int(self._config.scheduler_config.max_num_seqs)
        if self._batch_size is not None:
            return min(slots, self._batch_size)
        return min(slots, self._admits or slots) + late_uncounted(self._late, slots)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def max_batch_tokens(self) -> int:
        """Most tokens of one step."""
        return int(self._config.scheduler_config.max_num_batched_tokens)

    @property
    def kv_layout(self) -> str:
        """What two replicas must have in common to read each other's KV cache; "" without a connector."""
        if (transfer := self._config.kv_transfer_config) is None:
            return ""
        model, cache = self._config.model_config, self._config.cache_config
        return (
            f"model={model.model} revision={model.revision} dtype={model.dtype} kv_dtype={cache.cache_dtype} "
            f"block_size={cache.block_size} connector={transfer.kv_connector}"
        )

    async def add(self, request: EngineCoreRequest) -> None:
        await self._core.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._core.abort_requests_async(request_ids)

    async def next_outputs(self) -> EngineCoreOutputs:
        """Raises EngineDeadError when the engine core has died."""
        return await self._core.get_output_async()

    async def status(self) -> dict[str, Any]:
        """The engine core's own counts (running, waiting, free_blocks, total_blocks), and what the plug-in says."""
        status = dict(await self._asked(self._core.call_utility_async("sluice_status")))
        status["free_tokens"] = status["free_blocks"] * self._config.cache_config.block_size
        self._admits, self._late = status.get("batch_size"), status.get("late_requests", 0)
        return status

    async def cached_blocks(self, since: int | None) -> BlockChanges | None:
        """As `deployments.engines.base.Engine`, by the engine core's utility `sluice_blocks`."""
        if not self._tells_blocks:
            return None
        told = await self._asked(self._core.call_utility_async("sluice_blocks", since))
        if isinstance(told, str):
            logger.info("routers guess what the prefix cache holds: %s", told)
            self._tells_blocks = False
            return None
        return msgspec.convert(told, BlockChanges)

    async def measure(self, seconds: float) -> None:
        """Let the scheduler plug-in see what steps cost, for so long at most. The engine serves no request yet."""
        status = await self.status()
        given = loads(
            slots=self.slots,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            cache_tokens=status["total_blocks"] * self._config.cache_config.block_size,
        )
        took_s = await measure(self, given, seconds)
        logger.info("measured what steps cost in %.1f s", took_s)

    async def load_adapters(self) -> None:
        """Those that its arguments name. Raises an exception with vLLM's words when one cannot be loaded."""
        for lora in self._loras:
            await self._asked(self._core.add_lora_async(lora))

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change the scheduler's settings. Raises an exception with the plug-in's words when one is wrong."""
        return dict(await self._asked(self._core.call_utility_async("sluice_control", changes)))

    async def _asked(self, call: Coroutine[Any, Any, Any]) -> Any:
        """vLLM never answers a call during which the engine core dies. Raises EngineDeadError then."""
        asked = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({asked}, timeout=DEAD_LOOK_S))[0]:
                if self.dead:
                    raise EngineDeadError()
            return await asked
        finally:
            asked.cancel()

    @property
    def dead(self) -> bool:
        return bool(self._core.resources.engine_dead)

    def shutdown(self) -> None:
        self._core.shutdown()


def calibration_engine(model: str, vllm_args: Sequence[str], scheduler_cls: str) -> LLMEngine:
    """An engine in this process, one step at a time, under the scheduler plug-in. Raises ConfigError."""
    argv = ["--model", model, *vllm_args, "--disable-log-stats", "--no-async-scheduling", "--no-enable-prefix-caching"]
    settings = json.dumps({KEY: {"mode": "mixed", "admission": "slots"}})
    args = parse_vllm_args([*argv, "--scheduler-cls", scheduler_cls, "--additional-config", settings])
    return LLMEngine.from_vllm_config(engine_config(AsyncEngineArgs.from_cli_args(args)))
