"""The router's own pages, with small front ends in the place of vLLM's."""

import asyncio
import logging
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from deployments.config.application import AppConfig
from deployments.process.logs import OUR_PACKAGES
from deployments.serving.router import Router
from policies.errors import SluiceError, StateStoreAccessError
from router.metrics import RouterMetrics
from tests.deployments.bodies import free
from tests.waiting import PATIENCE_S

ASKED = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})


def vllms() -> FastAPI:
    app = FastAPI()
    app.add_middleware(CORSMiddleware)
    return app


class FrontEnd:
    router_id = "a"

    def __init__(self) -> None:
        self.asked = 0

    async def metrics_pages(self) -> list[bytes]:
        self.asked += 1
        metrics = RouterMetrics(labels={"model": "m", "router": "a"})
        metrics.replicas_lost.inc(self.asked)
        return [metrics.exposition()]


class Unserved(Router):
    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was opened."""


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in OUR_PACKAGES:  # as they are, once the test is over: a router sets them up for its process
        for attribute in ("handlers", "propagate", "level"):
            logger = logging.getLogger(name)
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    made: Any = Unserved(AppConfig(model="m"), "redis://127.0.0.1:1/0", [], None)
    made._front_ends = [FrontEnd()]
    return made


async def test_many_who_ask_for_the_metrics_at_once_cost_one_page(router: Any) -> None:
    pages = await asyncio.gather(*(router._metrics_page(ASKED) for _ in range(50)))
    assert router._front_ends[0].asked == 1
    assert {b'sluice_replicas_lost_total{model="m",router="a"} 1.0' in page.body for page in pages} == {True}


async def test_models_are_asked_for_their_metrics_at_once(router: Any) -> None:
    """In turn, one hung engine in each would keep the page from Prometheus longer than it waits."""
    all_asked = asyncio.Barrier(2)

    class Waits(FrontEnd):
        async def metrics_pages(self) -> list[bytes]:
            await all_asked.wait()
            return await super().metrics_pages()

    router._front_ends = [Waits(), Waits()]
    async with asyncio.timeout(PATIENCE_S):
        await router._metrics_page(ASKED)


async def test_no_request_scales_what_a_router_does_not_have(router: Any) -> None:
    """vLLM's own route says that it has scaled to one engine."""
    app = vllms()

    @app.post("/scale_elastic_ep")
    async def scale() -> str:
        return "Scaled to 1 data parallel engines"

    async def start(client: object, resources: object) -> FastAPI:
        return app

    router._front_ends = [
        SimpleNamespace(start=start, names=("m",), max_model_len=2048, takes_media=False, charge=free)
    ]
    served = await router.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://sluice") as client:
        response = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": 1})
    assert response.status_code == 501
    assert "engine.replicas" in response.json()["error"]["message"]


async def test_a_router_told_to_leave_while_it_waits_for_engines_opens_nothing_more(router: Any) -> None:
    waits, opened = asyncio.Event(), []

    async def start(client: object, resources: AsyncExitStack) -> FastAPI:
        resources.callback(opened.append, "and closed")
        waits.set()
        await asyncio.sleep(0.2)
        opened.append("a connection that nobody closes")
        return vllms()

    router._front_ends = [SimpleNamespace(start=start, names=("m",))]
    starting = asyncio.create_task(router.__serve_build_asgi_app__())
    await waits.wait()
    await Router.__del__(router)
    await asyncio.wait([starting], timeout=1.0)
    assert opened == ["and closed"]
    with pytest.raises(SluiceError, match="told to end"):
        starting.result()


async def test_a_router_that_redis_refuses_says_so_before_it_starts_anything(router: Any, redis_url: str) -> None:
    router._redis_url = f"redis://:wrong@{redis_url.rpartition('@')[2]}"
    router._front_ends = [SimpleNamespace(names=("m",))]
    with pytest.raises(StateStoreAccessError, match="redis_url"):
        await router.__serve_build_asgi_app__()
