"""Several models behind one address: each request goes to the front end of the model that it names.

The name stands in the body, so the body is read before it is passed on. With one model none of this is in the way.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.bodies import IN_A_THREAD_BYTES
from deployments.http.in_process import Reply, after, ask, replayed
from deployments.http.middleware import route_path
from deployments.http.versions import Versions

logger = logging.getLogger(__name__)
MODELS_PATH = "/v1/models"
NO_VERSIONS: Mapping[str, Versions] = MappingProxyType({})
_OF_THE_BODY = (b"content-length", b"content-type")


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


class ModelSwitch:
    """`apps` by every name that clients may use, of models and of their adapters. A request without a known name goes
    to the first, which answers for itself: vLLM takes a missing name for its own model and answers 404 to another."""

    def __init__(self, apps: Mapping[str, ASGIApp], versions: Mapping[str, Versions] = NO_VERSIONS) -> None:
        """Args:
        versions: of the models that have candidates, by name.
        """
        self._versions = versions
        self._by_name, self._apps = apps, list(dict.fromkeys(apps.values()))
        self._names = [next(name for name in apps if apps[name] is app) for app in self._apps]
        self._first = self._apps[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._first(scope, receive, send)
        elif scope["method"] == "GET" and route_path(scope) == MODELS_PATH:
            await (await self._models(scope))(scope, receive, send)
        elif scope["method"] == "GET" and route_path(scope) == "/health":
            await (await self._health(scope))(scope, receive, send)
        elif scope["method"] != "POST":
            await self._first(scope, receive, send)
        else:
            body, more = await _read(receive)
            name = await named_in(body) or ""
            if (versions := self._versions.get(name)) is not None:
                await versions(scope, body, more, send)
            else:
                await self._by_name.get(name, self._first)(scope, replayed(body, more), send)

    async def _models(self, scope: Scope) -> Response:
        """Every model's own entry, but for those that answer with an error, under the headers of the first that does
        not: they say which pages of other sites may read the list. Where all fail, the first one's answer."""
        replies = await asyncio.gather(*(ask(app, scope) for app in self._apps))
        for name, reply in zip(self._names, replies, strict=True):
            if reply.status != HTTPStatus.OK:
                logger.error("%s is missing in %s: its front end answered %d", name, MODELS_PATH, reply.status)
        listed = [reply for reply in replies if reply.status == HTTPStatus.OK]
        if not listed:
            return _passed_on(replies[0])
        data = [model for reply in listed for model in json.loads(reply.body)["data"]]
        response = JSONResponse({"object": "list", "data": data})
        response.raw_headers += [(name, value) for name, value in listed[0].headers if name not in _OF_THE_BODY]
        return response

    async def _health(self, scope: Scope) -> Response:
        """200 when every model's is."""
        replies = await asyncio.gather(*(ask(app, scope) for app in self._apps))
        return Response(status_code=max(reply.status for reply in replies))


async def named_in(body: bytes) -> str | None:
    """The model that it names; in a thread where reading it takes longer than one takes to start."""
    return _name(body) if len(body) < IN_A_THREAD_BYTES else await asyncio.to_thread(_name, body)


def _name(body: bytes) -> str | None:
    try:
        return _named.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _name_by_python(body)


def _name_by_python(body: bytes) -> str | None:
    """vLLM reads bodies as Python does, which allows NaN, half of a surrogate pair, and a byte order mark."""
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None  # the application that gets it says what is wrong
    name = read.get("model") if isinstance(read, dict) else None
    return name if isinstance(name, str) else None


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, whose size the middleware has bounded."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts), after(message, receive)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts), receive


def _passed_on(reply: Reply) -> Response:
    response = Response(reply.body, reply.status)
    response.raw_headers = reply.headers
    return response
