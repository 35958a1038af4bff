"""OpenAI's routes of stored responses, in front of vLLM's application: any router answers for all of them."""

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.bodies import IN_A_THREAD_BYTES
from deployments.http.errors import error_response
from deployments.http.middleware import asking_tenant
from deployments.http.own_routes import in_front_of
from deployments.responses.store import Place, ResponseStore, Stored
from policies.errors import StateStoreError

_OURS = re.compile(r"(GET|DELETE) /v1/responses/[^/]+|POST /v1/responses/[^/]+/cancel")
_BAD = "invalid_request_error"


class ResponsesApi:
    """Retrieves, cancels and deletes responses. Those of another key, and unknown ones, are 404."""

    def __init__(self, app: ASGIApp, store: ResponseStore | None) -> None:
        """Args:
        store: None where nothing is stored.
        """
        self._store = store
        routes = Router(
            [
                _route("/v1/responses/{id}", "GET", self._show),
                _route("/v1/responses/{id}", "DELETE", self._delete),
                _route("/v1/responses/{id}/cancel", "POST", self._cancel),
            ],
            redirect_slashes=False,
        )
        self._served = in_front_of(app, _OURS, routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._served(scope, receive, send)

    async def _show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            why = "stream: a stored response is not streamed, ask for it until it has ended"
            return error_response(400, why, _BAD, "stream")
        return await _answer(request, await self._found(request, ResponseStore.get))

    async def _delete(self, request: Request) -> Response:
        if not await self._found(request, ResponseStore.delete):
            return _not_found(request)
        return JSONResponse({"id": request.path_params["id"], "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        stored = await self._found(request, ResponseStore.cancel)
        if stored is not None and not stored.is_background:
            why = "only a response that was made with `background: true` can be cancelled"
            return error_response(400, why, _BAD, "response_id")
        return await _answer(request, stored)

    async def _found(self, request: Request, call: Callable[[ResponseStore, Place], Awaitable[Any]]) -> Any:
        """The result of a call of the store; None without one."""
        if self._store is None:
            return None
        tenant = asking_tenant()
        return await call(self._store, Place.of_key(tenant.name if tenant else None, request.path_params["id"]))


async def model_of(store: ResponseStore | None, response_id: str) -> str | None:
    """The model that made a response of the asking key; None where it is not known: it is not stored, or Redis is away,
    of which the request that asks hears by itself."""
    if store is None:
        return None
    tenant = asking_tenant()
    with contextlib.suppress(StateStoreError):
        stored = await store.get(Place.of_key(tenant.name if tenant else None, response_id))
        if stored is not None:
            large = len(stored.response) >= IN_A_THREAD_BYTES
            return await asyncio.to_thread(_made_by, stored.response) if large else _made_by(stored.response)
    return None


def _made_by(response: bytes) -> str | None:
    made_by = json.loads(response).get("model")
    return made_by if isinstance(made_by, str) else None


async def _answer(request: Request, stored: Stored | None) -> Response:
    if stored is None:
        return _not_found(request)
    large = len(stored.response) >= IN_A_THREAD_BYTES and stored.status != "ended"
    body = await asyncio.to_thread(as_openai, stored) if large else as_openai(stored)
    return Response(body, media_type="application/json")


def as_openai(stored: Stored) -> bytes:
    """JSON of the response as it is now."""
    if stored.status == "ended":
        return stored.response
    response = json.loads(stored.response)
    response["status"] = stored.status
    if stored.status == "failed":
        response["error"] = {"code": "server_error", "message": stored.error}
    return json.dumps(response).encode()


def _not_found(request: Request) -> Response:
    why = f"Response with id {request.path_params['id'][:128]!r} not found: none was stored, or it has expired."
    return error_response(404, why, _BAD, "response_id")


def _route(path: str, method: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except StateStoreError as error:
            return error_response(503, f"stored responses cannot be reached now: {error}")

    return Route(path, endpoint, methods=[method])
