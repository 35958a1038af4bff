"""Questions of one turn of the event loop go in one call."""

import asyncio
from collections.abc import Sequence

import pytest

from router.one_call import OneCall
from tests.waiting import until


class Calls:
    """Answers each number with its double, once it may."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.error: Exception | None = None
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, questions: Sequence[int]) -> Sequence[int]:
        self.made.append(list(questions))
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return [2 * each for each in questions]


async def test_a_wave_is_asked_in_as_few_calls_as_may_hold_it() -> None:
    calls = Calls()
    together = OneCall(calls, most=3)
    assert await asyncio.gather(*map(together.ask, range(7))) == [2 * each for each in range(7)]
    assert calls.made == [[0, 1, 2], [3, 4, 5], [6]]
    assert await together.ask(8) == 16  # one that comes alone waits for no other
    assert calls.made[-1] == [8]


async def test_who_left_before_the_call_is_not_asked_for_and_who_left_after_it_harms_no_other() -> None:
    calls = Calls()
    together = OneCall(calls, most=8)
    asking = [asyncio.ensure_future(together.ask(each)) for each in range(3)]
    await asyncio.sleep(0)
    asking[0].cancel()
    calls.may.clear()
    await until(lambda: bool(calls.made))
    asking[1].cancel()
    calls.may.set()
    assert await asking[2] == 4
    assert calls.made == [[1, 2]]
    assert all(each.cancelled() for each in asking[:2])


async def test_an_error_is_that_of_all_who_asked() -> None:
    calls = Calls()
    calls.error = OSError("away")
    together = OneCall(calls, most=8)
    results = await asyncio.gather(*map(together.ask, range(3)), return_exceptions=True)
    assert results == [calls.error] * 3
    calls.error = None
    with pytest.raises(asyncio.TimeoutError):
        calls.may.clear()
        await asyncio.wait_for(together.ask(1), 0.01)
    calls.may.set()
    assert await together.ask(2) == 4


async def test_what_must_come_after_a_call_can_wait_for_it_also_when_who_asked_has_left() -> None:
    calls = Calls()
    together = OneCall(calls, most=8)
    await together.answered()
    asking = asyncio.ensure_future(together.ask(1))
    calls.may.clear()
    await until(lambda: bool(calls.made))
    asking.cancel()
    after = asyncio.ensure_future(together.answered())
    await asyncio.sleep(0)
    assert not after.done()
    calls.may.set()
    await after
