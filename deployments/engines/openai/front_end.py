"""A router's HTTP application before servers of others: bodies go on as their clients wrote them, and come back as the
servers answer. Nothing here knows the model: no template, no tokenizer, no vLLM."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from deployments.engines.openai.events import broken_off
from deployments.engines.openai.messages import Outputs, ServerOutput, ServerRequest, pieces_of
from deployments.http.bodies import IN_A_THREAD_BYTES
from deployments.http.errors import error_response, status_of
from deployments.http.keys import salt_of_key
from deployments.http.middleware import route_path
from policies.errors import AdmissionError, InputError, ReplicaLostError, StateStoreError
from predictor.conversation import asked_in
from predictor.learned import Question
from router.background import BackgroundTasks
from router.codec import WHOLE
from router.prefill_decode import EngineClient
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ID_PREFIXES = {CHATS: "chatcmpl", COMPLETIONS: "cmpl"}
USUAL_MAX_TOKENS = 16  # of completions, by the API
MOST_COUNTED = (1 << 31) - 1  # of tokens and answers: what a server's C takes
MOST_UNREAD_BYTES = 16 << 20  # of an answer whose client reads slower than it comes
_NOT_WHOLE = "the server broke off, and no other goes on with the same answer"
_NOT_FOR_SERVERS = ("service_tier",)  # what this router answers for
_REFUSALS = (AdmissionError, InputError, ReplicaLostError, StateStoreError)


class Answer:
    """One answer on its way from the outputs of servers to the task that writes it to its client."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._bytes = 0
        self._changed = asyncio.Event()
        self.first: ServerOutput | None = None
        self.has_ended = self.failed = False
        self._tells_why = False

    def came(self, output: ServerOutput) -> None:
        self.first = self.first or output
        # An answer that has begun is not gone on with by words about its end: the last event tells of that.
        parts = output.parts if output.content_type == self.first.content_type else [broken_off(_NOT_WHOLE)]
        self._parts += parts
        self._bytes += sum(map(len, parts))
        if output.finish_reason is not None:
            self._tells_why = bool(parts)
            self.end(failed=output.finish_reason not in WHOLE)
        self._changed.set()

    def end(self, *, failed: bool) -> None:
        self.has_ended, self.failed = True, failed
        self._changed.set()

    @property
    def is_too_far_behind(self) -> bool:
        return self._bytes > MOST_UNREAD_BYTES

    async def begun(self) -> ServerOutput | None:
        """Its first output; None where it ended without one."""
        while self.first is None and not self.has_ended:
            await self._next()
        return self.first

    async def whole(self) -> bytes:
        while not self.has_ended:
            await self._next()
        return self._taken()

    async def stream(self) -> AsyncIterator[bytes]:
        """Until its end, of which an event tells where nothing else does."""
        while not self.has_ended:
            if part := self._taken():
                yield part
            await self._next()
        if part := self._taken():
            yield part
        if self.failed and not self._tells_why:
            yield broken_off(_NOT_WHOLE)

    async def _next(self) -> None:
        """Until something has come since."""
        await self._changed.wait()
        self._changed.clear()

    def _taken(self) -> bytes:
        parts, self._parts, self._bytes = self._parts, [], 0
        return b"".join(parts)


