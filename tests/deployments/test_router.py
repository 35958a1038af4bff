"""The router's own pages, with small front ends in the place of vLLM's."""

import asyncio
import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from starlette.requests import Request

from deployments.config import AppConfig
from deployments.logs import OUR_PACKAGES
from deployments.router import Router
from router.metrics import LabelledPage


class FrontEnd:
    def __init__(self) -> None:
        self.asked = 0

    async def metrics_pages(self) -> list[LabelledPage]:
        self.asked += 1
        registry = CollectorRegistry()
        Gauge("asked", "How often.", registry=registry).set(self.asked)
        return [({"model": "m"}, generate_latest(registry))]


class Unserved(Router):
    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was opened."""


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in OUR_PACKAGES:  # as they are, once the test is over: a router sets them up for its process
        for attribute in ("handlers", "propagate", "level"):
            logger = logging.getLogger(name)
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    return Unserved(AppConfig(model="m"), "redis://127.0.0.1:1/0", None, [], None)


async def test_many_who_ask_for_the_metrics_at_once_cost_one_page(router: Any) -> None:
    router._front_ends = [FrontEnd()]
    request = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})
    pages = await asyncio.gather(*(router._metrics_page(request) for _ in range(50)))
    assert router._front_ends[0].asked == 1
    assert {b'asked{model="m"} 1.0' in page.body for page in pages} == {True}
