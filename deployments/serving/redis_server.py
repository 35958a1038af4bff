"""The embedded Redis of an application: one process and one address for as long as the application lives.

A detached actor owns it. It is no deployment, for Ray Serve replaces those at every redeploy, and what routers share
would be lost each time.
"""

import asyncio
import logging
import secrets

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
from deployments.process.ports import free_port
from deployments.process.stages import note_stage
from deployments.serving.embedded_redis import EmbeddedRedis, embedded_url
from policies.errors import StateStoreError

logger = logging.getLogger(__name__)

NAMESPACE = "sluice"
READY_TIMEOUT_S = 60.0
RETRY_S = 0.5
WATCH_S = 4.0  # each look takes some 20 ms of a slow core, here and of the controller
# That find no application, in a row: Ray Serve's controller may have died in the middle of one.
LOOKS = 2
CLOSE_TIMEOUT_S = 15.0


async def embedded_redis_url() -> str:
    """For a replica: where the Redis of its application is, which starts with the first that asks. A secret.

    Raises:
        StateStoreError: not within READY_TIMEOUT_S. Ray Serve starts the replica that waited again.
    """
    application = serve.get_replica_context().app_name
    why = "it has not answered"
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                try:
                    return str(await _server_of(application).url.remote())
                except RayActorError as error:  # it did not start, or is about to end or to start anew
                    why = str(error).strip().splitlines()[-1]
                    await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        raise StateStoreError(f"the embedded Redis is not there after {READY_TIMEOUT_S:g} s: {why}") from error


def _server_of(application: str) -> ActorHandle:
    """The actor of this name, of any deployment of the application; else a new one, on this node.

    Ray starts one that was killed again, with the same arguments: under the address that replicas know.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(RedisServer).options(
        name=f"redis-{application}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        scheduling_strategy=here,
    )
    return actor.remote(application, free_port(), secrets.token_urlsafe(32))


def close_redis_servers() -> None:
    """Ends the Redis of every application in this cluster, once Ray Serve has ended."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE:
            try:
                server = ray.get_actor(each["name"], namespace=NAMESPACE)
                ray.get(server.close.remote(), timeout=CLOSE_TIMEOUT_S)
            except (ValueError, RayActorError) as error:  # it has seen meanwhile that its application is gone
                logger.debug("%s has ended by itself: %s", each["name"], error)


class RedisServer:
    """Keeps a Redis up until its application is deleted, then ends itself."""

    async def __init__(self, application: str, port: int, password: str) -> None:  # type: ignore[misc]  # Ray awaits it
        """Raises StateStoreError when Redis does not start: the replica that asked draws another port."""
        log_by(LogSettings())
        self._application, self._port, self._password = application, port, password
        self._redis: EmbeddedRedis | None = None
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            self._redis = EmbeddedRedis(port, password)
            note_stage("the embedded Redis has started")
        self._watching = asyncio.create_task(self._watch())

    async def url(self) -> str:
        """With the password, so a secret."""
        return embedded_url(self._port, self._password)

    async def close(self) -> None:
        """Ends Redis for good. The actor ends with the cluster."""
        self._watching.cancel()
        self._end_redis()

    async def _watch(self) -> None:
        missing = 0
        while missing < LOOKS:
            self._keep_up()
            await asyncio.sleep(WATCH_S)
            missing = 0 if await self._application_lives() else missing + 1
        logger.info("application %s is gone, its Redis ends", self._application)
        self._end_redis()
        ray.kill(ray.get_runtime_context().current_actor)

    def _keep_up(self) -> None:
        """Under the address that replicas know; when that is taken, at the next look."""
        if self._redis is not None and self._redis.alive:
            return
        try:
            self._end_redis()
            self._redis = EmbeddedRedis(self._port, self._password)
        except Exception:  # of any kind, such as a full disk: nobody else would start it again
            logger.exception("the Redis of application %s has ended", self._application)

    def _end_redis(self) -> None:
        if self._redis is not None:
            ended, self._redis = self._redis, None
            ended.close()

    async def _application_lives(self) -> bool:
        """As far as Ray Serve tells: while its controller starts anew, it does."""
        try:
            status = await asyncio.to_thread(serve.status)
        except ActorDiedError:  # Ray Serve was shut down
            return False
        except RayError as error:
            logger.info("Ray Serve does not say whether application %s lives: %s", self._application, error)
            return True
        except Exception:  # of any kind: without this watch Redis would neither be kept up nor end
            logger.exception("it cannot be told whether application %s lives", self._application)
            return True
        return self._application in status.applications
