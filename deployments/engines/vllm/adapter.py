"""The engine's private interface on both sides; tests/test_layering.py names the few others that import `vllm.v1`.

Two sides meet here. On a router `RoutedAsyncLLM` is vLLM's own front-end engine, with the routed client in the place of
its engine-core client. On an engine replica `VllmEngine` is vLLM's engine core behind the relay. The structures that
travel between them are vLLM's, packed by vLLM's codec, so both sides must run the same vLLM (the handshake checks it).
"""

import asyncio
import dataclasses
import gc
import hashlib
import json
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import entry_points
from multiprocessing import connection, parent_process
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import vllm
from msgspec.structs import replace
from transformers import AutoConfig
from vllm import ModelRegistry, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import process_lora_modules
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from deployments.config.application import FILE_CONNECTOR, why_one_worker, why_refused
from deployments.config.scheduler import KEY
from deployments.engines.transformers.step import Logprobs, RowOutput
from deployments.engines.vllm.grammars import MAX_AT_ONCE, Grammars
from deployments.engines.vllm.request_metadata import RequestMetadata, without_metadata
from deployments.http.middleware import status_of
from deployments.process.environment import NIXL_DELAY_ENV, REPLICA_ENV, take_all_cores
from policies.errors import AdmissionError, ConfigError, InputError, ReplicaLostError, StateStoreError
from predictor.conversation import Asked, asked_in
from predictor.learned import Question
from router.codec import Output, Recovery, RequestSize
from router.routed_client import RoutedClient
from router.state_store import Ticket
from router.timing import HttpContext, Refused, RequestTiming, current
from router.wire import Buffer

ENGINE_VERSION = f"vllm-{vllm.__version__}"

# Any architecture that vLLM's registry holds, for models that it does not.
STAND_IN = "LlamaForCausalLM"
# vLLM's name for what a KV connector is told of a request. It names addresses to read from: never a client's to say.
TRANSFER_KEY = "kv_transfer_params"
# In it, of how much of the prompt the replica that read it had a cache.
HITS_KEY = "remote_prefill_cached_tokens"

