"""The least application with an embedded Redis: it answers with the password's digest and the port."""

import hashlib
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.requests import Request

from deployments.serving.redis_server import embedded_redis_url


@serve.deployment(ray_actor_options={"num_cpus": 0})
class AsksForRedis:
    async def __init__(self, settings: dict[str, Any]) -> None:
        self._url = await embedded_redis_url()

    async def __call__(self, request: Request) -> str:
        password, _, address = self._url.removeprefix("redis://:").partition("@")
        return f"{hashlib.sha256(password.encode()).hexdigest()} {address}"


def build(settings: dict[str, Any]) -> Application:
    return AsksForRedis.bind(settings)
