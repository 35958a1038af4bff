"""In front of Ray Serve's own code: headers that it cannot read get 400, where it would answer 500 in plain text.

Ray Serve (2.60) decodes the headers named here as UTF-8 before it calls the application. A replica's HTTP server wraps
itself into what `middlewares` returns, by the variable CALLBACK_ENV in its environment.
"""

from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.errors import bad_request

CALLBACK_ENV = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
MAX_HEADER_BYTES = 16_384  # HAProxy passes on twice as much, and answers longer ones with a page of its own
BETWEEN_HEADERS = len(b": \r\n")


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


def middlewares() -> list[Middleware]:
    return [Middleware(HeaderCheck)]


class HeaderCheck:
    """Outside of everything else that a router does with a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and (why := _fault(scope["headers"])) is not None:
            answer = bad_request(why).response()
        await answer(scope, receive, send)


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
    return None
