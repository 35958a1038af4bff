"""The embedded Redis as a part of the application: Ray Serve starts it first, watches it, and ends it with the rest."""

import asyncio

from ray.serve.handle import DeploymentHandle

from deployments.process.logs import log_as_json
from deployments.process.loopback import keep_to_loopback
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import StateStoreError

READY_TIMEOUT_S = 60.0


async def redis_ready(redis_server: DeploymentHandle | None) -> None:
    """Until the embedded Redis answers, where there is one.

    Raises:
        StateStoreError: not within READY_TIMEOUT_S. Ray Serve starts whoever waited again.
    """
    if redis_server is None:
        return
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await redis_server.ready.remote()
    except TimeoutError as error:
        raise StateStoreError(f"the embedded Redis is not there after {READY_TIMEOUT_S:g} s") from error


class RedisServer:
    """One replica, on the machine where the application runs."""

    def __init__(self, port: int, password: str) -> None:
        log_as_json()
        keep_to_loopback()
        self._redis = EmbeddedRedis(port, password)

    def ready(self) -> bool:
        """Answers once Redis does."""
        return True

    def check_health(self) -> None:
        if not self._redis.alive:
            raise StateStoreError("the embedded Redis has ended")

    def __del__(self) -> None:
        self._redis.close()
