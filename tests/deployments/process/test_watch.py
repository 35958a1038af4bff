"""A loop that hangs ends its process; one that only waits for a core does not."""

import asyncio
import logging
import threading
import time

import pytest

from deployments.process import watch
from deployments.process.watch import watched_loop
from deployments.serving.lifetime import Lifetime
from tests.waiting import PATIENCE_S, until

HANG_S = 0.2


class Starving:
    """The wait for a core of a thread that gets none."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began_s


def stand_still(seconds: float) -> None:
    time.sleep(seconds)


async def test_a_loop_that_hangs_ends_its_process_and_says_where_it_stands(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    with watched_loop(HANG_S, ended.set):
        await asyncio.sleep(2 * HANG_S)
        assert not ended.is_set()
        asyncio.get_running_loop().call_soon(ended.wait, PATIENCE_S)
        await asyncio.sleep(0.01)
    assert ended.is_set()
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "the event loop hangs" in record.getMessage() and "wait" in record.getMessage()


async def test_a_loop_that_waits_for_a_core_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "CoreWait", Starving)
    ended = threading.Event()
    with watched_loop(HANG_S, ended.set):
        asyncio.get_running_loop().call_soon(stand_still, 5 * HANG_S)
        await asyncio.sleep(0.01)
        assert not ended.is_set()


async def test_nobody_watches_after_the_end() -> None:
    ended = threading.Event()
    with watched_loop(HANG_S, ended.set):
        await asyncio.sleep(0.01)
    stand_still(5 * HANG_S)
    assert not ended.is_set()


async def test_a_replica_is_watched_from_its_start_to_its_end() -> None:
    def watching() -> bool:
        return any(thread.name == "watch" and thread.is_alive() for thread in threading.enumerate())

    lifetime, seen = Lifetime(), list[bool]()

    async def opening() -> None:
        seen.append(watching())

    await lifetime.start(opening())
    seen.append(watching())
    await lifetime.end()
    assert seen == [False, True]
    await until(lambda: not watching())
