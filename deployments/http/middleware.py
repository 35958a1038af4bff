"""What Sluice adds around vLLM's HTTP application: keys, limits, classes, timing and the log of requests.

The request id is Ray Serve's work: it takes `X-Request-Id` from the client or makes one, and echoes it; vLLM builds its
own ids on it, so it stands in every log line and ticket.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from inspect import isawaitable
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from deployments.http.bodies import Body, ClientLeftError, RequestBodies
from deployments.http.direct_streams import stream_kind
from deployments.http.errors import HttpError, bad_request
from deployments.http.exchange import Exchange
from deployments.http.in_order import InOrder
from deployments.http.in_process import replayed
from deployments.http.keys import KeyRing
from deployments.http.page import PAGE_PATHS
from deployments.http.promises import CLASS_HEADER, Promises, asked_for, task_s
from deployments.http.sessions import session_of
from deployments.http.traces import HttpTrace, HttpTraces, client_trace_id
from policies.errors import AdmissionError
from policies.live import Live
from router.admission import Tenant
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

Charge = Callable[[Tenant | None, float], Awaitable[None]]

REQUEST_ID_HEADER = "X-Request-Id"
EXPECTED_HEADER = "X-Sluice-Expected-Tokens"
MAX_EXPECTED_TOKENS = 10_000_000  # ten times the longest contexts that models have
MAX_REQUEST_ID_CHARS = 128  # an id stands in every log line and ticket
UNLOGGED_PATHS = ("/health", "/metrics", "/metrics/")
UNTRACED_PATHS = (*UNLOGGED_PATHS, "/sluice/status")  # a page that is open asks for it every few seconds
OPEN_PATHS = UNLOGGED_PATHS  # for probes and scrapers, which have no key
READING_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
STREAMED_PATHS = frozenset({"/v1/files"})  # uploads, whose bodies the application reads and bounds itself
TENANT = "sluice.tenant"  # in the scope of a request that this process makes itself: in whose name
WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})  # a body that one brings all the same is not read


def route_path(scope: Scope) -> str:
    """The path without the `route_prefix` under which Ray Serve has the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def asking_tenant() -> Tenant | None:
    """The API key of the request that the calling task serves."""
    context = current.get()
    return context.tenant if context is not None else None


def _is_open(scope: Scope) -> bool:
    """Whether the path needs no key: the page holds nothing before it has asked its reader for one."""
    path = route_path(scope)
    return path in OPEN_PATHS or (path in PAGE_PATHS and scope["method"] in ("GET", "HEAD"))


def only_reads(path: str) -> bool:
    """Whether the route tokenizes its body and asks no engine: other requests are charged when they are queued."""
    return path in READING_PATHS or path.endswith(("/render", "/derender"))


def _number(text: str) -> float:
    """A header's whole number of any length, infinite beyond what a float can hold; 0 for anything else."""
    return float(text) if text.isdecimal() else 0.0


