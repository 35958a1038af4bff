"""A router's own pages: metrics, status, and what stands in the place of routes of vLLM's that do not fit."""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deployments.batches.http import asking_owner
from deployments.http.errors import error_response
from deployments.http.page import PAGE_PATHS, page
from deployments.responses.metrics import exposition
from deployments.responses.store import ResponseStore
from deployments.serving.batch_runner import RemoteRunner
from deployments.serving.candidates import Candidates
from deployments.serving.front_end import FrontEnd
from deployments.serving.shared_call import SharedCall
from deployments.serving.user_config import UserConfig
from policies.errors import StateStoreError
from router.clock import MonotonicClock
from router.exposition import merge

METRICS_FRESH_S = 1.0  # the page takes some ms of the loop that sends tokens, and needs no key
# vLLM's own /metrics shows one process alone, with all paths below. /invocations tries a body as every kind of request,
# in turn: what no kind takes would be refused at the price of all.
LEFT_OUT = ("/metrics", "/invocations")
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Pages:
    """Those of one router."""

    def __init__(
        self,
        front_ends: Sequence[FrontEnd],
        user_config: UserConfig,
        candidates: Candidates,
        batches: RemoteRunner | None,
        responses: ResponseStore | None,
    ) -> None:
        """Args:
        batches, responses: None where there are none.
        """
        self._front_ends, self._user_config, self._candidates = front_ends, user_config, candidates
        self._batches, self._responses = batches, responses
        self._exposition = SharedCall(self._merged, METRICS_FRESH_S, MonotonicClock())

    def put_into(self, app: FastAPI) -> None:
        """Ours come first in the list."""
        kept = [route for route in app.router.routes if getattr(route, "path", None) not in LEFT_OUT]
        app.router.routes[:] = [
            Route("/metrics", self.metrics),
            Route("/metrics/", self.metrics),
            Route("/sluice/status", self.status),
            Route("/sluice/unkept", self.unkept),
            *(Route(path, page) for path in PAGE_PATHS),
            Route("/scale_elastic_ep", _no_scaling, methods=["POST"]),
            *([Route("/docs", _docs_page)] if app.openapi_url else []),
            *kept,
        ]

    async def metrics(self, request: Request) -> Response:
        return Response(await self._exposition.get(), media_type=PROMETHEUS_TEXT)

    async def _merged(self) -> bytes:
        """Metrics of all routers, with those of vLLM's front end in each, and of the shared state.

        Of all models at once: engines that hang are waited for once, so the page comes before Prometheus gives it up.
        """
        of_models = await asyncio.gather(*(front_end.metrics_pages() for front_end in self._front_ends))
        of_batches = [] if self._batches is None else [await self._batches.metrics()]
        return merge(page for pages in (*of_models, of_batches, await self._of_responses()) for page in pages)

    async def _of_responses(self) -> list[bytes]:
        """Nothing while Redis is away."""
        try:
            return [] if self._responses is None else [exposition(await self._responses.usage())]
        except StateStoreError:
            return []

    async def status(self, request: Request) -> Response:
        """The first model's state, and under `more_models` that of the others."""
        states = asyncio.gather(*(front_end.status() for front_end in self._front_ends))
        try:
            (first, *others), batches = await asyncio.gather(states, self._open_batches())
        except StateStoreError as error:
            return error_response(503, str(error))
        answered_by = {"router": self._front_ends[0].router_id, "pid": os.getpid()}
        user_config = {
            "in_force": self._user_config.in_force.now.user_config,
            "refused": self._user_config.refused,
        }
        beside = {"more_models": others, "candidates": self._candidates.status()}
        of_all = {**beside, **batches, "user_config": user_config, "answered_by": answered_by}
        return JSONResponse({**first, **of_all})

    async def unkept(self, request: Request) -> Response:
        """By model, the last requests whose promise was not kept, the latest first."""
        try:
            told = await asyncio.gather(*(front_end.unkept() for front_end in self._front_ends))
        except StateStoreError as error:
            return error_response(503, str(error))
        names = (front_end.name for front_end in self._front_ends)
        return JSONResponse({"unkept": dict(zip(names, told, strict=True))})

    async def _open_batches(self) -> dict[str, Any]:
        """Those of the key that asks; nothing without a Batch API, None while what runs them does not answer."""
        if self._batches is None:
            return {}
        found = await self._batches.open_batches(asking_owner())
        return {"open_batches": None if found is None else msgspec.to_builtins(found)}


async def _docs_page(request: Request) -> Response:
    """By relative addresses, which hold under every prefix; scripts and styles are vLLM's copies."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Sluice",
        swagger_js_url="static/swagger-ui-bundle.js",
        swagger_css_url="static/swagger-ui.css",
        swagger_favicon_url="data:,",
    )


async def _no_scaling(request: Request) -> Response:
    """vLLM's front end would speak for one engine, and scale none."""
    why = "a request scales no engines: engine.replicas and engine.autoscaling say how many there are"
    return error_response(501, why, "NotImplementedError")
