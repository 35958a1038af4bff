"""How a first engine replica comes, of a model that may have none (`engine.autoscaling.min_replicas: 0`).

Ray Serve starts one where a call to a deployment without replicas waits. Requests reach engines past Ray Serve, so a
router makes such a call while requests wait and no replica takes them, one at a time: whatever it brings is not needed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from deployments.config.application import AppConfig
from deployments.config.scaling import may_be_none
from router.background import BackgroundTasks
from router.routed_client import RoutedClient

Wake = Callable[[], Awaitable[None]]
PAUSE_S = 0.5  # after a call that failed, where a router starts


def wake_of(config: AppConfig, engines: DeploymentHandle | None) -> Wake | None:
    """What returns once an engine replica of a model is there; None where there always is one.

    Args:
        engines: those that serve all classes; None where Ray Serve does not run them.
    """
    if engines is None or not may_be_none(config.engine):
        return None
    return partial(_wake, engines, config.engine.start_timeout_s)


async def _wake(engines: DeploymentHandle, timeout_s: float) -> None:
    """Raises:
    TimeoutError: none is there in time.
    RayError, RayServeException: it ended again.
    """
    async with asyncio.timeout(timeout_s):
        await engines.be_there.remote()


async def wake_if_awaited(wake: Wake, routed: RoutedClient[Any, Any]) -> None:
    """To be called at every heartbeat. Raises as the wake does."""
    if routed.snapshot.awaits_a_replica:
        await wake()


@asynccontextmanager
async def kept_awake(wake: Wake | None, background: BackgroundTasks) -> AsyncIterator[None]:
    """At least one replica is there, or starts, for the time of the block."""
    if wake is not None:
        background.repeat(wake, PAUSE_S, "wake")
    try:
        yield
    finally:
        await background.close()
