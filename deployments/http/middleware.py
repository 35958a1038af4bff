"""What Sluice adds around vLLM's HTTP application: keys, limits, classes, timing and the log of requests.

`Server-Timing` splits a response's time so far, in milliseconds: `queue` is the wait for a replica's slot, `engine` the
time from slot to the latest token, network included, `framework` the rest: parsing, tokenizing, formatting. A streamed
response carries the times up to its first chunk.

The request id is Ray Serve's work: it takes `X-Request-Id` from the client or makes one, and echoes it; vLLM builds its
own ids on it, so it stands in every log line and ticket.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from inspect import isawaitable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.http.bodies import RETRY_AFTER_S, BodyError, ClientLeftError, RequestBodies, replay
from deployments.http.keys import KeyRing
from deployments.http.page import PAGE_PATHS
from deployments.http.promises import CLASS_HEADER, PromiseError, Promises, asked_for
from deployments.http.traces import HttpTrace, HttpTraces, client_trace_id
from policies.errors import AdmissionError, InputError, SluiceError
from router.admission import Tenant
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

Charge = Callable[[Tenant | None, float], Awaitable[None]]

REQUEST_ID_HEADER = "X-Request-Id"
EXPECTED_HEADER = "X-Sluice-Expected-Tokens"
MAX_EXPECTED_TOKENS = 10_000_000
MAX_DIGITS = 18
MAX_REQUEST_ID_CHARS = 128
UNLOGGED_PATHS = ("/health", "/metrics", "/metrics/")
UNTRACED_PATHS = (*UNLOGGED_PATHS, "/sluice/status")  # a page that is open asks for it every few seconds
OPEN_PATHS = UNLOGGED_PATHS  # for probes and scrapers, which have no key
READING_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
BYTES_PER_TOKEN = 4.0  # of a body that is only tokenized: what is charged for it, before that is done
LEAVE_S = 5.0  # for whoever listens to see that its client has left
MAX_ERROR_BYTES = 2048  # of a response that is one, in the log
HELD_PIECES = 8  # of a stream's body: vLLM sends two before it asks the engine
STREAMED_PATHS = frozenset({"/v1/files"})  # uploads, whose bodies the application reads and bounds itself
TENANT = "sluice.tenant"  # in the scope of a request that this process makes itself: in whose name
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # what they bring all the same is not read
_CHUNK = b'data: {"'  # how one of a stream begins
_NO_TIER = b'"service_tier":null'  # what vLLM has in a whole answer
CLIENT_LEFT = 499  # what proxies log for a client that hung up before the response began


def route_path(scope: Scope) -> str:
    """The path without the `route_prefix` under which Ray Serve has the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_open(scope: Scope) -> bool:
    """It needs no key: the page holds nothing before it has asked its reader for one."""
    path = route_path(scope)
    return path in OPEN_PATHS or (path in PAGE_PATHS and scope["method"] in ("GET", "HEAD"))


def error_response(status: int, message: str, kind: str, param: str | None = None) -> JSONResponse:
    """In the shape of OpenAI's errors; `param` is the field that is wrong."""
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def status_of(error: SluiceError) -> tuple[HTTPStatus, str]:
    """Of a request that may not queue, or waited in vain: the status, and its type in OpenAI's errors."""
    if isinstance(error, AdmissionError):
        return HTTPStatus.TOO_MANY_REQUESTS, "TooManyRequests"
    if isinstance(error, InputError):
        return HTTPStatus.BAD_REQUEST, "BadRequest"
    return HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable"


def _only_reads(path: str) -> bool:
    """It tokenizes what it is sent, and asks no engine: other requests are charged when they are queued."""
    return path in READING_PATHS or path.endswith(("/render", "/derender"))


def _number(text: str) -> float | None:
    """A header's whole number; infinite beyond MAX_DIGITS, because `int` refuses thousands of digits."""
    if not text.isdecimal():
        return None
    return int(text) if len(text) <= MAX_DIGITS else math.inf


def log_causes(app: Starlette) -> None:
    """Of an application that has just been built: an exception that it answers with a server error reaches the log.
    vLLM (0.32) says of most no more than the client gets, which may be nothing."""
    for kind, handler in list(app.exception_handlers.items()):
        app.exception_handlers[kind] = _with_cause_logged(handler)
    app.middleware_stack = None  # building vLLM's makes it, with the handlers of then


