import asyncio

from deployments.serving.shared_call import SharedCall
from tests.fakes import ManualClock


class Page:
    """Counts how often it is made, each time when `go_on` is set."""

    def __init__(self) -> None:
        self.made, self.broken, self.go_on = 0, False, asyncio.Event()
        self.go_on.set()

    async def make(self) -> int:
        self.made += 1
        number = self.made
        await self.go_on.wait()
        if self.broken:
            raise RuntimeError("broken")
        return number


async def test_all_who_ask_within_a_second_get_one_page_and_later_a_new_one() -> None:
    page, clock = Page(), ManualClock()
    shared = SharedCall(page.make, 1.0, clock)
    assert await asyncio.gather(*(shared.get() for _ in range(50))) == [1] * 50
    clock.advance_to(0.99)
    assert await shared.get() == 1
    clock.advance_to(1.0)
    assert await shared.get() == 2


async def test_the_age_of_a_page_counts_from_its_beginning() -> None:
    page, clock = Page(), ManualClock()
    shared = SharedCall(page.make, 1.0, clock)
    page.go_on.clear()
    first = asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    clock.advance_to(2.0)
    second = asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    page.go_on.set()
    assert (await first, await second) == (1, 1)
    assert await shared.get() == 2


async def test_who_leaves_takes_the_page_from_nobody() -> None:
    page = Page()
    shared = SharedCall(page.make, 1.0, ManualClock())
    page.go_on.clear()
    leaving, staying = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    page.go_on.set()
    assert await staying == 1


async def test_a_failure_is_told_to_all_who_wait_and_tried_again_for_the_next() -> None:
    page = Page()
    shared = SharedCall(page.make, 1.0, ManualClock())
    page.broken = True
    failures = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert [type(failure) for failure in failures] == [RuntimeError, RuntimeError]
    page.broken = False
    assert await shared.get() == 2
