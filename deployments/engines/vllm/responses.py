"""vLLM's Responses API on a router: what it would keep in its own process is kept in the Redis that all routers share.

vLLM renders, generates, streams and names what is wrong with a request, as ever. It is told to store nothing. What came
before a request is loaded ahead of it and found where vLLM looks for it; what comes of it is stored behind it. One in
the background is rendered and checked by vLLM, and made by `BackgroundResponses`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem
from openai_harmony import Message
from pydantic import BaseModel
from pydantic_core import to_json
from vllm.entrypoints.openai.responses import serving
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from deployments.http.bodies import IN_A_THREAD_BYTES
from deployments.http.limits import FIELD_LIMITS
from deployments.http.middleware import TENANT
from deployments.http.sessions import digest
from deployments.responses.background import BackgroundResponses
from deployments.responses.store import ID, Encoded, NoRoomError, Place, ResponseStore, TakenError, shown_id
from policies.errors import SluiceError, StateStoreError
from router.timing import current

logger = logging.getLogger(__name__)

MAX_MESSAGES = FIELD_LIMITS["messages"].entries
_BYTES_PER_TOKEN = 8  # of an answer in JSON: more is rare, and costs a moment of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptResponses:
    """Where the responses of one model go.

    Attributes:
        background: makes those that run in the background, and has the store of all.
        max_bytes: of one with its conversation; a request that brought more would be refused.
    """

    background: BackgroundResponses
    max_bytes: int

    @property
    def store(self) -> ResponseStore:
        return self.background.store


class _Previous(NamedTuple):
    """What a request goes on from, in the shape in which vLLM looks for it; `root` is the id of the first response of
    its chain."""

    id: str
    messages: list[Any]
    output: list[Any]
    root: str


@dataclass(slots=True, eq=False)
class _Turn:
    """One request.

    Attributes:
        place: where its response is stored; None where it is not.
        is_asked: its client asked for that.
        size: bytes that it makes to encode, by what is known of it before.
        messages: the conversation up to its answer, as vLLM rendered it.
        generation: what vLLM calls its generator with, of one in the background.
        root: the id of the first response of its chain, by which it is a session.
        tier: the `service_tier` under which it is served; None if it asked for none.
    """

    place: Place | None
    is_asked: bool
    size: int = 0
    previous: _Previous | None = None
    messages: list[Any] = field(default_factory=list)
    generation: "asyncio.Future[tuple[Any, ...]] | None" = None
    root: str = ""
    tier: str | None = None

    def note(self, response: Any, is_stored: bool) -> None:
        """OpenAI's responses have `store`; vLLM's take it as a field that they do not know."""
        response.store = is_stored
        if self.tier is not None:  # vLLM's have the one that was asked for
            response.service_tier = self.tier


_turn: ContextVar[_Turn] = ContextVar("sluice_turn")


class _OfThisRequest:
    """In the place of a dictionary of vLLM's: holds what the request of this task goes on from, and nothing else."""

    def __init__(self, read: Callable[[_Previous], Any]) -> None:
        self._read = read

    def get(self, response_id: str) -> Any:
        previous = _turn.get().previous
        return None if previous is None else self._read(previous)

    __getitem__ = get

    def __setitem__(self, response_id: str, value: Any) -> None:
        """vLLM notes that it has begun a response: `BackgroundResponses` stores that."""


class _RefusedError(SluiceError):
    def __init__(self, message: str, status: HTTPStatus, param: str) -> None:
        super().__init__(message)
        self.status, self.param = status, param


def _bad(param: str, message: str) -> _RefusedError:
    return _RefusedError(message, HTTPStatus.BAD_REQUEST, param)


