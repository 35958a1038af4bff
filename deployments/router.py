"""The deployment that speaks HTTP: vLLM's own OpenAI application over the routed engine client."""

import logging
import math
import os
import uuid
from types import SimpleNamespace

from fastapi import FastAPI
from prometheus_client import generate_latest
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from deployments.config import AppConfig
from deployments.engine_metrics import engine_exposition
from deployments.http_layer import SluiceMiddleware, error_response
from deployments.logs import log_as_json
from deployments.loopback import keep_to_loopback
from policies.errors import StateStoreError
from policies.multi_bin import MultiBin
from policies.order import VirtualDeadline
from predictor.histogram import HistogramPredictor
from router.classifier import Classifier
from router.clock import MonotonicClock, SharedClock
from router.metrics import RouterMetrics, merge, shared_exposition
from router.redis_store import RedisStateStore, connect
from router.routed_client import RoutedClient

logger = logging.getLogger(__name__)
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Router:
    """One front end. Any number of them share the bins through the state store."""

    def __init__(
        self, config: AppConfig, redis_url: str, redis_server: DeploymentHandle | None, engines: DeploymentHandle
    ) -> None:
        log_as_json()
        keep_to_loopback()
        self._config, self._redis_server, self._engines = config, redis_server, engines
        self._store = RedisStateStore(connect(redis_url, config.redis_ca_certs), config.name)
        self._metrics = RouterMetrics()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve calls this in the replica, once, after __init__."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from deployments.vllm_adapter import RoutedAsyncLLM, VllmCodec, parse_vllm_args

        if self._redis_server is not None:
            await self._redis_server.ready.remote()
        max_model_len = await self._engines.max_model_len.remote()
        args = parse_vllm_args(self._config.vllm_argv())
        args.max_model_len = max_model_len
        self._routed = RoutedClient(
            router_id=uuid.uuid4().hex[:12],
            store=self._store,
            codec=VllmCodec(),
            classifier=self._classifier(),
            clock=MonotonicClock(),
            shared_clock=SharedClock(),
            metrics=self._metrics,
            config=self._config.router.build(),
        )
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
        )

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
        )

    async def _metrics_page(self, request: Request) -> Response:
        """Metrics of all routers, of the shared state, and of vLLM's front end in this process."""
        try:
            pages = await self._store.all_metrics()
            shared = shared_exposition(await self._store.snapshot())
            shared += engine_exposition(await self._routed.statuses())
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
                "waiting_per_bin": snapshot.bins,
                "bin_edges_tokens": [edge if math.isfinite(edge) else None for edge in self._routed.bin_edges],
                "replicas": replicas,
                "answered_by": {"router": self._routed.router_id, "pid": os.getpid()},
            }
        )

    async def __del__(self) -> None:
        await self._routed.close()
        await self._store.close()
