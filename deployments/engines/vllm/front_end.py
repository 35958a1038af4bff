"""On a router: vLLM's own front-end engine, with the routed client in the place of its engine-core client."""

import asyncio
import dataclasses
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig
from vllm import ModelRegistry, SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest
from vllm.utils.collection_utils import as_list
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor import Executor

from deployments.engines.vllm.args import engine_config, lora_id
from deployments.engines.vllm.codec import TRANSFER_KEY
from deployments.engines.vllm.grammars import Grammars
from deployments.http.errors import status_of
from deployments.http.keys import salt_of_key
from policies.errors import AdmissionError, InputError, ReplicaLostError, StateStoreError
from policies.live import Live
from predictor.conversation import Asked, asked_in
from predictor.learned import Question
from router.prefill_decode import EngineClient
from router.timing import HttpContext, Refused, current

# Any architecture that vLLM's registry holds, for models that it does not.
STAND_IN = "LlamaForCausalLM"
# Threads of a front end that tokenize (vLLM has one), and the texts that all of them may be busy with: some 10 ms.
TEXT_THREADS = 2
SHORT_TEXT_CHARS = 32 << 10
INLINE_CHARS = 2 << 10  # tokenized in less time than a thread takes to be handed it and to give it back
MAX_COPIED_TOKENS = 1 << 19  # of prompts, by the answers to them; vLLM takes some 120 ns for each, on the event loop
# Of the request that this task submits, as the chat template wrote it: the request itself has only tokens.
prompt_text: ContextVar[str | None] = ContextVar("sluice_prompt_text", default=None)


def as_front_end_of_any_model(args: Namespace) -> Namespace:
    """The same arguments for a front end whose engines are not vLLM: it must not refuse a model that vLLM cannot run.

    vLLM's configuration looks the architecture up in its registry. One that is not there is called by the name of one
    that is: of the model itself a front end uses nothing but the tokenizer, the templates and the context's length.
    """
    own = AutoConfig.from_pretrained(args.model, revision=args.revision, trust_remote_code=args.trust_remote_code)
    if not set(own.architectures or ()) & set(ModelRegistry.get_supported_archs()):
        args.hf_overrides = {**(args.hf_overrides or {}), "architectures": [STAND_IN]}
    return args


@dataclass(slots=True)
class PromptLogprobs:
    """vLLM's front end makes objects and text of each on its event loop: a hundred thousand take a second, in which no
    stream goes on."""

    vocabulary: int
    most: Live[int]

    def check(self, request: EngineCoreRequest) -> None:
        """Raises InputError for more than there may be."""
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None:
            return
        of_each = 1 + (self.vocabulary if params.prompt_logprobs == -1 else params.prompt_logprobs)
        found = of_each * len(request.prompt_token_ids or ())
        if found > (most := self.most.now):
            raise InputError(f"prompt_logprobs: {found} values, and {most} is the most (router.max_prompt_logprobs)")