# Sampling that looks back over the tokens generated so far: after a resume those stand in the prompt, where it does not
# look (or, for prompt logprobs, where it must not). A repetition penalty looks at prompt and answer alike.
_LOOKS_BACK = (
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "prompt_logprobs",
    "structured_outputs",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
_DEFAULTS = SamplingParams()
# Threads of a front end that tokenize (vLLM has one), and the texts that all of them may be busy with: some 10 ms.
TEXT_THREADS = 2
SHORT_TEXT_CHARS = 32 << 10
MAX_COPIED_TOKENS = 1 << 21  # of prompts, by the answers to them; vLLM takes some 30 ns for each, on the event loop
GRAMMAR_THREADS = MAX_AT_ONCE + 1  # what a router lets through at once, and one
DEAD_LOOK_S = 1.0  # between two looks whether an engine core that was asked something still lives


class _Refusing(FlexibleArgumentParser):
    """vLLM's parser, raising where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vllm_args: {message}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """After `--help`."""
        raise ConfigError("vllm_args: nothing is served where help is asked for; `vllm serve --help=all` lists them")

    def load_config_file(self, file_path: str) -> list[str]:
        """vLLM calls this for `--config`."""
        args = super().load_config_file(file_path)
        for option in sorted({arg.replace("_", "-") for arg in args if arg.startswith("--")}):
            if (why := why_refused(option)) is not None:
                raise ConfigError(f"vllm_args: {why}")
        return args


def _refuse_files_of_several_workers(args: Namespace) -> None:
    transfer = args.kv_transfer_config
    if transfer is not None and transfer.kv_connector == FILE_CONNECTOR:
        workers = args.tensor_parallel_size * args.pipeline_parallel_size * args.prefill_context_parallel_size
        if (why := why_one_worker(workers)) is not None:
            raise ConfigError(why)


def parse_vllm_args(argv: Sequence[str]) -> Namespace:
    """The arguments of `vllm serve`, checked, with the parsers that they bring imported, as its server does.

    What `deployments.config.application` refuses by name is refused in the file of `--config` as well, and a name
    cannot be shortened to pass by it.

    Raises:
        ConfigError: unknown or wrong arguments, or some that Sluice does not leave to them.
    """
    parser = make_arg_parser(_Refusing(prog="vllm_args", allow_abbrev=False))
    try:
        args: Namespace = parser.parse_args(list(argv))
        _refuse_files_of_several_workers(args)
        validate_parsed_serve_args(args)
    except ConfigError:  # a ValueError too
        raise
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"vllm_args: {error}") from error
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    return args


def has_logits_processors(args: Namespace) -> bool:
    """Other than vLLM's own: named in the arguments, or installed for every vLLM."""
    return bool(args.logits_processors or entry_points(group=LOGITSPROCS_GROUP))


def as_front_end_of_any_model(args: Namespace) -> Namespace:
    """The same arguments for a front end whose engines are not vLLM: it must not refuse a model that vLLM cannot run.

    vLLM's configuration looks the architecture up in its registry. One that is not there is called by the name of one
    that is: of the model itself a front end uses nothing but the tokenizer, the templates and the context's length.
    """
    own = AutoConfig.from_pretrained(args.model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    if not set(own.architectures or ()) & set(ModelRegistry.get_supported_archs()):
        args.hf_overrides = {**(args.hf_overrides or {}), "architectures": [STAND_IN]}
    return args


def engine_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """As `vllm serve` makes it: slots and the tokens of a step that nobody set are by the use that is named."""
    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


# Both sides


def lora_id(name: str, path: str) -> int:
    """By which engines tell adapters apart: the same on both sides, where vLLM's front end would count from 1.

    Above 0 and below 2**31: vLLM's model runner for GPUs keeps it in 32 bits.
    """
    return int.from_bytes(hashlib.sha256(f"{name}\0{path}".encode()).digest()[:6], "big") % (2**31 - 1) + 1


def lora_requests(args: Namespace) -> list[LoRARequest]:
    """The adapters that vLLM's arguments name, those for the modalities of chats included."""
    by_modality = args.default_mm_loras if args.enable_lora else None
    return [
        LoRARequest(
            module.name,
            lora_id(module.name, module.path),
            module.path,
            base_model_name=module.base_model_name,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
        for module in process_lora_modules(list(args.lora_modules or ()), by_modality)
    ]


def _min_output_tokens(params: SamplingParams) -> int:
    """With ignore_eos all that it may have, for a stop string that may never come would be a way around a quota."""
    return int((params.max_tokens or 0) if params.ignore_eos else params.min_tokens)


class VllmCodec:
    """`router.codec.EngineCodec` for vLLM. Not thread-safe, as vLLM's encoder is not."""

    engine_version = ENGINE_VERSION

    def __init__(self, *, resumes: bool = True) -> None:
        """Args:
        resumes: False where what engines sample may look back over the tokens of any answer, as logits processors may.
        """
        self._resumes = resumes
        self._encoder = MsgpackEncoder()
        self._outputs_decoder = MsgpackDecoder(EngineCoreOutputs)
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)

    def size(self, request: EngineCoreRequest) -> RequestSize:
        prompt_tokens = (
            len(request.prompt_embeds) if request.prompt_token_ids is None else len(request.prompt_token_ids)
        )
        params = request.sampling_params
        return RequestSize(
            request_id=request.request_id,
            prompt_tokens=prompt_tokens,
            max_output_tokens=params.max_tokens if params else 1,
            min_output_tokens=_min_output_tokens(params) if params else 0,
            prompt_token_ids=request.prompt_token_ids or (),
        )

    def with_ticket(self, request: EngineCoreRequest, ticket: Ticket) -> EngineCoreRequest:
        """In a copy, for several requests of one prompt may share their sampling parameters."""
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
        output.new_prompt_logprobs_tensors = output.prompt_token_id_logprobs = None  # they came with the first token
        if output.new_logprobs is not None:
            output.new_logprobs = output.new_logprobs.slice_request(tokens, rest)
        if output.new_sampling_mask is not None:  # vLLM cannot slice what is of one token
            output.new_sampling_mask = output.new_sampling_mask.slice_request(tokens, rest) if rest else None
        if output.routed_experts is not None:  # one row for each token, and with the first those of the prompt
            output.routed_experts = output.routed_experts[len(output.routed_experts) - rest :]

    def resumable(self, request: EngineCoreRequest) -> bool:
        """Where the continuation does not depend on which tokens were prompt."""
        params = request.sampling_params
        return (
            self._resumes
            and request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and params is not None
            and params.prompt_logprob_token_ids is None
            and not without_metadata(params.extra_args)
            and all(getattr(params, name) == getattr(_DEFAULTS, name) for name in _LOOKS_BACK)
        )

    def in_one_piece(self, request: EngineCoreRequest) -> bool:
        """Not with stop strings, which vLLM's front end looks for in what has come, nor with logprobs, each of which
        would keep the whole frame that it came in."""
        params = request.sampling_params
        if params is None or params.stop or params.logprobs is not None or params.logprob_token_ids:
            return False
        return params.output_kind == RequestOutputKind.FINAL_ONLY

    def recover(self, request: EngineCoreRequest, sent: Sequence[int]) -> Recovery[EngineCoreRequest]:
        """Resume where that is exact, else replay from the start."""
        if not self.resumable(request):
            return Recovery(request, tuple(sent))
        params = request.sampling_params.clone()
        params.max_tokens -= len(sent)
        params.min_tokens = max(0, params.min_tokens - len(sent))
        # Experts are told of every token before the last one, the prompt's included: these have been.
        params.routed_experts_prompt_start = len(request.prompt_token_ids) + len(sent) - 1
        return Recovery(replace(request, prompt_token_ids=[*request.prompt_token_ids, *sent], sampling_params=params))

    # Where a prompt is read by another replica, see router.prefill_decode

    def splits(self, request: EngineCoreRequest) -> bool:
        """Not with what the KV cache does not hold (logprobs of the prompt) or what its prefill needs besides."""
        params = request.sampling_params
        return (
            request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.mm_features
            and request.lora_request is None
            and params is not None
            and params.prompt_logprobs is None
            and params.prompt_logprob_token_ids is None
        )

    def prefill_of(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Nobody reads its one token, so it is sampled the cheapest way."""
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args={TRANSFER_KEY: wanted})
        return replace(request, sampling_params=params)

    def cache_of(self, output: Any) -> Mapping[str, Any] | None:
        cache = output.kv_transfer_params
        return cache if cache and cache.get("do_remote_prefill") else None

    def with_cache(self, request: EngineCoreRequest, cache: Mapping[str, Any]) -> EngineCoreRequest:
        params = request.sampling_params.clone()
        params.extra_args = {**(params.extra_args or {}), TRANSFER_KEY: dict(cache)}
        return replace(request, sampling_params=params)

    def note_hits(self, output: Any, cache: Mapping[str, Any]) -> None:
        """As vLLM's output processor does where the client brings the cache."""
        if output.prefill_stats is not None and isinstance(cached := cache.get(HITS_KEY), int):
            output.prefill_stats.num_cached_tokens = cached

    def without_fetching(
        self, request: EngineCoreRequest, request_id: str, cache: Mapping[str, Any]
    ) -> EngineCoreRequest:
        offered = self.with_cache(request, cache)
        return replace(offered, request_id=request_id, abort_immediately=True)

    def failed(self, request_id: str) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)])