@dataclass(slots=True, kw_only=True, eq=False)
class ServersFrontEnd:
    """`run` reads what servers answer, for as long as this serves.

    Attributes:
        model: as clients call it; server_model: as its servers do.
        isolates_keys: servers whose caches heed `cache_salt`, as vLLM's, find only prompts of the same API key.
        errored: nothing is read any more, and this router is to be replaced.
    """

    routed: EngineClient[ServerRequest, Outputs]
    model: str
    server_model: str
    max_model_len: int
    isolates_keys: bool
    errored: bool = False
    _answers: dict[str, Answer] = field(default_factory=dict)  # that have not ended

    async def run(self) -> None:
        try:
            while True:
                for output in await self.routed.next_outputs():
                    await self._hand_on(output)
        finally:
            self.errored = True
            for answer in self._answers.values():
                answer.end(failed=True)

    async def _hand_on(self, output: ServerOutput) -> None:
        answer = self._answers.get(output.request_id)
        if answer is None:
            return
        answer.came(output)
        if answer.has_ended:
            del self._answers[output.request_id]
        elif answer.is_too_far_behind:
            logger.warning(
                "request %s: its client leaves more than %d bytes unread", output.request_id, MOST_UNREAD_BYTES
            )
            await self.abort([output.request_id])

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.routed.cancel(request_ids, "cancelled")
        for request_id in request_ids:
            if (answer := self._answers.pop(request_id, None)) is not None:
                answer.end(failed=True)

    def application(self, background: BackgroundTasks) -> FastAPI:
        background.spawn(self.run(), "outputs of servers")
        routes: list[BaseRoute] = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route(CHATS, self._answered, methods=["POST"]),
            Route(COMPLETIONS, self._answered, methods=["POST"]),
        ]
        app = FastAPI(openapi_url=None, routes=routes)
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        return app

    async def _health(self, request: Request) -> Response:
        """As vLLM's: 503 without a server to send anything to, or once nothing is read any more."""
        serves = self.routed.snapshot.replicas and not self.errored
        return Response(status_code=HTTPStatus.OK if serves else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _models(self, request: Request) -> Response:
        entry = {"id": self.model, "object": "model", "owned_by": "sluice", "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [entry | {"created": int(time.time())}]})

    async def _answered(self, request: Request) -> Response:
        context = current.get() or HttpContext(received_s=time.monotonic(), slo_class="standard")
        path, content = route_path(request.scope), await request.body()
        try:
            body = await _decoded(content)
            if (named := body.get("model")) not in (None, self.model):
                return error_response(HTTPStatus.NOT_FOUND, f"The model {named!r} does not exist.", "NotFoundError")
            asked, question = await self._asked(path, body, context, len(content))
            return await self._exchanged(asked, question, context)
        except _REFUSALS as error:
            context.refused = error
            return error_response(status_of(error), str(error))

    async def _asked(
        self, path: str, body: dict[str, Any], context: HttpContext, size: int
    ) -> tuple[ServerRequest, Question | None]:
        """Raises InputError."""
        number = uuid.uuid4().hex
        answer_id = f"{ID_PREFIXES[path]}-{context.request_id or number}"
        tenant = context.tenant.name if self.isolates_keys and context.tenant is not None else None

        def made() -> tuple[ServerRequest, Question | None]:
            asked = server_request(path, body, self.server_model, tenant)
            asked.request_id, asked.answer_id, asked.model = f"{answer_id}-{number[:8]}", answer_id, self.model
            return asked, _question(path, body, self.model, context, asked)

        return await asyncio.to_thread(made) if size >= IN_A_THREAD_BYTES else made()

    async def _exchanged(self, asked: ServerRequest, question: Question | None, context: HttpContext) -> Response:
        """Raises one of _REFUSALS."""
        if self.errored:
            raise ReplicaLostError("this router reads no more answers, and is about to be replaced")
        timing = context.timing(time.monotonic())
        context.model = self.model
        context.timings.append(timing)
        context.abort = self.abort
        if context.trace is not None:
            context.trace.follow(timing, self.model)
        answer = self._answers[asked.request_id] = Answer()
        begun = False
        try:
            await self.routed.submit(
                asked,
                slo_class=context.slo_class,
                promise=context.promise,
                timing=timing,
                tenant=context.tenant,
                question=question,
            )
            timing.request_id = asked.request_id
            context.note_queued()
            if context.is_over:  # its client has left meanwhile, and reads nothing of this
                return Response(status_code=HTTPStatus.REQUEST_TIMEOUT)
            response = await self._response(asked, answer, await answer.begun())
            begun = isinstance(response, StreamingResponse)
            return response
        finally:
            if not begun:
                await self._forget(asked.request_id)

    async def _response(self, asked: ServerRequest, answer: Answer, first: ServerOutput | None) -> Response:
        if first is None or (answer.failed and not first.parts):
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "no server answers this request")
        if answer.failed or not asked.streams:
            return Response(await answer.whole(), first.status, media_type=first.content_type)
        return StreamingResponse(self._streamed(asked.request_id, answer), media_type=first.content_type)

    async def _streamed(self, request_id: str, answer: Answer) -> AsyncIterator[bytes]:
        try:
            async for part in answer.stream():
                yield part
        finally:
            await self._forget(request_id)

    async def _forget(self, request_id: str) -> None:
        """Nobody reads it any more; a server that still works at it is told."""
        if self._answers.pop(request_id, None) is not None:
            await self.routed.cancel([request_id], "cancelled")


def server_request(path: str, body: Mapping[str, Any], server_model: str, tenant: str | None) -> ServerRequest:
    """What a body asks for, as a request without ids.

    Raises:
        InputError: it has no prompt, or a field that says how much has another type.
    """
    prompt, own_salt = _prompt(path, body), _text_of(body, "cache_salt")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise InputError("stream_options must be an object")
    tells_usage, streams = _flag(options, "include_usage"), _flag(body, "stream")
    pieces = prompt if isinstance(prompt, list) else pieces_of(prompt)
    told = {name: value for name, value in body.items() if name not in _NOT_FOR_SERVERS} | {"model": server_model}
    if streams:
        told["stream_options"] = {**options, "include_usage": True}
    if salt := salt_of_key(tenant, own_salt) if tenant is not None else own_salt:
        told["cache_salt"] = salt
    return ServerRequest(
        request_id="",
        path=path,
        body=msgspec.json.encode(told),
        answer_id="",
        created=int(time.time()),
        model="",
        streams=streams,
        tells_usage=tells_usage,
        prompt_tokens=max(len(pieces), 1),
        max_output_tokens=_most_output(path, body),
        pieces=pieces,
        salt=salt or "",
    )


def _most_output(path: str, body: Mapping[str, Any]) -> int | None:
    """Tokens of all its answers together, None where it names no limit. Raises InputError."""
    names = ("max_completion_tokens", "max_tokens") if path == CHATS else ("max_tokens",)
    most = next((each for name in names if (each := _count(body, name)) is not None), None)
    if most is None and path == COMPLETIONS:
        most = USUAL_MAX_TOKENS
    prompts = body.get("prompt")
    several = len(prompts) if isinstance(prompts, list) and any(isinstance(each, str | list) for each in prompts) else 1
    answers = max(_count(body, "n") or 1, _count(body, "best_of") or 1)
    return None if most is None else most * several * answers


def _count(body: Mapping[str, Any], name: str) -> int | None:
    given = body.get(name)
    if given is not None and (type(given) is not int or not 0 <= given <= MOST_COUNTED):
        raise InputError(f"{name} must be a whole number up to {MOST_COUNTED}, got {str(given)[:64]!r}")
    return given


def _flag(body: Mapping[str, Any], name: str) -> bool:
    """A server may take what is no flag for either."""
    given = body.get(name)
    if given is not None and not isinstance(given, bool):
        raise InputError(f"{name} must be true or false")
    return bool(given)


def _text_of(body: Mapping[str, Any], name: str) -> str | None:
    given = body.get(name)
    if given is not None and not isinstance(given, str):
        raise InputError(f"{name} must be a text")
    return given


def _prompt(path: str, body: Mapping[str, Any]) -> bytes | list[int]:
    """Its text, or its tokens where it has those. Raises InputError: there is none."""
    name = "messages" if path == CHATS else "prompt"
    prompt = body.get(name)
    if not isinstance(prompt, str | list) or not prompt:
        raise InputError(
            f"{name} must be {'a list of messages' if path == CHATS else 'a text, tokens, or a list of them'}"
        )
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    if path == CHATS and not all(isinstance(each, dict) for each in prompt):
        raise InputError("each of messages must be an object")
    if all(type(each) is int for each in prompt):
        return prompt
    of_tools = {"tools": tools} if (tools := body.get("tools")) else {}
    return msgspec.json.encode([of_tools, prompt])


def _question(
    path: str, body: Mapping[str, Any], model: str, context: HttpContext, asked: ServerRequest
) -> Question | None:
    """What a learned predictor may go by; None for a prompt that has no text."""
    text, system_prompt = body.get("prompt"), ""
    if path == CHATS:
        found = asked_in(messages) if isinstance(messages := body["messages"], list) else None
        text, system_prompt = (None, "") if found is None else (found.prompt, found.system_prompt)
    if not isinstance(text, str):
        return None
    return Question(
        prompt=text,
        system_prompt=system_prompt,
        model=model,
        slo_class=context.slo_class,
        key=context.tenant.name if context.tenant else "",
        hinted_tokens=context.expected_tokens,
        max_output_tokens=asked.max_output_tokens,
    )


async def _decoded(content: bytes) -> dict[str, Any]:
    """Raises InputError."""

    def decoded() -> Any:
        try:
            return msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"the body is no JSON: {error}") from error

    body = await asyncio.to_thread(decoded) if len(content) >= IN_A_THREAD_BYTES else decoded()
    if not isinstance(body, dict):
        raise InputError("the body must be a JSON object")
    return body
