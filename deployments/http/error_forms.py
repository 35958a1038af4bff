"""Errors in the form of the API that was asked, whoever made them: vLLM, Starlette, Ray Serve or Sluice."""

import json
import re
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

from deployments.http.errors import error_response

MAX_ERROR_BYTES = 64 << 10  # a longer answer is passed on as it is
_ERRORS = frozenset(status for status in HTTPStatus if status >= HTTPStatus.BAD_REQUEST)  # 499 reaches nobody
_SHOWN_CHARS = 1000  # of a text that is no error of either API
_WHOLE = b'{"error":{'  # how an error in OpenAI's form begins
_ANTHROPICS = re.compile(r"/v1/messages(/|$)")
_ANTHROPIC_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class ErrorForm:
    """One response on its way to its client: an error is held until it is whole, all else passes."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] in _ERRORS and self._scope["method"] != "HEAD":
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            is_long = len(self._body) > MAX_ERROR_BYTES
            if message.get("more_body", False) and not is_long:
                return
            start, self._start = self._start, None
            body = self._body if is_long else self._in_form(start)
            await self._send(start)
            message = {**message, "body": body}
        await self._send(message)

    def _in_form(self, start: Message) -> bytes:
        """The body; the headers are changed with it."""
        is_anthropics = _ANTHROPICS.search(self._scope["path"]) is not None
        if not is_anthropics and self._body.startswith(_WHOLE):
            return self._body
        status = start["status"]
        told = _told(self._body, Headers(raw=start["headers"]))
        if is_anthropics:
            told = _message(told, status, self._scope)
            response = _anthropics(status, told)
        elif isinstance(told, dict) and isinstance(told.get("error"), dict):
            return self._body
        else:
            response = error_response(status, _message(told, status, self._scope))
        headers = MutableHeaders(raw=start["headers"])
        for name in ("content-type", "content-length"):
            headers[name] = response.headers[name]
        start["headers"] = headers.raw
        return bytes(response.body)


def _told(body: bytes, headers: Headers) -> Any:
    """JSON, text, or None for a page of another kind."""
    kind = headers.get("content-type", "text/plain")
    text = body.decode(errors="replace")
    if kind.startswith("application/json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text if kind.startswith("text/plain") else None


def _message(told: Any, status: int, scope: Scope) -> str:
    """What an error says, in whatever form."""
    if isinstance(told, dict):
        inner = told.get("error", told.get("detail"))
        told = inner.get("message") if isinstance(inner, dict) else inner
    phrase = HTTPStatus(status).phrase
    if status == HTTPStatus.REQUEST_TIMEOUT and isinstance(told, str) and "timed out after" in told:  # Ray Serve's
        return "the time of this request is over (X-Request-Timeout-Seconds, or request_timeout_s of Ray Serve)"
    if not told or told == phrase:
        return f"{phrase}: {scope['method']} {scope['path'][:_SHOWN_CHARS]}"
    return told if isinstance(told, str) else json.dumps(told)[:_SHOWN_CHARS]


def _anthropics(status: int, message: str) -> JSONResponse:
    default = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    kind = _ANTHROPIC_TYPES.get(HTTPStatus(status), default)
    return JSONResponse({"type": "error", "error": {"type": kind, "message": message}}, status)
