"""A real Redis for every test that wants one."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import uuid4

import hypothesis
import pytest

from deployments.embedded_redis import EmbeddedRedis, free_port
from router.redis_store import RedisStateStore, connect

# Fewer examples for the minute before a commit; `make test` runs them all.
hypothesis.settings.register_profile("quick", max_examples=20, deadline=None)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    yield server.url
    server.close()


@pytest.fixture
def namespace() -> str:
    """Fresh tables in the shared Redis."""
    return uuid4().hex


@pytest.fixture
async def new_store(redis_url: str, namespace: str) -> AsyncIterator[Callable[[], RedisStateStore]]:
    """Makes stores over the same tables, each with a client of its own, as separate processes have."""
    stores: list[RedisStateStore] = []

    def make() -> RedisStateStore:
        stores.append(RedisStateStore(connect(redis_url), namespace))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()
