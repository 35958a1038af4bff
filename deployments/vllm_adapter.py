"""Everything that touches vLLM's private engine interface: with `vllm_scheduler`, the only importer of `vllm.v1`.

Two sides meet here. On a router `RoutedAsyncLLM` is vLLM's own front-end engine, with the routed client in the place of
its engine-core client. On an engine replica `VllmEngine` is vLLM's engine core behind the relay. The structures that
travel between them are vLLM's, packed by vLLM's codec, so both sides must run the same vLLM (the handshake checks it).
"""

import json
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from multiprocessing import connection, parent_process
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import vllm
from msgspec.structs import replace
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.exceptions import GracefulHTTPError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.request_metadata import RequestMetadata, without_metadata
from policies.errors import AdmissionError, ConfigError, InputError, StateStoreError
from predictor.learned import Question
from router.codec import Output, Recovery, RequestSize
from router.routed_client import RoutedClient
from router.state_store import Ticket
from router.timing import HttpContext, RequestTiming, current
from router.wire import Buffer

ENGINE_VERSION = f"vllm-{vllm.__version__}"
# Set in the environment of engine replicas: tells `register_plugin` that it runs under one.
REPLICA_ENV = "SLUICE_REPLICA"

# Sampling that looks back over the tokens generated so far: after a resume those stand in the prompt, where it does not
# look (or, for prompt logprobs, where it must not).
_LOOKS_BACK = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "prompt_logprobs",
    "structured_outputs",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
)
_DEFAULTS = SamplingParams()


class _Refusing(FlexibleArgumentParser):
    """vLLM's parser, raising where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vllm_args: {message}")


def parse_vllm_args(argv: Sequence[str]) -> Namespace:
    """The arguments of `vllm serve`, checked.

    Raises:
        ConfigError: unknown or wrong arguments.
    """
    args: Namespace = make_arg_parser(_Refusing(prog="vllm_args")).parse_args(list(argv))
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm_args: {error}") from error
    return args


# Both sides


class VllmCodec:
    """`router.codec.EngineCodec` for vLLM. Not thread-safe, as vLLM's encoder is not."""

    engine_version = ENGINE_VERSION

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._outputs_decoder = MsgpackDecoder(EngineCoreOutputs)
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)

    def size(self, request: EngineCoreRequest) -> RequestSize:
        prompt_tokens = (
            len(request.prompt_embeds) if request.prompt_token_ids is None else len(request.prompt_token_ids)
        )
        max_tokens = request.sampling_params.max_tokens if request.sampling_params else 1
        return RequestSize(
            request_id=request.request_id,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_tokens,
            prompt_token_ids=request.prompt_token_ids or (),
        )

    def with_ticket(self, request: EngineCoreRequest, ticket: Ticket) -> EngineCoreRequest:
        """Of a copy: several requests of one prompt may share their sampling parameters."""
        if request.sampling_params is None:
            return request
        metadata = RequestMetadata(
            slo_class=ticket.slo_class,
            predicted_output_tokens=ticket.predicted_output_tokens,
            bin_index=ticket.bin_index,
            deadline_s=ticket.deadline_key,
        )
        params = request.sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), **metadata.as_extra_args()}
        return replace(request, sampling_params=params)

    def encode_request(self, request: EngineCoreRequest) -> Sequence[Buffer]:
        return self._encoder.encode(request)

    def decode_request(self, parts: Sequence[Buffer]) -> EngineCoreRequest:
        return self._request_decoder.decode(parts)

    def encode_outputs(self, batch: EngineCoreOutputs, outputs: Sequence[EngineCoreOutput]) -> Sequence[Buffer]:
        return self._encoder.encode(self.keep(batch, outputs))

    def decode_outputs(self, parts: Sequence[Buffer]) -> EngineCoreOutputs:
        return self._outputs_decoder.decode(parts)

    def outputs(self, batch: EngineCoreOutputs) -> Sequence[Output]:
        return batch.outputs

    def keep(self, batch: EngineCoreOutputs, outputs: Sequence[Output]) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=list(outputs), timestamp=batch.timestamp, weight_version=batch.weight_version)

    def drop_first(self, output: Any, tokens: int) -> None:
        rest = len(output.new_token_ids) - tokens
        output.new_token_ids = output.new_token_ids[tokens:]
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(tokens, rest)

    def recover(self, request: EngineCoreRequest, sent: Sequence[int]) -> Recovery[EngineCoreRequest]:
        """Resume where the continuation does not depend on which tokens were prompt, else replay from the start."""
        if not _resumable(request):
            return Recovery(request, tuple(sent))
        params = request.sampling_params.clone()
        params.max_tokens -= len(sent)
        params.min_tokens = max(0, params.min_tokens - len(sent))
        return Recovery(replace(request, prompt_token_ids=[*request.prompt_token_ids, *sent], sampling_params=params))

    def failed(self, request_id: str) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])