def _with_cause_logged(handler: Callable[[Request, Exception], Any]) -> Callable[[Request, Exception], Any]:
    async def handle(request: Request, error: Exception) -> Any:
        response = handler(request, error)
        if isawaitable(response):
            response = await response
        if response is None or response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logger.error("%s failed", request.scope["path"], exc_info=error)
        return response

    return handle


class SluiceMiddleware:
    """Wraps the whole application, as plain ASGI: it must cost next to nothing on every chunk of a stream.

    Attributes:
        promises: what requests from now on are promised.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        bodies: RequestBodies,
        promises: Promises,
        keys: KeyRing,
        charge: Charge,
        traces: HttpTraces | None = None,
    ) -> None:
        """Args:
        charge: takes tokens out of a key's allowance, or raises AdmissionError.
        traces: None makes none.
        """
        self._app, self._bodies, self._keys, self._charge = app, bodies, keys, charge
        self.promises, self._traces = promises, traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: it would not be asked for a key
            await WebSocketClose()(scope, receive, send)
            return
        received_s, headers = time.monotonic(), Headers(scope=scope)
        tenant = scope[TENANT] if TENANT in scope else self._tenant(headers)
        request_id = headers.get(REQUEST_ID_HEADER, "")
        context = HttpContext(received_s, headers.get(CLASS_HEADER, ""), tenant, request_id=request_id)
        context.max_engine_requests = self._bodies.limits.max_engine_requests
        context.trace = trace = self._trace(scope, headers, received_s)
        context.trace_id = client_trace_id(headers) if trace is None else trace.trace_id
        current.set(context)
        exchange = _Exchange(send, context)
        has_body = scope["method"] not in WITHOUT_BODY and route_path(scope) not in STREAMED_PATHS
        refusal = self._unknown(scope, tenant) or self._refusal(headers, context, has_body=has_body)
        try:
            if refusal is not None or not has_body:
                await _until_it_is_over(refusal or self._app, scope, receive, exchange)
            else:
                async with self._bodies.reading(receive) as body:
                    self._promise(headers, context, body.service_tier)
                    if _only_reads(route_path(scope)):
                        await self._charge(tenant, len(body.content) / BYTES_PER_TOKEN)
                    await _until_it_is_over(self._app, scope, replay(body.content, receive), exchange)
        except BodyError as error:
            await _refused_body(error)(scope, receive, exchange.send)
        except PromiseError as error:
            await _refused_promise(error)(scope, receive, exchange.send)
        except ClientLeftError:
            pass  # no client is left to be told; it is logged as that
        except AdmissionError as error:
            await exchange.refuse(error)
        except Exception:
            if not await exchange.broke_off():
                raise
        finally:
            if route_path(scope) not in UNLOGGED_PATHS:
                _log(scope, exchange)
            if trace is not None:
                trace.end(context, exchange.status or CLIENT_LEFT, time.monotonic())

    def _trace(self, scope: Scope, headers: Headers, received_s: float) -> HttpTrace | None:
        """None where it is not traced."""
        path = route_path(scope)
        if self._traces is None or path in UNTRACED_PATHS:
            return None
        return self._traces.begin(scope, path, headers, received_s)

    def _tenant(self, headers: Headers) -> Tenant | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._keys.find(key.strip()) if scheme.lower() == "bearer" else None

    def _unknown(self, scope: Scope, tenant: Tenant | None) -> Response | None:
        if tenant is not None or not self._keys.required or _is_open(scope):
            return None
        response = error_response(401, "this address needs an API key: Authorization: Bearer KEY", "Unauthorized")
        response.headers["WWW-Authenticate"] = "Bearer"
        return response

    def _refusal(self, headers: Headers, context: HttpContext, *, has_body: bool) -> Response | None:
        if has_body and self._bodies.is_too_large(_number(headers.get("content-length", "")) or 0):
            return _refused_body(self._bodies.too_large)
        if len(headers.get(REQUEST_ID_HEADER, "")) > MAX_REQUEST_ID_CHARS:
            return error_response(400, f"{REQUEST_ID_HEADER} exceeds {MAX_REQUEST_ID_CHARS} characters", "BadRequest")
        try:
            if has_body and CLASS_HEADER not in headers:  # the body may name a class by its tier
                asked_for(headers)
            else:
                self._promise(headers, context)
        except PromiseError as error:
            return _refused_promise(error)
        expected = headers.get(EXPECTED_HEADER)
        if expected is not None:
            tokens = _number(expected) or 0
            if not 0 < tokens <= MAX_EXPECTED_TOKENS:
                return error_response(400, f"{EXPECTED_HEADER} must be a number of tokens", "BadRequest")
            context.expected_tokens = int(tokens)
        return None

    def _promise(self, headers: Headers, context: HttpContext, tier: object = None) -> None:
        """Where no keys are configured nothing tells one client from another, and each may ask for what it likes.

        Raises:
            PromiseError: what it asks for is malformed, or not for its key.
        """
        may_tighten = not self._keys.required or (context.tenant is not None and context.tenant.may_tighten)
        promised = self.promises.of(headers, context.tenant, tier, may_tighten=may_tighten)
        context.slo_class, context.promise = promised.slo_class, promised.promise
        context.service_tier = promised.service_tier


def _refused_body(error: BodyError) -> Response:
    """What is left of it is read and thrown away, so that its client reads why; not of a body that is late."""
    response = error_response(error.status.value, str(error), error.status.phrase.replace(" ", ""))
    if error.status is HTTPStatus.REQUEST_TIMEOUT:
        response.headers["Connection"] = "close"
    if error.status is HTTPStatus.SERVICE_UNAVAILABLE:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _refused_promise(error: PromiseError) -> Response:
    return error_response(error.status.value, str(error), error.status.phrase.replace(" ", ""))


class _Incoming:
    """What an application receives. Once the exchange is over that its client has left, also where it waits already."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._waits, self._is_over = receive, set[asyncio.Timeout](), False

    async def receive(self) -> Message:
        if not self._is_over:
            try:
                async with asyncio.timeout(None) as wait:
                    self._waits.add(wait)
                    try:
                        return await self._receive()
                    finally:
                        self._waits.discard(wait)
            except TimeoutError:
                if not self._is_over:  # not ours
                    raise
        return {"type": "http.disconnect"}

    def end(self) -> None:
        self._is_over = True
        for wait in self._waits:
            wait.reschedule(-math.inf)