class StoredResponses(OpenAIServingResponses):
    def __init__(self, *args: Any, kept: KeptResponses | None, **settings: Any) -> None:
        """Args:
        kept: None stores nothing.
        """
        super().__init__(*args, **settings)
        self._kept = kept
        self.response_store = _OfThisRequest(lambda previous: previous)
        self.msg_store = _OfThisRequest(lambda previous: previous.messages)

    async def create_responses(self, request: ResponsesRequest, raw_request: Any = None) -> Any:
        try:
            return await self._created(request, raw_request)
        except _RefusedError as refused:
            kind = "invalid_request_error" if refused.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
            return self.create_error_response(str(refused), kind, refused.status, refused.param)

    async def _created(self, request: ResponsesRequest, raw_request: Any) -> Any:
        turn = self._begun(request, raw_request)
        if raw_request is not None:
            turn.size = len(await raw_request.body())  # which has been read: FastAPI has made the request of it
        if (context := current.get()) is not None:
            turn.tier = context.service_tier
        turn.root = request.request_id
        _turn.set(turn)
        await self._check_store(turn, request)
        if request.previous_response_id is not None:
            turn.previous = await self._previous(request.previous_response_id, turn)
            turn.root = turn.previous.root
        if context is not None and context.session is None and turn.place is not None:
            context.session = digest(turn.root, context.tenant)
        request.store = False
        made = await super().create_responses(request, raw_request)
        if isinstance(made, ErrorResponse):
            return made
        if request.background and turn.place is not None:
            return await self._started(turn, turn.place, request, made)
        return await self._stored(turn, made) if isinstance(made, ResponsesResponse) else self._stream(turn, made)

    def _begun(self, request: ResponsesRequest, raw_request: Any) -> _Turn:
        """Raises _RefusedError for what needs a store that is not there."""
        store_asked = bool(request.store) and _says(request, "store")
        if raw_request is not None and TENANT in raw_request.scope:
            return self._of_batch(request)
        if self._kept is None:
            needs = {
                "background": request.background,
                "previous_response_id": request.previous_response_id,
                "store": store_asked,
            }
            for param in (name for name, asked in needs.items() if asked):
                raise _bad(param, f"{param}: no response is stored here (responses.store)")
            return _Turn(None, False)
        if request.background and request.stream:
            raise _bad("stream", "stream: a response in the background is not streamed, ask for it until it has ended")
        is_asked = store_asked or bool(request.background)
        place = Place.of_key(_key(), request.request_id)
        if is_asked and not place.may_be:
            raise _bad("request_id", f"request_id of a stored response must match {ID.pattern}, or be left out")
        stores = request.store and place.may_be
        turn = _Turn(place if stores else None, is_asked)
        if request.background:
            turn.generation = asyncio.get_running_loop().create_future()
        return turn

    def _of_batch(self, request: ResponsesRequest) -> _Turn:
        """A line of a batch: its answer is in the batch's file, and nowhere else."""
        for param in ("background", "previous_response_id"):
            if getattr(request, param):
                raise _bad(param, f"{param}: lines of a batch keep no state")
        return _Turn(None, False)

    async def _check_store(self, turn: _Turn, request: ResponsesRequest) -> None:
        """Before the engines work for it. One in the background is stored before that anyway."""
        if self._kept is None or not turn.is_asked or request.background:
            return
        try:
            await self._kept.store.check()
        except StateStoreError as error:
            raise _unavailable("store", error) from error

    async def _previous(self, response_id: str, turn: _Turn) -> _Previous:
        assert self._kept is not None, "requests that go on from another were refused"
        param = "previous_response_id"
        try:
            stored = await self._kept.store.get(Place.of_key(_key(), response_id), with_messages=True)
        except StateStoreError as error:
            raise _unavailable(param, error) from error
        if stored is None:
            why = f"Previous response with id {response_id[:128]!r} not found: none was stored, or it has expired."
            raise _RefusedError(why, HTTPStatus.NOT_FOUND, param)
        if not stored.messages:
            raise _bad(param, f"{response_id} is {stored.status}: a conversation goes on from one that was completed")
        turn.size += len(stored.messages)
        previous = await _by_size(len(stored.messages), _decoded, response_id, stored.messages)
        if any(isinstance(message, Message) for message in previous.messages) != self.use_harmony:
            raise _bad(param, f"{response_id} is of a model whose conversations this one cannot go on with")
        if len(previous.messages) > MAX_MESSAGES:
            raise _bad(param, f"the conversation has {len(previous.messages)} messages, and {MAX_MESSAGES} is the most")
        return previous

    async def _render_resolved_response_inputs(self, *args: Any, **settings: Any) -> Any:
        """vLLM has the whole conversation here, and would keep it in its own process."""
        try:
            rendered = await super()._render_resolved_response_inputs(*args, **settings)
        except (LookupError, AttributeError) as error:  # an item without what vLLM looks for in it
            raise _bad("input", f"input: an item is not whole: {error}") from error
        if not isinstance(rendered, ErrorResponse):
            _turn.get().messages = rendered.messages
        return rendered

    async def _stored(self, turn: _Turn, response: ResponsesResponse) -> ResponsesResponse:
        """The response, which says whether it is stored. It is not withheld where that fails in the end."""
        turn.note(response, False)
        if self._kept is None or turn.place is None:
            return response
        if (context := current.get()) is not None and context.is_over:
            return response  # cut off, whatever vLLM makes of that
        turn.note(response, True)
        try:
            await self._kept.store.keep(turn.place, await self._encoded(turn, response), tries=turn.is_asked)
        except (NoRoomError, StateStoreError) as error:
            turn.note(response, False)
            if turn.is_asked:
                logger.warning("%s is not stored: %s", turn.place.shown, error)
        return response

    async def _stream(self, turn: _Turn, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(events):
            async for event in events:
                if event.type == "response.completed":
                    await self._stored(turn, event.response)
                elif event.type in ("response.created", "response.in_progress"):
                    turn.note(event.response, turn.place is not None)  # what is meant; the last one says what is
                yield event

    async def _encoded(self, turn: _Turn, response: ResponsesResponse) -> Encoded:
        """Raises NoRoomError for a conversation that no request may bring."""
        assert self._kept is not None
        size = turn.size + _BYTES_PER_TOKEN * (response.usage.output_tokens if response.usage else 0)
        encoded: Encoded = await _by_size(size, _encoded, response, turn.messages, turn.root)
        if encoded.size > self._kept.max_bytes:
            why = f"the conversation exceeds {self._kept.max_bytes} bytes (router.max_body_bytes)"
            raise self._kept.store.no_room(why)
        return encoded

    def _generate_with_builtin_tools(self, request_id: str, *args: Any, **settings: Any) -> Any:
        """vLLM would ask the engines by the id of the response, and theirs are shown to everybody."""
        return super()._generate_with_builtin_tools(shown_id(request_id), *args, **settings)

    def _raise_if_error(self, finish_reason: str | None, request_id: str) -> None:
        super()._raise_if_error(finish_reason, shown_id(request_id))

    def _log_final_output(self, request: ResponsesRequest, *args: Any, **settings: Any) -> None:
        if self.enable_log_outputs:
            request = request.model_copy(update={"request_id": shown_id(request.request_id)})
            super()._log_final_output(request, *args, **settings)

    async def _run_background_request(self, request: ResponsesRequest, *generation: Any) -> None:
        """vLLM would generate in a task whose failure is not seen."""
        assert (told := _turn.get().generation) is not None
        told.set_result(generation)

    async def _started(
        self, turn: _Turn, place: Place, request: ResponsesRequest, queued: ResponsesResponse
    ) -> ResponsesResponse:
        """The response, once it waits for an engine."""
        assert self._kept is not None and turn.generation is not None
        context = current.get()
        assert context is not None, "the middleware sets it"
        detached = context.detached()
        turn.note(queued, True)
        make = partial(self._made, turn, request, await turn.generation)
        first = Encoded(await _by_size(turn.size, _response_json, queued))
        try:
            await self._kept.background.start(place, first, detached, make, size=turn.size)
        except TakenError as error:
            raise _bad("request_id", str(error)) from error
        except (NoRoomError, StateStoreError) as error:
            raise _unavailable("background", error) from error
        finally:
            context.refused = detached.refused
        return queued

    async def _made(self, turn: _Turn, request: ResponsesRequest, generation: tuple[Any, ...]) -> Encoded:
        response = await self.responses_full_generator(request, *generation)
        if isinstance(response, ErrorResponse):  # so vLLM says that its task was cancelled
            raise asyncio.CancelledError
        turn.note(response, True)
        return await self._encoded(turn, response)


def _unavailable(param: str, error: SluiceError) -> _RefusedError:
    return _RefusedError(f"{param}: responses cannot be stored now: {error}", HTTPStatus.SERVICE_UNAVAILABLE, param)


def _key() -> str | None:
    context = current.get()
    return context.tenant.name if context is not None and context.tenant is not None else None


async def _by_size(size: int, call: Callable[..., Any], *args: Any) -> Any:
    """In a thread where it takes longer than one takes to start."""
    return call(*args) if size < IN_A_THREAD_BYTES else await asyncio.to_thread(call, *args)


def _says(request: BaseModel, name: str) -> bool:
    """The client has set it: it is not there by default."""
    return name in request.model_fields_set


def _response_json(response: BaseModel) -> bytes:
    return response.model_dump_json(by_alias=True).encode()


def _encoded(response: ResponsesResponse, messages: list[Any], root: str) -> Encoded:
    conversation = {**_conversation(messages, response.output), "root": root}
    return Encoded(_response_json(response), to_json(conversation))


def _conversation(messages: list[Any], output: list[Any]) -> dict[str, Any]:
    """With the answer: vLLM adds it to Harmony's messages itself. Of others it would add an answer's text alone, so
    that a tool's output had no call before it. Reasoning is left out, as vLLM leaves it."""
    if any(isinstance(message, Message) for message in messages):
        calls = [item for item in output if isinstance(item, ResponseFunctionToolCall)]
        return {"harmony": [message.to_dict() for message in messages], "calls": calls}
    said = [item for item in output if not isinstance(item, ResponseReasoningItem)]
    return {"chat": [*messages, *construct_chat_messages_with_tool_call(said)]}


def _decoded(response_id: str, conversation: bytes) -> _Previous:
    read = json.loads(conversation)
    root = read.get("root", response_id)  # not in those of earlier versions
    if "chat" in read:
        return _Previous(response_id, read["chat"], [], root)
    calls = [ResponseFunctionToolCall.model_validate(call) for call in read["calls"]]
    return _Previous(response_id, [Message.from_dict(message) for message in read["harmony"]], calls, root)


@contextmanager
def stored_responses(kept: KeptResponses | None) -> Iterator[None]:
    """vLLM's application, built meanwhile, has this in the place of its own."""
    own = serving.OpenAIServingResponses
    serving.OpenAIServingResponses = partial(StoredResponses, kept=kept)
    try:
        yield
    finally:
        serving.OpenAIServingResponses = own
