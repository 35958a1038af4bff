"""A router as Ray Serve runs it, without Ray Serve."""

import os
from pathlib import Path

import uvicorn
import uvloop

from deployments.app import router_env
from deployments.config.application import AppConfig
from deployments.process.parent import die_with_parent


async def _route(config: AppConfig, redis_url: str, port: int) -> None:
    from deployments.serving.service import opened_service

    async with opened_service(config, redis_url) as service:
        options = uvicorn.Config(service.app, host="127.0.0.1", port=port, log_level="warning", lifespan="off")
        await uvicorn.Server(options).serve()


def route(config: AppConfig, redis_url: str, port: int, log: Path) -> None:
    """Until SIGTERM; what it says goes to a file."""
    die_with_parent()
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(router_env())
    uvloop.run(_route(config, redis_url, port))
