"""The deployment that speaks HTTP: vLLM's own OpenAI application over the routed engine client."""

import asyncio
import logging
import math
import os
import time
import uuid
from contextlib import AsyncExitStack
from types import SimpleNamespace

from fastapi import FastAPI
from prometheus_client import generate_latest
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.config import AppConfig
from deployments.http_layer import SluiceMiddleware, error_response
from deployments.keys import RELOAD_S, KeyRing
from deployments.logs import log_as_json
from deployments.loopback import keep_to_loopback
from policies.errors import ReplicaLostError, StateStoreError
from policies.multi_bin import MultiBin
from policies.order import VirtualDeadline
from predictor.histogram import HistogramPredictor
from router.admission import Door
from router.background import BackgroundTasks
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.metrics import RouterMetrics, merge, shared_exposition
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient

logger = logging.getLogger(__name__)
REPLICA_POLL_S = 0.2
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Router:
    """One front end. Any number of them share the bins through the state store.

    `engines` are not called: requests go over the relay's wire. That they are bound here makes Ray Serve deploy them.
    """

    def __init__(
        self,
        config: AppConfig,
        redis_url: str,
        redis_server: DeploymentHandle | None,
        engines: list[DeploymentHandle],
        api_keys: str | None,
    ) -> None:
        self._resources = AsyncExitStack()
        log_as_json()
        keep_to_loopback()
        self._config, self._redis_server, self._api_keys = config, redis_server, api_keys
        self._redis = connect(redis_url, config.redis_ca_certs)
        self._metrics = RouterMetrics()
        self._resources.push_async_callback(self._redis.aclose)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this in the replica, once, after __init__."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from deployments.vllm_adapter import ENGINE_VERSION, RoutedAsyncLLM, VllmCodec, parse_vllm_args

        if self._redis_server is not None:
            await self._redis_server.ready.remote()
        self._store = RedisStateStore(self._redis, self._config.namespace(ENGINE_VERSION))
        args = parse_vllm_args(self._config.vllm_argv())
        args.max_model_len = await self._max_model_len()
        self._routed = RoutedClient(
            router_id=uuid.uuid4().hex[:12],
            store=self._store,
            codec=VllmCodec(),
            classifier=self._classifier(),
            door=Door({name: section.limits() for name, section in self._config.classes.items()}),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=self._metrics,
            config=self._config.router.build(),
        )
        self._resources.push_async_callback(self._routed.close)
        await self._routed.start()
        self._llm = RoutedAsyncLLM(args, self._routed)
        tasks = await self._llm.get_supported_tasks()
        app: FastAPI = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        app.state.server = SimpleNamespace()  # vLLM's error handler looks for the server it would stop
        # First in the list: vLLM's own /metrics shows this process alone.
        app.router.routes.insert(0, Route("/metrics", self._metrics_page))
        app.router.routes.insert(0, Route("/sluice/status", self._status_page))
        return SluiceMiddleware(
            app,
            max_body_bytes=self._config.router.max_body_bytes,
            classes=self._config.classes,
            default_class=self._config.default_class,
            keys=await self._key_ring(),
        )

    async def _key_ring(self) -> KeyRing:
        """Raises ConfigError when the keys cannot be read at the start; later the old ones stay."""
        config = self._config
        keys = KeyRing(
            file=config.keys.file,
            environment=self._api_keys,
            client=self._redis if config.keys.redis else None,
            application=config.name,
        )
        await keys.reload()
        if keys.required:
            background = BackgroundTasks(self._metrics.task_failures)
            background.repeat(keys.reload, RELOAD_S, "keys")
            self._resources.push_async_callback(background.close)
        else:
            logger.warning("no API keys are configured: whoever reaches this address may use it")
        return keys

    async def _max_model_len(self) -> int:
        """As the first replica settled it. Until one of this model is there, a redeploy leaves the old routers on.

        Raises:
            ReplicaLostError: none registers within the time that loading a model may take.
        """
        give_up_s = time.monotonic() + self._config.engine.start_timeout_s
        while not (infos := await self._store.replica_infos()):
            if time.monotonic() > give_up_s:
                raise ReplicaLostError(f"no engine replica within {self._config.engine.start_timeout_s} s")
            await asyncio.sleep(REPLICA_POLL_S)
        return min(info.max_model_len for info in infos)

    def _classifier(self) -> Classifier:
        config = self._config
        return Classifier(
            predictor=HistogramPredictor(config.bins.window_requests),
            bins=MultiBin(config.bins.build()),
            order=VirtualDeadline(config.order_config()),
            step_times=config.work.build(),
            shared_batch_size=config.work.batch_size,
            default_output_tokens=config.work.default_output_tokens,
            metrics=self._metrics,
            prefixes=config.placement.prefixes(),
            prefix_tie_s=config.placement.prefix_tie_s,
            mode=config.mode,
        )

    async def _metrics_page(self, request: Request) -> Response:
        """Metrics of all routers, of the shared state, and of vLLM's front end in this process."""
        try:
            pages = await self._store.all_metrics()
            shared = shared_exposition(await self._store.snapshot())
        except StateStoreError as error:
            logger.warning("metrics of this router only: %s", error)
            pages, shared = {}, b""
        pages[self._routed.router_id] = self._metrics.exposition()
        return Response(merge(pages) + shared + generate_latest(), media_type=PROMETHEUS_TEXT)

    async def _status_page(self, request: Request) -> Response:
        """Bins, replicas and what each engine says of itself."""
        try:
            snapshot = await self._store.snapshot()
            engines = await self._routed.statuses()
        except StateStoreError as error:
            return error_response(503, str(error), "ServiceUnavailable")
        replicas = {
            replica_id: {
                "slots": load.slots,
                "slowness": round(load.slowness, 3),
                "running": load.running,
                "credit": load.credit,
                "outstanding_s": round(load.outstanding_s, 4),
                "engine": engines.get(replica_id, {}),
            }
            for replica_id, load in snapshot.replicas.items()
        }
        return JSONResponse(
            {
                "model": self._config.served_model_name or self._config.model,
                "routers": snapshot.routers,
                "waiting": {f"{name}:{index}": count for (name, index), count in snapshot.lanes.items()},
                "waiting_s": round(snapshot.waiting_s, 4),
                "overtaken_s": round(snapshot.overtaken_s, 3),
                "bin_edges_tokens": [edge if math.isfinite(edge) else None for edge in self._routed.bin_edges],
                "replicas": replicas,
                "answered_by": {"router": self._routed.router_id, "pid": os.getpid()},
            }
        )

    async def __del__(self) -> None:
        await self._resources.aclose()