def _resumable(request: EngineCoreRequest) -> bool:
    params = request.sampling_params
    return (
        request.prompt_token_ids is not None
        and not request.mm_features
        and params is not None
        and not without_metadata(params.extra_args)
        and all(getattr(params, name) == getattr(_DEFAULTS, name) for name in _LOOKS_BACK)
    )


# On a router


# Of the request that this task submits, as the chat template wrote it: the request itself has only tokens.
prompt_text: ContextVar[str | None] = ContextVar("sluice_prompt_text", default=None)


class RoutedEngineCore(EngineCoreClient):
    """vLLM's engine-core client interface over the routed client: the calls that serving needs.

    Control calls that address one engine (sleep, profiling, LoRA loading) stay vLLM's NotImplementedError, which its
    front end answers with 501.
    """

    engine_ranks_managed = (0,)

    def __init__(self, routed: RoutedClient[EngineCoreRequest, EngineCoreOutputs], model: str) -> None:
        self._routed, self._model = routed, model
        # vLLM ends the front end for good when its engine is dead; ours has many, and new ones come.
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.resumable:
            raise GracefulHTTPError("streaming input is not supported: no router keeps it", HTTPStatus.NOT_IMPLEMENTED)
        now_s = time.monotonic()
        context = current.get() or HttpContext(received_s=now_s, slo_class="standard")
        timing = RequestTiming(received_s=context.received_s, submitted_s=now_s)
        context.timings.append(timing)
        try:
            await self._routed.submit(
                request,
                slo_class=context.slo_class,
                timing=timing,
                tenant=context.tenant,
                question=self._question(request, context),
            )
        except AdmissionError as error:
            context.refused = error
            raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error
        except InputError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.BAD_REQUEST) from error
        except StateStoreError as error:
            raise GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE) from error

    def _question(self, request: EngineCoreRequest, context: HttpContext) -> Question | None:
        """What a learned predictor may go by; None for a prompt that has no text."""
        text = prompt_text.get()
        if text is None:
            return None
        return Question(
            prompt=text,
            model=self._model,
            slo_class=context.slo_class,
            key=context.tenant.name if context.tenant else "",
            hinted_tokens=context.expected_tokens,
            max_output_tokens=request.sampling_params.max_tokens if request.sampling_params else None,
        )

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Called by vLLM's output loop alone: these answers reached a stop string."""
        await self._routed.cancel(request_ids, "stop")

    async def cancel_requests_async(self, request_ids: list[str]) -> None:
        await self._routed.cancel(request_ids, "cancelled")

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._routed.next_outputs()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Nothing to do: a router keeps no multimodal cache of an engine's."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: the application closes the routed client."""


