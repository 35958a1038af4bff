"""How a replica finds the Redis of its application. Its life and end: tests/integration/deployed/test_redeploy.py."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayActorError

from deployments.serving import redis_server
from deployments.serving.redis_server import RedisServer, embedded_redis_url
from policies.errors import StateStoreError
from tests.waiting import PATIENCE_S

URL = "redis://:secret@127.0.0.1:1/0"


@pytest.fixture
def answered_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Awaitable[str]]], list[str]]:
    """Sets what the actor answers; returns the applications whose actor was asked for."""
    monkeypatch.setattr(redis_server, "RETRY_S", 0.001)
    context = SimpleNamespace(app_name="mine")
    monkeypatch.setattr(redis_server.serve, "get_replica_context", lambda: context)

    def of(answer: Callable[[], Awaitable[str]]) -> list[str]:
        asked: list[str] = []

        def server(application: str) -> Any:
            asked.append(application)
            return SimpleNamespace(url=SimpleNamespace(remote=answer))

        monkeypatch.setattr(redis_server, "_server_of", server)
        return asked

    return of


async def test_a_replica_asks_the_actor_of_its_own_application(answered_by: Any) -> None:
    async def url() -> str:
        return URL

    asked = answered_by(url)
    assert await embedded_redis_url() == URL
    assert asked == ["mine"]


async def test_one_that_is_about_to_end_is_asked_for_again(answered_by: Any) -> None:
    dying = iter([True, True, False])

    async def url() -> str:
        if next(dying):
            raise ActorDiedError
        return URL

    asked = answered_by(url)
    assert await embedded_redis_url() == URL
    assert len(asked) == 3


async def test_one_that_does_not_start_is_given_up_with_its_reason(
    answered_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "READY_TIMEOUT_S", 0.05)

    async def url() -> str:
        raise RayActorError(error_msg="The actor died\n  Traceback\nno redis-server found\n")

    answered_by(url)
    with pytest.raises(StateStoreError, match="not there after 0.05 s: no redis-server found"):
        await embedded_redis_url()


@pytest.mark.timeout(120)
async def test_one_that_does_not_answer_is_not_waited_for_for_ever(
    answered_by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "READY_TIMEOUT_S", 0.05)
    answered_by(lambda: asyncio.Event().wait())
    with pytest.raises(StateStoreError, match="not there after"):
        await embedded_redis_url()


class OwnRedis:
    """In the place of the process."""

    def __init__(self, *_: Any) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False


async def test_what_fails_at_one_look_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, or a controller that answers nothing of use: Redis would never come back, or never end."""
    made: list[OwnRedis | Exception] = [OwnRedis(), OSError("no space left"), OwnRedis()]
    told: list[Any] = [{}, ConnectionError("no controller"), {}, *[{"mine": 1}] * 4, {}, {}]

    def start(*_: Any) -> OwnRedis:
        return made.pop(0) if not isinstance(made[0], Exception) else _raised(made.pop(0))

    def status() -> Any:
        found = told.pop(0)
        return _raised(found) if isinstance(found, Exception) else SimpleNamespace(applications=found)

    ended = asyncio.Event()
    context = SimpleNamespace(was_current_actor_reconstructed=False, current_actor=None)
    monkeypatch.setattr(redis_server, "EmbeddedRedis", start)
    monkeypatch.setattr(redis_server, "WATCH_S", 0.001)
    monkeypatch.setattr(redis_server, "log_by", lambda _: None)
    monkeypatch.setattr(redis_server.serve, "status", status)
    monkeypatch.setattr(redis_server.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(redis_server.ray, "kill", lambda _: ended.set())
    first = made[0]
    server: Any = RedisServer.__new__(RedisServer)
    with caplog.at_level(logging.ERROR, logger=redis_server.__name__):
        await server.__init__("mine", 1, "secret")
        assert isinstance(first, OwnRedis)
        first.alive = False
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
    assert (made, told) == ([], [])
    assert "no space left" in caplog.text and "no controller" in caplog.text


def _raised(error: Exception) -> Any:
    raise error
