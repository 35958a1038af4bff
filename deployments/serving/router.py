"""The deployment that speaks HTTP: every model's front end behind one address."""

import asyncio
import gc
import logging
import os
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from deployments.batches.http import BatchApi, asking_owner, no_batch_api
from deployments.batches.results import Reply as BatchReply
from deployments.config.application import AppConfig
from deployments.config.live import with_live
from deployments.http.bodies import RequestBodies
from deployments.http.errors import error_response
from deployments.http.in_process import ask
from deployments.http.keys import RELOAD_S, KeyRing
from deployments.http.middleware import REQUEST_ID_HEADER, TENANT, SluiceMiddleware
from deployments.http.model_switch import ModelSwitch
from deployments.http.page import PAGE_PATHS, page
from deployments.http.promises import CLASS_HEADER, Promises
from deployments.http.traces import HttpTraces
from deployments.process.logs import log_by
from deployments.process.loopback import keep_to_loopback
from deployments.process.tracing import started_tracing
from deployments.responses.background import BackgroundResponses
from deployments.responses.http import ResponsesApi
from deployments.responses.metrics import exposition
from deployments.responses.store import ResponseStore
from deployments.serving.autoscaling import CpuUse, Stats
from deployments.serving.batch_runner import RemoteRunner, storage_of
from deployments.serving.front_end import FrontEnd, request_limits
from deployments.serving.lifetime import Lifetime
from deployments.serving.redis_server import embedded_redis_url
from deployments.serving.shared_call import SharedCall
from policies.batches.in_flight import Load
from policies.errors import ConfigError, StateStoreError
from router.admission import Tenant
from router.background import BackgroundTasks
from router.clock import MonotonicClock
from router.metrics import merge
from router.redis_store import check_access, connect
from router.trail import TraceHeaders

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
        batches: DeploymentHandle | None = None,
    ) -> None:
        self._lifetime, self._cpu_use = Lifetime(), CpuUse()
        self._resources = self._lifetime.resources
        log_by(config.logs.settings())
        keep_to_loopback()
        self._config, self._redis_url, self._api_keys = config, redis_url, api_keys
        self._front_ends = [
            FrontEnd(each, predictor, speaks_for_process=number == 0) for number, each in enumerate(config.each_model())
        ]
        self._batch_runner = None if batches is None else RemoteRunner(batches)
        self._metrics = SharedCall(self._exposition, METRICS_FRESH_S, MonotonicClock())
        self._reconfiguring = asyncio.Lock()
        self._user_config: object = None  # in force
        self._refused: str | None = None  # why the last one is not
        self._is_configured = False
        self._responses: BackgroundResponses | None = None  # once the application is made, where they are stored

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this in the replica, once, after __init__."""
        return await self._lifetime.start(self._application())

    async def _application(self) -> ASGIApp:
        if (tracing := started_tracing("router")) is not None:
            self._resources.push_async_callback(tracing.close)
        redis_url, ca_certs = self._redis_url or await embedded_redis_url(), self._config.redis_ca_certs
        await check_access(redis_url, ca_certs)
        self._redis = connect(redis_url, ca_certs)
        self._resources.push_async_callback(self._redis.aclose)
        self._responses = self._stored_responses()
        apps: dict[str, FastAPI] = {}
        for front_end in self._front_ends:
            app = await front_end.start(self._redis, self._resources, self._responses)
            apps |= dict.fromkeys(front_end.names, app)
            self._set_routes(app)
            if app.openapi_url:  # it is kept: the first to ask for it would stop all streams for two seconds
                await asyncio.to_thread(app.openapi)
        if self._responses is not None:
            self._resources.push_async_callback(self._responses.close)
            self._responses.keep_alive()
        cors = [_without_cors(app) for app in dict.fromkeys(apps.values())]
        _keep_from_collections()
        self._bodies = RequestBodies(request_limits(self._front_ends, self._config), **_of_bodies(self._config))
        self._keys = self._key_ring()
        self._served = SluiceMiddleware(
            self._with_state(ModelSwitch(apps) if len(self._front_ends) > 1 else app, apps.values()),
            bodies=self._bodies,
            promises=_promises(self._config),
            keys=self._keys,
            charge=self._front_ends[0].charge,
            traces=None if tracing is None else HttpTraces(tracing),
        )
        return CORSMiddleware(self._served, **cors[0])

    def _stored_responses(self) -> BackgroundResponses | None:
        """None where none are stored."""
        section = self._config.responses
        if not section.store:
            return None
        unstored = self._front_ends[0].metrics.responses_unstored
        store = ResponseStore(self._redis, self._config.name, section, MonotonicClock(), unstored)
        most = self._config.router.max_buffered_bytes
        return BackgroundResponses(store, self._counted_tasks(), MonotonicClock(), max_bytes=most)

    def _counted_tasks(self) -> BackgroundTasks:
        failures = self._front_ends[0].metrics.task_failures
        return BackgroundTasks(lambda task: failures.labels(task).inc())

    def _with_state(self, app: ASGIApp, apps: Iterable[FastAPI]) -> ASGIApp:
        """With the routes of what outlives a request."""
        store = None if self._responses is None else self._responses.store
        return ResponsesApi(self._with_batches(app, apps), store)

    def _with_batches(self, app: ASGIApp, apps: Iterable[FastAPI]) -> ASGIApp:
        if (runner := self._batch_runner) is None:
            return no_batch_api(app)
        background = self._counted_tasks()
        self._resources.push_async_callback(background.close)
        section = self._config.batches
        served = {path for each in apps for route in each.routes if (path := getattr(route, "path", None))}
        look = partial(_spawn_look, background, runner)
        return BatchApi(app, section, storage_of(section), served, look)

    async def answer_of_batch(
        self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None = None
    ) -> BatchReply:
        """To one request of a batch, in the name of the API key that made it; for the runner."""
        tenant = None if key is None else self._keys.named(key)
        reply = await ask(self._served, _scope(endpoint, tenant, self._config.batches.slo_class, trace), body)
        retry_after = Headers(raw=reply.headers).get("retry-after")
        return BatchReply(reply.status, reply.body, None if retry_after is None else float(retry_after))

    async def loads(self) -> dict[str, Load]:
        """Of every model, by each of its names; for the runner. Raises StateStoreError: the shared state is away."""
        loads = await asyncio.gather(*(front_end.load() for front_end in self._front_ends))
        pairs = zip(self._front_ends, loads, strict=True)
        return {name: load for front_end, load in pairs for name in front_end.names}

    async def reconfigure(self, user_config: object, rank: object) -> None:
        """Ray Serve calls this once the application is built, before a request comes, and whenever the deployment's
        `user_config` has changed. With `rank` it does so also where there is none.

        It replaces whoever raises here, so that what serves goes on by what is in force; one that starts goes by what
        others of its kind have taken.

        Raises:
            ConfigError: at the start, where there is nothing of the kind.
            StateStoreError: at the start, the shared state cannot be reached.
        """
        given = {} if user_config is None else user_config
        async with self._reconfiguring:
            try:
                await self._go_by(given)
                self._refused = None
            except Exception as error:  # of whatever kind
                self._refused = str(error) or repr(error)
                logger.exception("serving goes by the user_config of before")
                if not self._is_configured:
                    await self._lifetime.start(self._go_by_last_taken(error))

    async def _go_by_last_taken(self, error: Exception) -> None:
        """By routers that began with the same settings. Raises the error where there were none, or it is no matter of
        settings."""
        found = await self._front_ends[0].told_user_config() if isinstance(error, ConfigError) else None
        if found is None:
            raise error
        await self._go_by(found)

    async def _go_by(self, user_config: object) -> None:
        """Raises ConfigError, and StateStoreError at the start; all is as it was then."""
        config = with_live(self._config, user_config)
        await self._use_keys(config)
        log_by(config.logs.settings())
        self._bodies.adopt(request_limits(self._front_ends, config), **_of_bodies(config))
        self._served.promises = _promises(config)
        for front_end, each in zip(self._front_ends, config.each_model(), strict=True):
            front_end.adopt(user_config, each)
        self._user_config, self._is_configured = user_config, True
        for front_end in self._front_ends:
            try:
                await front_end.tell()
            except StateStoreError as error:
                logger.warning("engines of %s are told when the shared state is back: %s", front_end.name, error)

    def _set_routes(self, app: FastAPI) -> None:
        """Ours come first in the list. vLLM's own /metrics shows one process alone, with all paths below."""
        kept = [route for route in app.router.routes if getattr(route, "path", None) != "/metrics"]
        app.router.routes[:] = [
            Route("/metrics", self._metrics_page),
            Route("/metrics/", self._metrics_page),
            Route("/sluice/status", self._status_page),
            *(Route(path, page) for path in PAGE_PATHS),
            Route("/scale_elastic_ep", _no_scaling, methods=["POST"]),
            *([Route("/docs", _docs_page)] if app.openapi_url else []),
            *kept,
        ]

    def check_health(self) -> None:
        """Ray Serve replaces the router for which it raises: one that fails at once would draw all requests to it."""
        for front_end in self._front_ends:
            front_end.check_health()

    async def record_autoscaling_stats(self) -> Stats:
        """Ray Serve asks for it where routers are scaled."""
        return {"cores": self._cpu_use.cores()}

    def _key_ring(self) -> KeyRing:
        """To be read once its classes are known."""
        config = self._config
        return KeyRing(
            file=config.keys.file,
            environment=self._api_keys,
            client=self._redis if config.keys.redis else None,
            application=config.name,
            classes=config.classes,
        )

    async def _use_keys(self, config: AppConfig) -> None:
        """Raises ConfigError when keys name other classes, and whatever keeps them from being read at the start."""
        try:
            await self._keys.use_classes(config.classes)
        except StateStoreError as error:
            if not self._is_configured:
                raise
            logger.warning("keys wait for the shared state: %s", error)
        if self._is_configured:
            return
        if self._keys.required:
            background = self._counted_tasks()
            background.repeat(self._keys.reload, RELOAD_S, "keys")
            self._resources.push_async_callback(background.close)
        else:
            logger.warning("no API keys are configured: whoever reaches this address may use it")

    async def _metrics_page(self, request: Request) -> Response:
        return Response(await self._metrics.get(), media_type=PROMETHEUS_TEXT)

    async def _exposition(self) -> bytes:
        """Metrics of all routers, with those of vLLM's front end in each, and of the shared state.

        Of all models at once: engines that hang are waited for once, so the page comes before Prometheus gives it up.
        """
        of_models = await asyncio.gather(*(front_end.metrics_pages() for front_end in self._front_ends))
        of_batches = [] if self._batch_runner is None else [await self._batch_runner.metrics()]
        of_responses = await self._page_of_responses()
        return merge(page for pages in (*of_models, of_batches, of_responses) for page in pages)

    async def _page_of_responses(self) -> list[bytes]:
        """Nothing while Redis is away."""
        if self._responses is None:
            return []
        try:
            return [exposition(await self._responses.store.usage())]
        except StateStoreError:
            return []

    async def _status_page(self, request: Request) -> Response:
        """The first model's state, and under `more_models` that of the others."""
        states = asyncio.gather(*(front_end.status() for front_end in self._front_ends))
        try:
            (first, *others), batches = await asyncio.gather(states, self._open_batches())
        except StateStoreError as error:
            return error_response(503, str(error), "ServiceUnavailable")
        answered_by = {"router": self._front_ends[0].router_id, "pid": os.getpid()}
        user_config = {"in_force": self._user_config, "refused": self._refused}
        of_all = {"more_models": others, **batches, "user_config": user_config, "answered_by": answered_by}
        return JSONResponse({**first, **of_all})

    async def _open_batches(self) -> dict[str, Any]:
        """Of the key that asks; nothing where there is no Batch API, None while what runs them does not answer."""
        if self._batch_runner is None:
            return {}
        found = await self._batch_runner.open_batches(asking_owner())
        return {"open_batches": None if found is None else msgspec.to_builtins(found)}

    async def __del__(self) -> None:
        await self._lifetime.end()


def _spawn_look(background: BackgroundTasks, runner: RemoteRunner) -> None:
    background.spawn(runner.look(), "look at batches")


def _scope(path: str, tenant: Tenant | None, slo_class: str, trace: TraceHeaders | None) -> Scope:
    """Of a request for JSON, of this process's own."""
    own = {"content-type": "application/json", CLASS_HEADER: slo_class, REQUEST_ID_HEADER: uuid.uuid4().hex}
    headers = {**own, **(trace or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": Headers(headers).raw,
        "client": None,
        "server": None,
        TENANT: tenant,
    }


def _promises(config: AppConfig) -> Promises:
    return Promises(config.promises(), config.default_class, config.class_of_tier)


def _of_bodies(config: AppConfig) -> dict[str, Any]:
    return {"max_buffered_bytes": config.router.max_buffered_bytes, "timeout_s": config.router.body_timeout_s}


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