class RoutedAsyncLLM(AsyncLLM):
    """vLLM's front-end engine on top of the routed client."""

    def __init__(self, args: Namespace, routed: RoutedClient[EngineCoreRequest, EngineCoreOutputs]) -> None:
        self._routed = routed
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = engine_args.create_engine_config()
        model = (args.served_model_name or [args.model])[0]
        # vLLM has no way to hand a client in; for this one call its factory yields ours.
        with patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: RoutedEngineCore(routed, model)):
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=not engine_args.disable_log_stats,
                log_requests=engine_args.enable_log_requests,
            )

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        request_ids = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        all_ids = self.output_processor.abort_requests(request_ids, internal)
        await self.engine_core.cancel_requests_async(all_ids)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Called before a response starts: what is refused here gets its status, also when it would stream."""
        super().check_admission(n, request_id)
        context = current.get()
        if context is not None and self._routed.is_full(context.slo_class):
            context.refused = AdmissionError("too many requests of this class wait already")
            raise GracefulHTTPError(str(context.refused), HTTPStatus.TOO_MANY_REQUESTS)
        if self._routed.is_cut_off:
            raise GracefulHTTPError("the shared state does not answer", HTTPStatus.SERVICE_UNAVAILABLE)

    async def _add_request(self, request: EngineCoreRequest, prompt: str | None, *others: Any) -> None:
        """vLLM enters a request in its tables before it hands it on, and leaves it there when that fails."""
        prompt_text.set(prompt)
        try:
            await super()._add_request(request, prompt, *others)
        except BaseException:
            self.output_processor.abort_requests([request.request_id], internal=True)
            raise

    async def check_health(self) -> None:
        await super().check_health()
        if not self._routed.snapshot.replicas:
            raise EngineDeadError("no engine replica is registered")


# On an engine replica


class VllmEngine:
    """vLLM's engine core in a child process, for the relay."""

    engine_version = ENGINE_VERSION

    def __init__(self, args: Namespace) -> None:
        """Starts the engine and blocks until it is ready: run it in a thread."""
        self._config: VllmConfig = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        self.codec = VllmCodec()
        self._admits: int | None = None
        self._core: AsyncMPClient = EngineCoreClient.make_async_mp_client(
            self._config, Executor.get_class(self._config), log_stats=False
        )

    @property
    def slots(self) -> int:
        """What the engine would admit at once, by its last status; the slots of vLLM where nothing else is said."""
        slots = int(self._config.scheduler_config.max_num_seqs)
        return min(slots, self._admits or slots)

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def model(self) -> str:
        return str(self._config.model_config.model)

    async def add(self, request: EngineCoreRequest) -> None:
        await self._core.add_request_async(request)

    async def abort(self, request_ids: list[str]) -> None:
        await self._core.abort_requests_async(request_ids)

    async def next_outputs(self) -> EngineCoreOutputs:
        """Raises EngineDeadError when the engine core has died."""
        return await self._core.get_output_async()

    async def status(self) -> dict[str, Any]:
        """The engine core's own counts (running, waiting, free_blocks, total_blocks), and what the plug-in says."""
        status = dict(await self._core.call_utility_async("sluice_status"))
        self._admits = status.get("batch_size")
        return status

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change the scheduler's settings. Raises an exception with the plug-in's words when one is wrong."""
        return dict(await self._core.call_utility_async("sluice_control", changes))

    @property
    def dead(self) -> bool:
        return bool(self._core.resources.engine_dead)

    def shutdown(self) -> None:
        self._core.shutdown()


# For `sluice calibrate`


def calibration_engine(model: str, vllm_args: Sequence[str], scheduler_cls: str) -> LLMEngine:
    """An engine in this process, one step at a time, under the scheduler plug-in. Raises ConfigError."""
    argv = ["--model", model, *vllm_args, "--disable-log-stats", "--no-async-scheduling", "--no-enable-prefix-caching"]
    settings = json.dumps({"sluice": {"mode": "mixed", "admission": "slots"}})
    args = parse_vllm_args([*argv, "--scheduler-cls", scheduler_cls, "--additional-config", settings])
    return LLMEngine.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())


# In the engine-core process of a replica


def register_plugin() -> None:
    """vLLM calls this in each of its processes; it acts only in those under an engine replica of ours."""
    parent = parent_process()
    if REPLICA_ENV not in os.environ or parent is None:
        return
    from vllm.v1.engine.core import EngineCore

    from deployments.vllm_scheduler import core_control, core_status

    EngineCore.sluice_status, EngineCore.sluice_control = core_status, core_control
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True, name="end-with-replica").start()


def _end_with(sentinel: int) -> None:
    """A replica that is killed cannot end its engine, which would go on holding the GPU: so the engine watches it."""
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
