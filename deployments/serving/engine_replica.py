"""The deployment that runs the model: an engine core and the relay in front of it."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import ray
from ray import serve

from deployments.config.application import AppConfig
from deployments.config.engine import Role
from deployments.config.live import EngineTerms
from deployments.engines.relay import Credit, Relay, RelayConfig
from deployments.engines.traces import ReplicaTraces
from deployments.process.logs import log_by
from deployments.process.loopback import keep_to_loopback
from deployments.process.ray_tls import wire_tls
from deployments.process.stages import note_stage
from deployments.process.tracing import started_tracing
from deployments.process.vllm_env import nixl_env, set_up_gpu_engine
from deployments.serving.autoscaling import FleetUse, Stats
from deployments.serving.engine_settings import EngineSettings
from deployments.serving.engine_start import ENGINE, started_engines
from deployments.serving.lifetime import Lifetime
from deployments.serving.live_settings import LiveSettings
from deployments.serving.redis_server import embedded_redis_url
from policies.errors import ConfigError, ReplicaLostError
from policies.live import Live
from router.redis_store import RedisStateStore, check_access, connect
from router.state_store import ReplicaInfo

logger = logging.getLogger(__name__)


def _require_nixl() -> None:
    """Its backend is a package of its own, for one version of CUDA. Raises ConfigError where either does not import."""
    try:
        import nixl  # noqa: F401
    except ImportError as error:
        import torch

        cuda = torch.version.cuda or "12"  # without CUDA either backend runs
        raise ConfigError(
            f"engine.prefill needs the package nixl ({error}): pip install --no-deps "
            f"nixl==1.5.1 nixl-cu{cuda.split('.')[0]}==1.5.1"
        ) from error


def check_pairs(mine: ReplicaInfo, others: Iterable[ReplicaInfo], role: Role) -> None:
    """A cache that is read with another layout is garbage, without an error.

    The replica that registers second sees the other: so no unequal pair stays.

    Raises:
        ConfigError: a replica of the other group differs.
    """
    for other in others:
        if other.kv_layout != mine.kv_layout:
            raise ConfigError(
                f"this {role} replica has {mine.kv_layout!r}, and {other.replica_id} of the other group has "
                f"{other.kv_layout!r}: KV caches travel only between equals. Give both groups the same vllm_args, "
                "model files and hardware, or name --block-size and --dtype in vllm_args"
            )


def _prepare_environment(config: AppConfig) -> str:
    """For the engine, before anything of it is imported.

    Returns:
        The address to listen on.

    Raises:
        ConfigError: caches are to travel by NIXL, which is not installed.
    """
    if config.engine.num_gpus:
        set_up_gpu_engine(config.engine.env)
    host = config.engine.bind_host or ray.util.get_node_ip_address()
    if config.engine.prefill is not None:
        os.environ.update(nixl_env(host, on_cpu=config.engine.num_gpus == 0))
        _require_nixl()  # it may read its environment when it is imported
    return host


class EngineReplica:
    """One engine, or all ranks of a data-parallel one. Ray Serve places, watches, scales and ends it; requests reach
    it through its relays alone, of which each engine has its own, a replica for routers."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        config: AppConfig,
        redis_url: str | None,
        classes: tuple[str, ...] = (),
        role: Role = "decode",
    ) -> None:
        self._config, self._role, self._lifetime, self._began_s = config, role, Lifetime(), time.monotonic()
        self._resources, self._fleet_use = self._lifetime.resources, FleetUse()
        log_by(config.logs.settings())
        keep_to_loopback()
        await self._lifetime.start(self._start(redis_url, classes))
        note_stage("ready", ENGINE)
        for info in (relay.info for relay in self._relays):
            logger.info("replica %s serves on %s:%d", info.replica_id, info.host, info.port)

    async def _start(self, redis_url: str | None, classes: tuple[str, ...]) -> None:
        self._tracing = started_tracing("engine")
        if self._tracing is not None:
            self._resources.push_async_callback(self._tracing.close)
        redis_url = redis_url or await embedded_redis_url()
        await check_access(redis_url, self._config.redis_ca_certs)  # not once a model is loaded
        host, self._tls = _prepare_environment(self._config), wire_tls()
        self._engines = await started_engines(self._config, self._role)
        for engine in self._engines:
            self._resources.push_async_callback(asyncio.to_thread, engine.shutdown)
        self._connect(redis_url)
        self._live_settings = LiveSettings(self._store, self._config)
        self._terms = Live(EngineTerms.of(self._config, self._config, self._role))
        self._engine_settings = EngineSettings(self._terms.now.scheduler, self._control)
        self._relays = [self._relay_at(host, classes, rank) for rank in range(len(self._engines))]
        for relay in self._relays:
            self._resources.push_async_callback(relay.close)
        check = None if self._config.engine.prefill is None else self._check_pairs
        # A loaded model is not thrown away for a moment without Redis.
        patience_s = self._config.engine.start_timeout_s
        await asyncio.gather(*(relay.start(host, check=check, patience_s=patience_s) for relay in self._relays))
        self._relays[0].repeat(self._follow, "live settings")
        self._resources.push_async_callback(self._drain)  # what has not offered anything need not wait for anybody

    def _connect(self, redis_url: str) -> None:
        """The tables of this group of replicas, and those of the other one."""
        redis = connect(redis_url, self._config.redis_ca_certs)
        self._resources.push_async_callback(redis.aclose)
        version = self._engines[0].engine_version
        decode = RedisStateStore(redis, self._config.namespace(version))
        prefill = RedisStateStore(redis, self._config.prefill_namespace(version))
        self._store, self._others = (prefill, decode) if self._role == "prefill" else (decode, prefill)

    async def _follow(self) -> None:
        """Go by what routers tell of this model's settings.

        Raises:
            StateStoreError: the shared state does not answer.
            Exception: the engine refuses it; all but its scheduler's settings is in force.
        """
        terms = await self._live_settings.terms() or self._terms.now
        if terms != self._terms.now:
            self._terms.replace(terms)
            log_by(terms.logs)
        await self._engine_settings.follow(terms.scheduler)

    async def _control(self, changes: dict[str, Any]) -> None:
        """Raises as `VllmEngine.control`."""
        await asyncio.gather(*(engine.control(changes) for engine in self._engines))

    def _credit(self, engine: Any, terms: EngineTerms) -> Credit:
        is_decode = self._role == "decode"
        lookahead = self._config.credit_lookahead(engine.slots, terms.credit_s) if is_decode else 0
        return Credit(lookahead=lookahead, reading_s=terms.credit_s)

    async def _check_pairs(self) -> None:
        """To be called once the other group can see this replica.

        Raises:
            ConfigError: as `check_pairs`.
            StateStoreError: the shared state does not answer.
        """
        check_pairs(self._relays[0].info, await self._others.replica_infos(), self._role)

    def _relay_at(self, host: str, classes: tuple[str, ...], rank: int) -> Relay:
        """The relay of an engine that is loaded; it listens once it is started."""
        config, engine = self._config, self._engines[rank]
        replica_id = serve.get_replica_context().replica_id.unique_id
        if len(self._engines) > 1:
            replica_id = f"{replica_id}-rank{rank}"
        return Relay(
            engine=engine,
            store=self._store,
            traces=None if self._tracing is None else ReplicaTraces(self._tracing, replica_id),
            tls=None if self._tls is None else self._tls.replica,
            info=ReplicaInfo(
                replica_id=replica_id,
                host=host,
                port=0,
                max_model_len=engine.max_model_len,
                max_batch_tokens=engine.max_batch_tokens,
                classes=classes,
                gang_max_wait_s=config.gang.max_wait_s if config.gang else None,
                gang_patience_s=config.gang_patience_s,
                rolling_size=config.rolling_size(self._role),
                silence_s=config.router.silence_s,
                start_s=time.monotonic() - self._began_s,
                kv_layout=engine.kv_layout,
            ),
            config=RelayConfig(
                heartbeat_s=config.router.heartbeat_s,
                hang_timeout_s=config.engine.hang_timeout_s,
                step_times=None if config.mode == "stock" else config.work.build(),
                **self._prefill_bounds(),
            ),
            credit=self._terms.view(partial(self._credit, engine)),
        )

    def _prefill_bounds(self) -> dict[str, Any]:
        """What `RelayConfig` takes besides where this replica only reads prompts."""
        prefill = self._config.engine.prefill
        if prefill is None or self._role != "prefill":
            return {}
        return {"prefill_budget_tokens": self._engines[0].max_batch_tokens}

    async def be_there(self) -> None:
        """Nothing: that a router calls it has Ray Serve start a first replica."""

    async def record_autoscaling_stats(self) -> Stats:
        """Ray Serve asks for it where replicas are scaled."""
        snapshot, needs = await asyncio.gather(self._store.snapshot(), self._store.published("need"))
        return self._fleet_use.report(snapshot, needs.values())

    def check_health(self) -> None:
        if not all(relay.healthy for relay in self._relays):
            raise ReplicaLostError("the engine core has died, or hangs")

    async def __del__(self) -> None:
        """Ray Serve awaits this before it ends the replica, within the drain timeout."""
        await self._lifetime.end()

    async def _drain(self) -> None:
        timeout_s = self._config.engine.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                # What is taken until then has as long again, and what waits now waits no longer than max_wait_s.
                serving_s = min(timeout_s / 2, self._terms.now.max_wait_s)
                await asyncio.gather(*(relay.drain(serving_s) for relay in self._relays))
        except TimeoutError:
            logger.warning("drain timed out, ending with requests running")
