"""The deployment that runs the model: an engine core and the relay in front of it."""

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any

import ray
from prometheus_client import REGISTRY
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.autoscaling import Stats, fleet_stats
from deployments.config import AppConfig
from deployments.logs import log_as_json
from deployments.loopback import keep_to_loopback
from deployments.relay import Relay, RelayConfig
from policies.errors import ReplicaLostError
from router.background import BackgroundTasks
from router.metrics import RelayMetrics
from router.redis_store import RedisStateStore, connect
from router.state_store import ReplicaInfo

logger = logging.getLogger(__name__)

WATCH_TIMEOUT_S = 60.0


class EngineReplica:
    """One engine. Ray Serve places, watches, scales and ends it; requests reach it through the relay alone."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: AppConfig,
        redis_url: str,
        redis_server: DeploymentHandle | None,
        classes: tuple[str, ...] = (),
    ) -> None:
        self._config, self._resources = config, AsyncExitStack()
        log_as_json()
        keep_to_loopback()
        if redis_server is not None:
            await redis_server.ready.remote()
        from deployments.vllm_adapter import VllmEngine, parse_vllm_args

        self._engine = await asyncio.to_thread(VllmEngine, parse_vllm_args(config.engine_argv()))
        self._resources.push_async_callback(asyncio.to_thread, self._engine.shutdown)
        host = config.engine.bind_host or ray.util.get_node_ip_address()
        redis = connect(redis_url, config.redis_ca_certs)
        self._resources.push_async_callback(redis.aclose)
        self._store = RedisStateStore(redis, config.namespace(self._engine.engine_version))
        metrics = RelayMetrics(REGISTRY)
        self._relay = Relay(
            engine=self._engine,
            store=self._store,
            info=ReplicaInfo(
                replica_id=serve.get_replica_context().replica_id.unique_id,
                host=host,
                port=0,
                engine_version=self._engine.engine_version,
                model=self._engine.model,
                max_model_len=self._engine.max_model_len,
                classes=classes,
            ),
            config=RelayConfig(
                credit_lookahead=config.engine.credit_lookahead,
                heartbeat_s=config.router.heartbeat_s,
                step_times=None if config.mode == "stock" else config.work.build(),
            ),
            metrics=metrics,
        )
        self._resources.push_async_callback(self._leave)
        await self._watch()
        await self._relay.start(host)
        background = BackgroundTasks(metrics.task_failures)
        self._resources.push_async_callback(background.close)
        background.repeat(self._watch, config.router.heartbeat_s, "watch engine")
        logger.info("replica %s serves on %s:%d", self._relay.info.replica_id, host, self._relay.info.port)

    async def record_autoscaling_stats(self) -> Stats:
        """Ray Serve asks for it where replicas are scaled."""
        return fleet_stats(await self._store.snapshot())

    async def _watch(self) -> None:
        """What the engine would admit is what the relay offers with its next heartbeat."""
        async with asyncio.timeout(WATCH_TIMEOUT_S):
            await self._engine.status()

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change settings of the engine's scheduler between two steps; returns those in force."""
        return await self._engine.control(changes)

    def check_health(self) -> None:
        if not self._relay.healthy:
            raise ReplicaLostError("the engine core has died")

    async def __del__(self) -> None:
        """Ray Serve awaits this before it ends the replica, within the drain timeout."""
        await self._resources.aclose()

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(self._config.engine.drain_timeout_s):
                await self._relay.drain()
        except TimeoutError:
            logger.warning("drain timed out, ending with requests running")
        await self._relay.close()