def log_causes(app: Starlette) -> None:
    """Let an application that has just been built log each exception that it answers with a server error. vLLM (0.32)
    logs of most no more than the client gets, which may be nothing."""
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
    """Wraps the whole application, as plain ASGI: it must cost next to nothing on every chunk of a stream."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        bodies: RequestBodies,
        promises: Live[Promises],
        keys: KeyRing,
        charge: Charge,
        traces: HttpTraces | None = None,
    ) -> None:
        """Args:
        charge: takes tokens out of a key's allowance, or raises AdmissionError.
        traces: None makes none.
        """
        self._app, self._bodies, self._keys, self._charge = app, bodies, keys, charge
        self._promises, self._traces, self._in_order = promises, traces, InOrder()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:  # a WebSocket: it would not be asked for a key
            await WebSocketClose()(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), route_path(scope)
        context = self._context(scope, headers)
        context.trace = trace = self._trace(scope, path, headers, context.received_s)
        context.trace_id = client_trace_id(headers) if trace is None else trace.trace_id
        current.set(context)
        exchange = Exchange(send, context)
        try:
            await self._answer(scope, receive, headers, exchange)
        except HttpError as error:
            await error.response()(scope, receive, exchange.send)
        except ClientLeftError:
            pass  # no client is left to be told; the log says so
        except AdmissionError as error:
            await exchange.refuse(error)
        except Exception as error:
            if not await exchange.broke_off(error):
                raise
        finally:
            for told in context.when_over:
                told(exchange.status)
            if path not in UNLOGGED_PATHS:
                exchange.log(scope)
            if trace is not None:
                trace.end(context, exchange.status, time.monotonic())

    async def _answer(self, scope: Scope, receive: Receive, headers: Headers, exchange: Exchange) -> None:
        """Raises HttpError, AdmissionError: it is refused."""
        context, path = exchange.context, route_path(scope)
        has_body = scope["method"] not in WITHOUT_BODY and path not in STREAMED_PATHS
        self._check(scope, headers, context, has_body=has_body)
        if not has_body:
            await exchange.serve(self._app, scope, receive)
            return
        async with self._bodies.reading(receive) as body:
            self._promise(headers, context, body)
            self._find_session(headers, context, body)
            exchange.stream_directly(stream_kind(path, body.fields))
            if only_reads(path):
                await self._charge(context.tenant, len(body.content) / 4)  # before its tokens are known
            await self._serve_in_order(exchange, scope, replayed(body.content, receive))

    async def _serve_in_order(self, exchange: Exchange, scope: Scope, receive: Receive) -> None:
        place = await self._in_order.begin()
        exchange.context.on_queued = place.end
        try:
            await exchange.serve(self._app, scope, receive)
        finally:
            place.end()

    def _context(self, scope: Scope, headers: Headers) -> HttpContext:
        tenant = scope[TENANT] if TENANT in scope else self._tenant(headers)
        request_id = headers.get(REQUEST_ID_HEADER, "")
        context = HttpContext(time.monotonic(), headers.get(CLASS_HEADER, ""), tenant, request_id=request_id)
        context.max_engine_requests = self._bodies.limits.max_engine_requests
        return context

    def _trace(self, scope: Scope, path: str, headers: Headers, received_s: float) -> HttpTrace | None:
        if self._traces is None or path in UNTRACED_PATHS:
            return None
        return self._traces.begin(scope, path, headers, received_s)

    def _tenant(self, headers: Headers) -> Tenant | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return self._keys.find(key.strip()) if scheme.lower() == "bearer" else None

    def _check(self, scope: Scope, headers: Headers, context: HttpContext, *, has_body: bool) -> None:
        """Refuse what can be refused before the body is read. Raises HttpError."""
        if context.tenant is None and self._keys.required and not _is_open(scope):
            why = "this address needs an API key: Authorization: Bearer KEY"
            raise HttpError(HTTPStatus.UNAUTHORIZED, why, {"WWW-Authenticate": "Bearer"})
        if has_body and self._bodies.is_too_large(_number(headers.get("content-length", ""))):
            raise self._bodies.too_large
        if len(context.request_id) > MAX_REQUEST_ID_CHARS:
            raise bad_request(f"{REQUEST_ID_HEADER} exceeds {MAX_REQUEST_ID_CHARS} characters")
        if has_body and CLASS_HEADER not in headers:  # the body may name a class by its tier
            asked_for(headers)
        else:
            self._promise(headers, context)
        if (expected := headers.get(EXPECTED_HEADER)) is not None:
            if not 0 < (tokens := _number(expected)) <= MAX_EXPECTED_TOKENS:
                raise bad_request(f"{EXPECTED_HEADER} must be a number of tokens")
            context.expected_tokens = int(tokens)

    def _promise(self, headers: Headers, context: HttpContext, body: Body | None = None) -> None:
        """Raises HttpError: what it asks for is malformed, or not for its key."""
        may_tighten = self._may_tighten(context)
        tier, in_one_piece = (None, False) if body is None else (body.service_tier, body.in_one_piece)
        promised = self._promises.now.of(
            headers, context.tenant, tier, may_tighten=may_tighten, in_one_piece=in_one_piece
        )
        context.slo_class, context.promise = promised.slo_class, promised.promise
        context.service_tier = promised.service_tier

    def _find_session(self, headers: Headers, context: HttpContext, body: Body) -> None:
        """Raises HttpError: it is misnamed, or the deadline of its task is malformed or not for its key."""
        session = session_of(headers, body.session, context.tenant)
        context.task_s = task_s(headers, session, may_tighten=self._may_tighten(context))
        context.session = None if "answers" in body.fields else session  # several answers at once are no turn
        context.drawn_by = session or context.request_id

    def _may_tighten(self, context: HttpContext) -> bool:
        """Without configured keys nothing tells one client from another, and each may ask for any targets."""
        return not self._keys.required or (context.tenant is not None and context.tenant.may_tighten)