# On a router


# Of the request that this task submits, as the chat template wrote it: the request itself has only tokens.
prompt_text: ContextVar[str | None] = ContextVar("sluice_prompt_text", default=None)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """vLLM's front end makes objects and text of each on its event loop: a hundred thousand take a second, in which no
    stream goes on."""

    vocabulary: int
    most: int

    def check(self, request: EngineCoreRequest) -> None:
        """Raises InputError for more than there may be."""
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None:
            return
        of_each = 1 + (self.vocabulary if params.prompt_logprobs == -1 else params.prompt_logprobs)
        found = of_each * len(request.prompt_token_ids or ())
        if found > self.most:
            raise InputError(
                f"prompt_logprobs: {found} values, and {self.most} is the most (router.max_prompt_logprobs)"
            )


class RoutedEngineCore(EngineCoreClient):
    """vLLM's engine-core client interface over the routed client: the calls that serving needs.

    Control calls that address one engine (sleep, profiling, unloading adapters) stay vLLM's
    NotImplementedError, which its front end answers with 501.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        routed: RoutedClient[EngineCoreRequest, EngineCoreOutputs],
        model: str,
        unsupported: Callable[[EngineCoreRequest], Sequence[str]] | None = None,
        logprobs: PromptLogprobs | None = None,
    ) -> None:
        """Args:
        unsupported: names what a request asks for that the engines do not do; None where they do all that vLLM does.
        logprobs: bounds those of prompts; None does not.
        """
        self._routed, self._model, self._unsupported, self._logprobs = routed, model, unsupported, logprobs
        # vLLM ends the front end for good when its engine is dead; ours has many, and new ones come.
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.resumable:
            raise GracefulHTTPError("streaming input is not supported: no router keeps it", HTTPStatus.NOT_IMPLEMENTED)
        now_s = time.monotonic()
        context = current.get() or HttpContext(received_s=now_s, slo_class="standard")
        _refuse_late(context)
        if context.is_full:  # a route whose bodies `engine_requests` does not understand
            raise _as_answer(InputError(f"it asks for more than {context.max_engine_requests} answers"), context)
        timing = RequestTiming(received_s=context.received_s, submitted_s=now_s)
        context.timings.append(timing)
        try:
            self._refuse_unsupported(request)
            if self._logprobs is not None:
                self._logprobs.check(request)
            await self._routed.submit(
                request,
                slo_class=context.slo_class,
                timing=timing,
                tenant=context.tenant,
                question=self._question(request, context),
            )
            context.queued, timing.request_id = True, request.request_id
        except (AdmissionError, InputError, StateStoreError) as error:
            raise _as_answer(error, context) from error
        if context.is_over:  # since it was on its way into the queue
            await self.cancel_requests_async([request.request_id])
            _refuse_late(context)

    def _refuse_unsupported(self, request: EngineCoreRequest) -> None:
        if self._unsupported is not None and (names := self._unsupported(request)):
            raise InputError(f"the engine of {self._model} does not support {', '.join(names)}")

    def _question(self, request: EngineCoreRequest, context: HttpContext) -> Question | None:
        """What a learned predictor may go by; None for a prompt that has no text."""
        text = prompt_text.get()
        asked = context.asked.get(text)
        if asked is None and text is not None:
            asked = Asked(text, "")
        if asked is None:
            return None
        return Question(
            prompt=asked.prompt,
            system_prompt=asked.system_prompt,
            model=request.lora_request.lora_name if request.lora_request else self._model,
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

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        """For those that the arguments name: every replica has loaded them before it registers, under the same id."""
        lora_request.lora_int_id = lora_id(lora_request.lora_name, lora_request.lora_path)
        return True

    async def reset_mm_cache_async(self) -> None:
        """Nothing to do: a router keeps no multimodal cache of an engine's (`front_end_config`)."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing to do: the application closes the routed client."""