async def _until_it_is_over(app: ASGIApp, scope: Scope, receive: Receive, exchange: "_Exchange") -> None:
    """Ray Serve says by the message that a client has left, and by cancelling us that this or a time limit ends it.

    vLLM runs its handlers in tasks of their own, which end by the message and which a cancellation would not reach: so
    we say it too, and end what the engines do for it ourselves. The application has the time to hear of it, and only
    what does not listen is cancelled.
    """
    incoming = _Incoming(receive)
    serving = asyncio.ensure_future(app(scope, incoming.receive, exchange.send))
    try:
        await asyncio.shield(serving)
    finally:
        incoming.end()
        try:
            await exchange.end()
            if not serving.done():
                await asyncio.wait([serving], timeout=LEAVE_S)
        finally:
            serving.cancel()


class _Exchange:
    """One response on its way out: holds its start back until the first piece of body, of a stream until a request of
    it is queued, then adds our headers.

    So a request that was refused a place in the queue is answered as that, with its status, also where vLLM has begun a
    stream for it already.
    """

    def __init__(self, send: Send, context: HttpContext) -> None:
        self._send = send
        self._start: Message | None = None
        self._held: list[Message] = []
        self._is_over = False
        self.context, self.status = context, 0
        self.error: str | None = None

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self.context.service_tier is not None:
            message = self._with_tier(message, self.context.service_tier.encode())
        if self._start is not None:
            if (refusal := self.context.refusal) is not None:
                await self.refuse(refusal)
                return
            if self._may_be_refused(self._start, message):
                self._held.append(message)
                return
            await self._begin(self._start)
            self.error = _error_in(self.status, message)
        await self._send(message)

    def _with_tier(self, message: Message, tier: bytes) -> Message:
        """Every chunk of a stream, and a whole answer, in which vLLM leaves the field empty. What a model says cannot
        look like either: in a JSON string each quotation mark has a backslash before it."""
        body: bytes = message.get("body", b"")
        if body.startswith(_CHUNK):
            return {**message, "body": _CHUNK[:-1] + b'"service_tier":"' + tier + b'",' + body[len(_CHUNK) - 1 :]}
        start = self._start
        if start is None or message.get("more_body", False) or _NO_TIER not in body:
            return message
        body = body.replace(_NO_TIER, b'"service_tier":"' + tier + b'"', 1)
        MutableHeaders(scope=start)["Content-Length"] = str(len(body))
        return {**message, "body": body}

    async def end(self) -> None:
        """Nothing more goes out, and no engine works for it any longer."""
        self._is_over = True
        await self.context.end()

    async def broke_off(self) -> bool:
        """The application has failed. True when its client got a refusal for that; else it got what was held."""
        if self._start is None:
            return False
        if (refusal := self.context.refusal) is None:
            if self._held:
                await self._begin(self._start)
            return False
        await self.refuse(refusal)
        return True

    def _may_be_refused(self, start: Message, message: Message) -> bool:
        """It is of a stream, and not its end, that no engine request stands behind yet."""
        if self.context.queued or len(self._held) == HELD_PIECES or not message.get("more_body", False):
            return False
        return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")

    async def _begin(self, start: Message) -> None:
        self._start, self.status = None, start["status"]
        MutableHeaders(scope=start)["Server-Timing"] = self.server_timing()
        await self._send(start)
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def refuse(self, refused: SluiceError) -> None:
        status, kind = status_of(refused)
        response = error_response(status.value, str(refused), kind)
        if isinstance(refused, AdmissionError):
            response.headers["Retry-After"] = str(max(1, math.ceil(refused.retry_after_s)))
        self._start, self._is_over, self.status, self.error = None, True, response.status_code, str(refused)
        headers = response.raw_headers
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body})

    def server_timing(self) -> str:
        return ", ".join(f"{name};dur={seconds * 1e3:.2f}" for name, seconds in split_time(self.context).items())