class RoutedEngineCore(EngineCoreClient):
    """vLLM's engine-core client interface over the routed client: the calls that serving needs.

    Control calls that address one engine (sleep, profiling, unloading adapters) stay vLLM's
    NotImplementedError, which its front end answers with 501.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        routed: EngineClient[EngineCoreRequest, EngineCoreOutputs],
        model: str,
        unsupported: Callable[[EngineCoreRequest], Sequence[str]] | None = None,
        logprobs: PromptLogprobs | None = None,
        *,
        isolates_keys: bool = False,
    ) -> None:
        """Args:
        unsupported: names what a request asks for that the engines do not do; None where they do all that vLLM does.
        logprobs: bounds those of prompts; None does not.
        isolates_keys: requests find only prompts of their own API key in the engines' caches.
        """
        self._routed, self._model, self._unsupported, self._logprobs = routed, model, unsupported, logprobs
        self._isolates_keys = isolates_keys
        # vLLM ends the front end for good when its engine is dead; ours has many, and new ones come.
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if request.resumable:
            raise GracefulHTTPError("streaming input is not supported: no router keeps it", HTTPStatus.NOT_IMPLEMENTED)
        now_s = time.monotonic()
        context = current.get() or HttpContext(received_s=now_s, slo_class="standard")
        context.model = self._model
        _refuse_late(context)
        if context.is_full:  # a route whose bodies `engine_requests` does not understand
            raise _as_answer(InputError(f"it asks for more than {context.max_engine_requests} answers"), context)
        timing = context.timing(now_s)
        context.timings.append(timing)
        if context.trace is not None:
            context.trace.follow(timing, self._served_name(request))
        try:
            self._refuse_unsupported(request)
            if self._logprobs is not None:
                self._logprobs.check(request)
            if self._isolates_keys and context.tenant is not None:
                request.cache_salt = salt_of_key(context.tenant.name, request.cache_salt)
            await self._routed.submit(
                request,
                slo_class=context.slo_class,
                promise=context.promise,
                timing=timing,
                tenant=context.tenant,
                question=self._question(request, context),
            )
            timing.request_id = request.request_id
            context.note_queued()
        except (AdmissionError, InputError, StateStoreError) as error:
            raise _as_answer(error, context) from error
        if context.is_over:  # since it was on its way into the queue
            await self.cancel_requests_async([request.request_id])
            _refuse_late(context)

    def _served_name(self, request: EngineCoreRequest) -> str:
        """The name of the model, or of the adapter that the request asks for."""
        return str(request.lora_request.lora_name) if request.lora_request else self._model

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
            model=self._served_name(request),
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
    return GracefulHTTPError(str(error), status_of(error))


def _refuse_late(context: HttpContext) -> None:
    """Handlers run in tasks of their own, and may ask for more when their HTTP exchange is over."""
    if context.is_over:
        raise GracefulHTTPError("the client has gone before its answer", HTTPStatus.REQUEST_TIMEOUT)


def _without_transfer(params: SamplingParams) -> SamplingParams:
    """Without what its client would tell a KV connector."""
    if not params.extra_args or TRANSFER_KEY not in params.extra_args:
        return params
    params = params.clone()
    params.extra_args = {name: value for name, value in params.extra_args.items() if name != TRANSFER_KEY} or None
    return params


# Some want a size above 1, or sizes that fill as many nodes, so they go together.
_OF_ENGINES_ALONE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_size",
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


@contextmanager
def _handed_in(core: RoutedEngineCore) -> Iterator[None]:
    """vLLM has no way to hand a client in: its factory yields this one meanwhile."""
    factory = EngineCoreClient.__dict__["make_async_mp_client"]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = factory


class RoutedAsyncLLM(AsyncLLM):
    """vLLM's front-end engine on top of the routed client."""

    def __init__(
        self,
        args: Namespace,
        routed: EngineClient[EngineCoreRequest, EngineCoreOutputs],
        unsupported: Callable[[EngineCoreRequest], Sequence[str]] | None = None,
        max_prompt_logprobs: Live[int] | None = None,
        *,
        isolates_keys: bool = False,
        made_grammars: Callable[[VllmConfig], Grammars] | None = None,
        may_be_none: bool = False,
    ) -> None:
        """Args:
        may_be_none: it is well without an engine replica too, for one starts when a request comes.
        unsupported, isolates_keys: as of `RoutedEngineCore`.
        max_prompt_logprobs: None sets no bound.
        made_grammars: what compiles them, by the front end's configuration, in place of vLLM's own checks, which run on
            the event loop for as long as they take; None leaves those.
        """
        self._routed, self._may_be_none = routed, may_be_none
        engine_args = AsyncEngineArgs.from_cli_args(args)
        config = front_end_config(engine_args)
        self._public_name = model = (args.served_model_name or [args.model])[0]
        vocabulary = config.model_config.get_vocab_size()
        self._logprobs = None if max_prompt_logprobs is None else PromptLogprobs(vocabulary, max_prompt_logprobs)
        core = RoutedEngineCore(routed, model, unsupported, self._logprobs, isolates_keys=isolates_keys)
        with _handed_in(core):
            super().__init__(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_stats=not engine_args.disable_log_stats,
                log_requests=engine_args.enable_log_requests,
            )
        self._grammars = None if made_grammars is None else made_grammars(config)
        if self._grammars is not None:
            self.input_processor.structured_outputs_config = None
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
        context.model = self._public_name
        timing = context.timing(time.monotonic())
        try:
            self._routed.check_room(context.slo_class, n, timing, context.tenant)
        except (AdmissionError, StateStoreError) as error:
            context.timings.append(timing)
            raise _as_answer(error, context) from error

    async def add_request(self, request_id: str, prompt: Any, params: Any, *others: Any, **settings: Any) -> Any:
        """vLLM's output processor reads what a client would tell a KV connector: how much of its prompt was cached."""
        if isinstance(params, SamplingParams):
            params = _without_transfer(params)
            _refuse_many_copies(prompt, params)
            if self._grammars is not None and params.structured_outputs is not None:
                params = await _with_grammar(params, self._grammars)
        if (context := current.get()) is not None:
            context.abort = self._abort_internal
        settings.pop("trace_headers", None)  # of which vLLM would say that tracing is disabled: it is ours that goes on
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
        if not self._routed.snapshot.replicas and not self._may_be_none:
            raise EngineDeadError("no engine replica is registered")


def _refuse_many_copies(prompt: Any, params: SamplingParams) -> None:
    """vLLM copies the prompt for each answer to it, all of them at once."""
    tokens = len(prompt.get("prompt_token_ids") or ()) if isinstance(prompt, dict) else 0
    if params.n > 1 and params.n * tokens > MAX_COPIED_TOKENS:
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
    """Long texts leave one of the threads that tokenize to the short ones, and the shortest need none."""
    tokenize = renderer._tokenize_prompt_async
    long_ones = asyncio.Semaphore(renderer.model_config.renderer_num_workers - 1)

    async def tokenize_in_turn(prompt: Any, params: Any) -> Any:
        if len(prompt["prompt"]) <= INLINE_CHARS:
            return renderer._tokenize_prompt(prompt, params)
        if len(prompt["prompt"]) <= SHORT_TEXT_CHARS:
            return await tokenize(prompt, params)
        await long_ones.acquire()
        # No thread can be called off: it keeps its turn to the end, also for a client that has left.
        work = asyncio.ensure_future(tokenize(prompt, params))
        work.add_done_callback(lambda _: long_ones.release())
        return await asyncio.shield(work)

    renderer._tokenize_prompt_async = tokenize_in_turn


def _note(context: HttpContext, conversations: Iterable[list[Any]], prompts: Iterable[Any]) -> None:
    for messages, prompt in zip(conversations, prompts, strict=True):
        if (asked := asked_in(messages)) is not None:
            context.asked[prompt.get("prompt")] = asked
