"""The embedded Redis as a part of the application: Ray Serve starts it first, watches it, and ends it with the rest."""

from deployments.embedded_redis import EmbeddedRedis
from deployments.loopback import keep_to_loopback
from policies.errors import StateStoreError


class RedisServer:
    """One replica, on the machine where the application runs."""

    def __init__(self, port: int, password: str) -> None:
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