def _error_in(status: int, message: Message) -> str | None:
    """What a response that is an error says of itself, in OpenAI's shape or another."""
    if status < HTTPStatus.BAD_REQUEST:
        return None
    text: str = message.get("body", b"")[:MAX_ERROR_BYTES].decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):  # another shape, or longer
        return str(json.loads(text)["error"]["message"])
    return text


def split_time(context: HttpContext) -> dict[str, float]:
    """Seconds so far: queue, engine, framework; they add up to the time since the request came in."""
    total_s = time.monotonic() - context.received_s
    submitted_s = min((t.submitted_s for t in context.timings), default=None)
    assigned_s = min((t.assigned_s for t in context.timings if t.assigned_s is not None), default=None)
    last_s = max((t.last_token_s for t in context.timings if t.last_token_s is not None), default=None)
    queue_s = assigned_s - submitted_s if assigned_s is not None and submitted_s is not None else 0.0
    engine_s = last_s - assigned_s if last_s is not None and assigned_s is not None else 0.0
    return {"queue": queue_s, "engine": engine_s, "framework": total_s - queue_s - engine_s}


def _log(scope: Scope, exchange: _Exchange) -> None:
    """The ids are added to every line of a request. Of several answers the times are those of the first."""
    context = exchange.context
    times = split_time(context)
    ended = [timing.ended for timing in context.timings if timing.ended is not None]
    logger.info(
        "request",
        extra={
            "request_id": context.request_id,
            "method": scope["method"],
            "path": scope["path"],
            "status": exchange.status or CLIENT_LEFT,
            "slo_class": context.slo_class,
            "tenant": context.tenant.name if context.tenant else None,
            "model": context.model or None,
            "prompt_tokens": _total(ended, "prompt_tokens"),
            "predicted_tokens": _total(ended, "predicted_tokens"),
            "output_tokens": sum(timing.output_tokens for timing in context.timings),
            "outcomes": [timing.outcome for timing in context.timings],
            "replicas": [each["replica"] for each in ended if each["replica"] is not None],
            "moves": _total(ended, "moves"),
            "resumed": _total(ended, "resumed"),
            "error": exchange.error,
            "wait_s": _least(ended, "wait_s"),
            "ttft_s": _least(ended, "ttft_s"),
            "duration_s": round(sum(times.values()), 5),
            **{f"{name}_s": round(seconds, 5) for name, seconds in times.items()},
        },
    )


def _known(ended: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name] for each in ended if each[name] is not None]


def _total(ended: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """None where no answer was queued, or it is known of none."""
    return sum(known) if (known := _known(ended, name)) else None


def _least(ended: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return min(_known(ended, name), default=None)
