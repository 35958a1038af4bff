"""In front of Ray Serve's own code: headers that it misreads, and errors of its own in the form of the API.

Ray Serve (2.60) decodes the headers named here as UTF-8 before it calls the application, and answers what it cannot
decode with 500 in plain text. It takes a time that is no number, or not above 0, for no limit at all, the operator's
included. A replica's HTTP server wraps itself into what `middlewares` returns, by the variable CALLBACK_ENV in its
environment.
"""

import re

from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.error_forms import ErrorForm
from deployments.http.errors import bad_request

CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MAX_HEADER_BYTES = 16_384  # HAProxy passes on twice as much, and answers longer ones with a page of its own
BETWEEN_HEADERS = len(b": \r\n")
TIMEOUT_HEADER = "X-Request-Timeout-Seconds"
_SECONDS = re.compile(rb"\d{1,8}(\.\d{1,6})?")
_MAX_TIMEOUT_S = 86_400  # a day
_SHOWN_BYTES = 64  # of a refused value, in the message


def _without_hyphens(name: str) -> bytes:
    """Ray Serve takes hyphens and underscores for the same in two of the names."""
    return name.lower().replace("-", "_").encode()


READ_BY_RAY = frozenset(
    map(
        _without_hyphens,
        (
            SERVE_HTTP_REQUEST_ID_HEADER,
            SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
            SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
            SERVE_SESSION_ID,
            SERVE_MULTIPLEXED_MODEL_ID,
            "traceparent",
            "tracestate",
        ),
    )
)
_STAYS, _TIMEOUT = SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER.encode(), SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER.encode()


def middlewares() -> list[Middleware]:
    return [Middleware(HeaderCheck)]


class HeaderCheck:
    """Outside of everything else that a router does with a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, send = self._app, ErrorForm(scope, send).send
        if (why := _fault(scope["headers"])) is not None:
            answer = bad_request(why).response()
        await answer({**scope, "headers": _passed_on(scope["headers"])}, receive, send)


def _passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without the one by which Ray Serve would not look whether the client has left."""
    return [header for header in headers if header[0] != _STAYS]


def _fault(headers: list[tuple[bytes, bytes]]) -> str | None:
    size = sum(len(name) + len(value) + BETWEEN_HEADERS for name, value in headers)
    if size > MAX_HEADER_BYTES:
        return f"the headers have {size} bytes, more than {MAX_HEADER_BYTES}"
    for name, value in headers:
        if name.replace(b"-", b"_") in READ_BY_RAY:
            try:
                value.decode()
            except UnicodeDecodeError:
                return f"{name.decode()} is not UTF-8"
        if name == _TIMEOUT and (why := _wrong_time(value)) is not None:
            return why
    return None


def _wrong_time(value: bytes) -> str | None:
    if _SECONDS.fullmatch(value) and 0 < float(value) <= _MAX_TIMEOUT_S:
        return None
    shown = value[:_SHOWN_BYTES].decode(errors="replace")
    return f"{TIMEOUT_HEADER} must be seconds, above 0 and at most {_MAX_TIMEOUT_S}, got {shown!r}"