def _as_answer(error: Refused, context: HttpContext | None) -> GracefulHTTPError:
    """What vLLM's front end answers with the error's own status, also where it has begun a stream."""
    if context is not None:
        context.refused = error
    return GracefulHTTPError(str(error), status_of(error)[0])


def _refuse_late(context: HttpContext) -> None:
    """Handlers run in tasks of their own, and may ask for more when their HTTP exchange is over."""
    if context.is_over:
        raise GracefulHTTPError("nobody is left to read the answer", HTTPStatus.REQUEST_TIMEOUT)


def _without_transfer(params: SamplingParams) -> SamplingParams:
    """Without what its client would tell a KV connector."""
    if not params.extra_args or TRANSFER_KEY not in params.extra_args:
        return params
    params = params.clone()
    params.extra_args = {name: value for name, value in params.extra_args.items() if name != TRANSFER_KEY} or None
    return params


# Some want a size above 1, or sizes that fill as many nodes, so they go together.
_OF_ENGINES_ALONE = (
    "nnodes",
    "node_rank",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "eplb_config",
    "enable_dbo",
    "enable_batch_sharded_sampling",
    "enable_fault_tolerance",
    "enable_sleep_mode",
    "enable_cumem_allocator",
)


def front_end_config(engine_args: AsyncEngineArgs) -> VllmConfig:
    """As of one front end among several, so that images always travel with their request.

    A front end that believes its engine to be the only one sends an image once and its hash from then on, which another
    replica, or the next one, cannot resolve. What a router's own platform may refuse, for it mostly has no GPU, and
    what a front end does not use, is left to the engines.
    """
    engine_args._api_process_count = 2
    engine_args.renderer_num_workers = max(TEXT_THREADS, engine_args.renderer_num_workers)
    defaults = AsyncEngineArgs(model=engine_args.model)
    for name in _OF_ENGINES_ALONE:
        setattr(engine_args, name, getattr(defaults, name))
    if engine_args.speculative_config:  # a draft's own size must fit that of its model
        draft = engine_args.speculative_config
        engine_args.speculative_config = {name: draft[name] for name in draft if name != "draft_tensor_parallel_size"}
    return engine_config(engine_args)


