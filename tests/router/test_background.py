import asyncio

import pytest

from policies.errors import StateStoreError
from router.background import BackgroundTasks
from tests.waiting import until


async def fail(error: Exception) -> None:
    raise error


async def test_a_failure_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failed: list[str] = []
    tasks = BackgroundTasks(failed.append)
    tasks.spawn(fail(ValueError("broken")), "work")
    await until(lambda: failed == ["work"])
    assert "broken" in caplog.text


async def test_a_task_that_ends_well_or_is_cancelled_is_no_failure() -> None:
    failed: list[str] = []
    tasks = BackgroundTasks(failed.append)
    tasks.spawn(asyncio.sleep(0), "work")
    tasks.spawn(asyncio.sleep(60), "work")
    await asyncio.sleep(0.01)
    await tasks.close()
    assert failed == []


async def test_repeated_work_goes_on_after_every_failure() -> None:
    calls: list[int] = []

    async def work() -> None:
        calls.append(len(calls))
        if len(calls) % 3:
            await fail(ValueError("broken") if len(calls) % 3 == 1 else StateStoreError("away"))

    failed: list[str] = []
    tasks = BackgroundTasks(failed.append)
    tasks.repeat(work, 0.0, "work")
    async with asyncio.timeout(30):
        while True:
            if len(calls) >= 9:
                break
            await asyncio.sleep(0.001)
    await tasks.close()
    assert len(failed) == sum(call % 3 == 0 for call in calls)  # the shared state being away is not a failure


async def test_close_ends_what_runs() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    tasks = BackgroundTasks(list[str]().append)
    tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    await tasks.close()
    assert ended.is_set()
