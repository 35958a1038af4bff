"""The deployment that speaks HTTP: every model's front end behind one address."""

import asyncio
import gc
import logging
import os
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from ray.serve.handle import DeploymentHandle
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.config.application import AppConfig
from deployments.http.bodies import RequestBodies
from deployments.http.keys import RELOAD_S, KeyRing
from deployments.http.limits import RequestLimits
from deployments.http.middleware import SluiceMiddleware, error_response
from deployments.http.model_switch import ModelSwitch
from deployments.http.promises import Promises
from deployments.process.logs import log_as_json
from deployments.process.loopback import keep_to_loopback
from deployments.serving.autoscaling import CpuUse, Stats
from deployments.serving.front_end import FrontEnd
from deployments.serving.lifetime import Lifetime
from deployments.serving.redis_server import embedded_redis_url
from deployments.serving.shared_call import SharedCall
from policies.errors import StateStoreError
from router.background import BackgroundTasks
from router.clock import MonotonicClock
from router.metrics import merge
from router.redis_store import check_access, connect

logger = logging.getLogger(__name__)
METRICS_FRESH_S = 1.0  # the page takes some ms of the loop that sends tokens, and whoever asks for it needs no key
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Router:
    """Any number of them share the bins through the state store.

    `engines` are not called: requests go over the relay's wire. That they are bound here makes Ray Serve deploy them.
    `redis_url` is None where the application has an embedded Redis.
    """

    def __init__(
        self,
        config: AppConfig,
        redis_url: str | None,
        engines: list[DeploymentHandle],
        api_keys: str | None,
        predictor: DeploymentHandle | None = None,
    ) -> None:
        self._lifetime, self._cpu_use = Lifetime(), CpuUse()
        self._resources = self._lifetime.resources
        log_as_json()
        keep_to_loopback()
        self._config, self._redis_url, self._api_keys = config, redis_url, api_keys
        self._front_ends = [
            FrontEnd(each, predictor, speaks_for_process=number == 0) for number, each in enumerate(config.each_model())
        ]
        self._metrics = SharedCall(self._exposition, METRICS_FRESH_S, MonotonicClock())

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this in the replica, once, after __init__."""
        return await self._lifetime.start(self._application())

    async def _application(self) -> ASGIApp:
        redis_url, ca_certs = self._redis_url or await embedded_redis_url(), self._config.redis_ca_certs
        await check_access(redis_url, ca_certs)
        self._redis = connect(redis_url, ca_certs)
        self._resources.push_async_callback(self._redis.aclose)
        apps: dict[str, FastAPI] = {}
        for front_end in self._front_ends:
            app = await front_end.start(self._redis, self._resources)
            apps |= dict.fromkeys(front_end.names, app)
            self._set_routes(app)
            if app.openapi_url:  # it is kept: who asks for it first would stop all streams for two seconds
                await asyncio.to_thread(app.openapi)
        cors = [_without_cors(app) for app in dict.fromkeys(apps.values())]
        _keep_from_collections()
        served = SluiceMiddleware(
            ModelSwitch(apps) if len(self._front_ends) > 1 else app,
            bodies=self._bodies(),
            promises=Promises(self._config.promises(), self._config.default_class, self._config.class_of_tier),
            keys=await self._key_ring(),
            charge=self._front_ends[0].charge,
        )
        return CORSMiddleware(served, **cors[0])

    def _set_routes(self, app: FastAPI) -> None:
        """Ours come first in the list. vLLM's own /metrics shows one process alone, with all paths below."""
        kept = [route for route in app.router.routes if getattr(route, "path", None) != "/metrics"]
        app.router.routes[:] = [
            Route("/metrics", self._metrics_page),
            Route("/metrics/", self._metrics_page),
            Route("/sluice/status", self._status_page),
            Route("/scale_elastic_ep", _no_scaling, methods=["POST"]),
            *([Route("/docs", _docs_page)] if app.openapi_url else []),
            *kept,
        ]

    def _bodies(self) -> RequestBodies:
        """Bounded by the longest context of the models, and for images where one takes them."""
        section = self._config.router
        limits = RequestLimits.of_context(
            max(front_end.max_model_len for front_end in self._front_ends),
            takes_media=any(front_end.takes_media for front_end in self._front_ends),
            max_body_bytes=section.max_body_bytes,
            max_engine_requests=section.max_engine_requests,
        )
        return RequestBodies(limits, max_buffered_bytes=section.max_buffered_bytes, timeout_s=section.body_timeout_s)

    def check_health(self) -> None:
        """Ray Serve replaces the router for which it raises: one that fails at once would draw all requests to it."""
        for front_end in self._front_ends:
            front_end.check_health()

    async def record_autoscaling_stats(self) -> Stats:
        """Ray Serve asks for it where routers are scaled."""
        return {"cores": self._cpu_use.cores()}

    async def _key_ring(self) -> KeyRing:
        """Raises ConfigError when the keys cannot be read at the start; later the old ones stay."""
        config = self._config
        keys = KeyRing(
            file=config.keys.file,
            environment=self._api_keys,
            client=self._redis if config.keys.redis else None,
            application=config.name,
            classes=config.classes,
        )
        await keys.reload()
        if keys.required:
            failures = self._front_ends[0].metrics.task_failures
            background = BackgroundTasks(lambda task: failures.labels(task).inc())
            background.repeat(keys.reload, RELOAD_S, "keys")
            self._resources.push_async_callback(background.close)
        else:
            logger.warning("no API keys are configured: whoever reaches this address may use it")
        return keys

    async def _metrics_page(self, request: Request) -> Response:
        return Response(await self._metrics.get(), media_type=PROMETHEUS_TEXT)

    async def _exposition(self) -> bytes:
        """Metrics of all routers, with those of vLLM's front end in each, and of the shared state.

        Of all models at once: engines that hang are waited for once, so the page comes before Prometheus gives it up.
        """
        of_models = await asyncio.gather(*(front_end.metrics_pages() for front_end in self._front_ends))
        return merge(page for of_model in of_models for page in of_model)

    async def _status_page(self, request: Request) -> Response:
        """The first model's state, and under `more_models` that of the others."""
        try:
            first, *others = await asyncio.gather(*(front_end.status() for front_end in self._front_ends))
        except StateStoreError as error:
            return error_response(503, str(error), "ServiceUnavailable")
        answered_by = {"router": self._front_ends[0].router_id, "pid": os.getpid()}
        return JSONResponse({**first, "more_models": others, "answered_by": answered_by})

    async def __del__(self) -> None:
        await self._lifetime.end()


def _keep_from_collections() -> None:
    """What is made by now lives as long as the process. To look through it takes a second, which streams would wait."""
    gc.collect()
    gc.freeze()


def _without_cors(app: FastAPI) -> dict[str, Any]:
    """What vLLM's CORS layer was told, once it is out of the application.

    It belongs outside of our middleware: a browser may read what that refuses as well.
    """
    cors: Any = CORSMiddleware
    (layer,) = (each for each in app.user_middleware if each.cls is cors)
    app.user_middleware.remove(layer)
    return dict(layer.kwargs)


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