class RoutedAsyncLLM(AsyncLLM):
    """vLLM's front-end engine on top of the routed client."""

    def __init__(
        self,
        args: Namespace,
        routed: RoutedClient[EngineCoreRequest, EngineCoreOutputs],
        unsupported: Callable[[EngineCoreRequest], Sequence[str]] | None = None,
        max_prompt_logprobs: int | None = None,
    ) -> None:
        self._routed = routed
        self._grammars: Grammars | None = None
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = front_end_config(engine_args)
        model = (args.served_model_name or [args.model])[0]
        vocabulary = config.model_config.get_vocab_size()
        logprobs = None if max_prompt_logprobs is None else PromptLogprobs(vocabulary, max_prompt_logprobs)
        core = RoutedEngineCore(routed, model, unsupported, logprobs)
        # vLLM has no way to hand a client in; for this one call its factory yields ours.
        with patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: core):
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=not engine_args.disable_log_stats,
                log_requests=engine_args.enable_log_requests,
            )
        note_chats(self.renderer)
        let_short_texts_pass(self.renderer)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        request_ids = (request_id,) if isinstance(request_id, str) else as_list(request_id)
        all_ids = self.output_processor.abort_requests(request_ids, internal)
        await self.engine_core.cancel_requests_async(all_ids)

    async def _abort_internal(self, request_ids: list[str]) -> None:
        """By the ids that engines know: their handlers then get a last output, as of any abort."""
        await self.abort(request_ids, internal=True)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Called before a response starts: what is refused here gets its status, also when it would stream."""
        super().check_admission(n, request_id)
        if (context := current.get()) is None:
            return
        timing = RequestTiming(received_s=context.received_s, submitted_s=time.monotonic())
        try:
            self._routed.check_room(context.slo_class, n, timing)
        except (AdmissionError, StateStoreError) as error:
            context.timings.append(timing)
            raise _as_answer(error, context) from error

    def compile_grammars_with(self, grammars: Grammars) -> None:
        """In place of vLLM's own checks of them, which run on the event loop for as long as they take."""
        self._grammars = grammars
        self.input_processor.structured_outputs_config = None

    async def add_request(self, request_id: str, prompt: Any, params: Any, *others: Any, **settings: Any) -> Any:
        """vLLM's output processor reads what a client would tell a KV connector: how much of its prompt was cached."""
        if isinstance(params, SamplingParams):
            params = _without_transfer(params)
            _refuse_many_copies(prompt, params)
            if self._grammars is not None and params.structured_outputs is not None:
                params = await _with_grammar(params, self._grammars)
        if (context := current.get()) is not None:
            context.abort = self._abort_internal
        return await super().add_request(request_id, prompt, params, *others, **settings)

    async def notify_kv_transfer_request_rejected(self, *_: Any, **__: Any) -> None:
        """Nothing to do: what a client says of caches reaches no engine. vLLM sends a request here that the engine ends
        without an output: its slot would never come back."""

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


