"""Stores of responses over one real Redis."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from deployments.config.services import ResponsesSection
from deployments.responses.store import Encoded, Place, ResponseStore
from router.clock import MonotonicClock
from router.metrics import RouterMetrics
from router.redis_store import connect

MINE, YOURS = Place.of_key("me", "resp_1"), Place.of_key("you", "resp_1")


def encoded(status: str = "completed", size: int = 0, messages: bytes = b'{"chat":[]}') -> Encoded:
    """size: bytes beyond the least."""
    return Encoded(b'{"id":"resp_1","status":"%s","text":"%s"}' % (status.encode(), b"x" * size), messages)


@asynccontextmanager
async def stores(redis_url: str, namespace: str) -> AsyncIterator[Callable[..., ResponseStore]]:
    """Makes stores over the same tables, each with a client of its own, as routers have; with settings of `responses`
    that differ."""
    clients, unstored = [], RouterMetrics().responses_unstored

    def make(**section: Any) -> ResponseStore:
        clients.append(connect(redis_url))
        return ResponseStore(clients[-1], namespace, ResponsesSection(**section), MonotonicClock(), unstored)

    try:
        yield make
    finally:
        for client in clients:
            await client.aclose()


def unstored(store: ResponseStore, why: str) -> float:
    return store._unstored.labels(why)._value.get()


async def end_lease(store: ResponseStore, place: Place) -> None:
    """As if its router had given no sign of life for LEASE_S."""
    await store._redis.zadd(f"{store._prefix}:running", {place.member: 1})
