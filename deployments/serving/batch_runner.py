"""What runs batches as a Ray Serve deployment, and the ways between it and routers."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.batches.results import Reply
from deployments.batches.runner import OpenBatches, Runner, Troubles
from deployments.batches.storage import Storage
from deployments.config.services import BatchesSection
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
from deployments.process.loopback import keep_to_loopback
from deployments.process.tracing import started_tracing
from deployments.serving.lifetime import Lifetime
from policies.batches.in_flight import Load
from policies.errors import ConfigError, ReplicaLostError
from router.trail import TraceHeaders

logger = logging.getLogger(__name__)

ROUTERS = "Router"  # the deployment
AWAY = (RayError, BackPressureError, DeploymentUnavailableError)
ANSWER_TIMEOUT_S = 2.0  # to those who only look
LOADS_TIMEOUT_S = 10.0  # a router that hangs must not keep batches from being cancelled, nor their number from falling


class RemoteRouters:
    """Any router of the application; one that is full or gone is an error of ours, never an exception of Ray's."""

    def __init__(self, routers: DeploymentHandle) -> None:
        self._routers = routers

    async def answer(self, key: str | None, endpoint: str, body: bytes, trace: TraceHeaders | None) -> Reply:
        """Raises ReplicaLostError when none answers."""
        try:
            reply: Reply = await self._routers.answer_of_batch.remote(key, endpoint, body, trace)
        except AWAY as error:
            raise ReplicaLostError(f"no answer from routers: {error!r}") from error
        return reply

    async def loads(self) -> Mapping[str, Load]:
        """Raises ReplicaLostError when none answers in time, or the shared state is away."""
        try:
            async with asyncio.timeout(LOADS_TIMEOUT_S):
                loads: Mapping[str, Load] = await self._routers.loads.remote()
        except (*AWAY, TimeoutError) as error:
            raise ReplicaLostError(f"no answer from routers: {error!r}") from error
        return loads


class BatchRunner:
    """One runs at a time; where two do for a moment, files tell them apart (`deployments.batches.state`)."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, section: BatchesSection, logs: LogSettings
    ) -> None:
        log_by(logs)
        keep_to_loopback()
        self._lifetime = Lifetime()
        await self._lifetime.start(self._start(section))

    async def _start(self, section: BatchesSection) -> None:
        if (tracing := started_tracing("batches")) is not None:
            self._lifetime.resources.push_async_callback(tracing.close)
        application = serve.get_replica_context().app_name
        routers = RemoteRouters(serve.get_deployment_handle(ROUTERS, application))
        self._runner = Runner(section, storage_of(section), routers, tracing)
        self._runner.start()
        self._lifetime.resources.push_async_callback(self._runner.close)

    async def look(self) -> None:
        """A batch is new, or cancelled."""
        self._runner.look()

    async def metrics(self) -> bytes:
        return self._runner.metrics.exposition()

    async def open_batches(self, owner: str) -> OpenBatches:
        return self._runner.open_batches(owner)

    async def troubles(self, owner: str) -> Troubles:
        return self._runner.troubles(owner)

    async def __del__(self) -> None:
        await self._lifetime.end()


def storage_of(section: BatchesSection) -> Storage:
    """Raises ConfigError: its folder cannot be used."""
    if section.folder is None:
        raise ConfigError("batches.folder is not set")
    return Storage(section.folder)


def runner_application(section: BatchesSection, logs: LogSettings) -> Application:
    """To bind into the router's arguments."""
    runner = serve.deployment(BatchRunner, num_replicas=1, ray_actor_options={"num_cpus": section.num_cpus})
    return runner.bind(section, logs)


class RemoteRunner:
    """The runner, as routers see it: what it is told, it would find out later by itself."""

    def __init__(self, runner: DeploymentHandle) -> None:
        self._runner = runner

    async def look(self) -> None:
        await self._answer(self._runner.look)

    async def metrics(self) -> bytes:
        """Nothing while it does not answer."""
        page: bytes | None = await self._answer(self._runner.metrics)
        return page or b""

    async def open_batches(self, owner: str) -> OpenBatches | None:
        """None while it does not answer."""
        found: OpenBatches | None = await self._answer(self._runner.open_batches, owner)
        return found

    async def troubles(self, owner: str) -> Troubles:
        """None are known while it does not answer."""
        found: Troubles | None = await self._answer(self._runner.troubles, owner)
        return found or {}

    async def _answer(self, ask: DeploymentHandle, *args: str) -> Any:
        """None while it does not answer."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await ask.remote(*args)
        except (*AWAY, TimeoutError) as error:
            logger.info("the runner of batches does not answer: %s", error)
            return None