def _refuse_many_copies(prompt: Any, params: SamplingParams) -> None:
    """vLLM copies the prompt for each answer to it, all of them at once."""
    tokens = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0
    if params.n * tokens > MAX_COPIED_TOKENS:
        why = f"n: {params.n} answers to {tokens} tokens are {params.n * tokens}, and {MAX_COPIED_TOKENS} is the most"
        raise _as_answer(InputError(why), current.get())


async def _with_grammar(params: SamplingParams, grammars: Grammars) -> SamplingParams:
    """As vLLM's checks leave it; a schema as text, which every copy of the request shares."""
    asked = copy(params.structured_outputs)
    if asked.all_constraints_none():
        return params
    if asked.json is not None and not isinstance(asked.json, str):
        asked.json = json.dumps(asked.json)
    fields = {each.name: getattr(asked, each.name) for each in dataclasses.fields(asked) if each.init}
    try:
        compiled = await grammars.compiled(fields)
    except (InputError, ReplicaLostError) as error:
        raise _as_answer(error, current.get()) from error
    asked.choice, asked.grammar = compiled.choice, compiled.grammar
    asked._backend, asked._backend_was_auto = compiled.backend, compiled.was_auto
    params = copy(params)
    params.structured_outputs = asked
    return params


def note_chats(renderer: Any) -> None:
    """Messages are seen in vLLM's renderer alone: behind it there is only what the chat template made of them."""
    render = renderer.render_chat_async

    async def noted(conversations: Sequence[list[Any]], *others: Any, **settings: Any) -> Any:
        rendered = await render(conversations, *others, **settings)
        if (context := current.get()) is not None:
            _note(context, conversations, rendered[1])
        return rendered

    renderer.render_chat_async = noted


def let_short_texts_pass(renderer: Any) -> None:
    """Long texts leave one of the threads that tokenize to the short ones."""
    tokenize = renderer._tokenize_prompt_async
    long_ones = asyncio.Semaphore(renderer.model_config.renderer_num_workers - 1)

    async def tokenize_in_turn(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= SHORT_TEXT_CHARS:
            return await tokenize(prompt, params)
        async with long_ones:
            return await tokenize(prompt, params)

    renderer._tokenize_prompt_async = tokenize_in_turn


def _note(context: HttpContext, conversations: Iterable[list[Any]], prompts: Iterable[Any]) -> None:
    for messages, prompt in zip(conversations, prompts, strict=True):
        if (asked := asked_in(messages)) is not None:
            context.asked[prompt.get("prompt")] = asked


# On an engine replica


def _refuse_pooling(config: VllmConfig) -> None:
    """Raises ConfigError for a model that embeds, classifies or scores: routers serve what generates."""
    if config.model_config.runner_type == "pooling":
        raise ConfigError(
            f"{config.model_config.model} is a pooling model, and Sluice serves models that generate text"
        )


class VllmEngine:
    """vLLM's engine core in a child process, for the relay."""

    engine_version = ENGINE_VERSION

    def __init__(self, args: Namespace) -> None:
        """Starts the engine and blocks until it is ready: run it in a thread.

        Raises:
            ConfigError: the model does not generate text.
        """
        self._config: VllmConfig = engine_config(AsyncEngineArgs.from_cli_args(args))
        _refuse_pooling(self._config)
        self.codec = VllmCodec()
        self._loras = lora_requests(args)
        self._admits: int | None = None
        self._core: AsyncMPClient = EngineCoreClient.make_async_mp_client(
            self._config, Executor.get_class(self._config), log_stats=False
        )

    @property
    def gang_sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def slots(self) -> int:
        """What the engine would admit at once, by its last status; the slots of vLLM where nothing else is said."""
        slots = int(self._config.scheduler_config.max_num_seqs)
        return min(slots, self._admits or slots)

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
        self._admits = status.get("batch_size")
        return status

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


# For the Transformers engine

_FINISH = {None: None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "error": FinishReason.ERROR}


def step_outputs(rows: Iterable[RowOutput]) -> EngineCoreOutputs:
    """What a step of a gang batch brought, in vLLM's structures."""
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=row.request_id,
                new_token_ids=row.token_ids,
                new_logprobs=_logprobs_lists(row.logprobs) if row.logprobs else None,
                finish_reason=_FINISH[row.finish],
                stop_reason=row.stop_reason,
            )
            for row in rows
        ]
    )


def _logprobs_lists(found: Logprobs) -> LogprobsLists:
    return LogprobsLists(
        logprob_token_ids=np.array([found.token_ids], dtype=np.int32),
        logprobs=np.array([found.logprobs], dtype=np.float32),
        sampled_token_ranks=np.array([found.rank], dtype=np.int32),
    )


# For `sluice calibrate`


def calibration_engine(model: str, vllm_args: Sequence[str], scheduler_cls: str) -> LLMEngine:
    """An engine in this process, one step at a time, under the scheduler plug-in. Raises ConfigError."""
    argv = ["--model", model, *vllm_args, "--disable-log-stats", "--no-async-scheduling", "--no-enable-prefix-caching"]
    settings = json.dumps({KEY: {"mode": "mixed", "admission": "slots"}})
    args = parse_vllm_args([*argv, "--scheduler-cls", scheduler_cls, "--additional-config", settings])
    return LLMEngine.from_vllm_config(engine_config(AsyncEngineArgs.from_cli_args(args)))


# In the engine-core process of a replica


def register_plugin() -> None:
    """vLLM calls this in each of its processes; it acts only in those under an engine replica of ours."""
    parent = parent_process()
    if REPLICA_ENV not in os.environ or parent is None:
        return
    from vllm.v1.engine.core import EngineCore

    from deployments.engines.vllm.scheduler.plug_in import core_control, core_status

    EngineCore.sluice_status, EngineCore.sluice_control = core_status, core_control
    compile_grammars_side_by_side()
    gc.freeze()  # vLLM collects garbage around loading the model: what is imported by now is none
    take_all_cores()
    if delay_us := os.environ.get(NIXL_DELAY_ENV):
        from deployments.engines.vllm.nixl_progress import sleep_between_events

        sleep_between_events(int(delay_us))
        # On CPUs vLLM's connector binds the thread that makes it to the machine's last core, for moving caches. Here
        # that is the thread that computes: every engine of the machine would share this one core.
        current_platform.discover_numa_topology = list
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True, name="end-with-replica").start()


def compile_grammars_side_by_side() -> None:
    """vLLM (0.32) compiles in a pool of half the cores, on two cores one by one: one grammar held up all others."""
    from vllm.v1.structured_output import StructuredOutputManager

    start = StructuredOutputManager.__init__

    def start_with_threads(manager: Any, config: VllmConfig) -> None:
        start(manager, config)
        if not config.model_config.skip_tokenizer_init:
            manager.executor.shutdown()
            manager.executor = ThreadPoolExecutor(GRAMMAR_THREADS, "grammars")

    StructuredOutputManager.__init__ = start_with_threads


def _end_with(sentinel: int) -> None:
    """A replica that is killed cannot end its engine, which would go on holding the GPU: so the engine watches it."""
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
