"""In which order requests are made ready, and how long one may hold up another."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from deployments.http import in_order
from deployments.http.in_order import AT_ONCE, InOrder
from router.timing import current
from tests.deployments.bodies import asking, behind_middleware
from tests.waiting import PATIENCE_S

PIECES = 3
FOREVER_S = 10 * PATIENCE_S


class Application:
    """Makes each request ready in pieces, between which others run; notes which of them were queued, in order."""

    def __init__(self) -> None:
        self.begun = self.most_unready = 0
        self.queued: list[str] = []
        self.held, self.quick_is_queued = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, context = scope["path"].strip("/"), current.get()
        assert context is not None
        self.begun += 1
        self.most_unready = max(self.most_unready, self.begun - len(self.queued))
        for _ in range(PIECES):
            await asyncio.sleep(0)
        if name.startswith("held"):
            await self.held.wait()
        if not name.startswith("refused"):
            context.note_queued()
            self.queued.append(name)
        if name == "quick":
            self.quick_is_queued.set()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def ask_all(app: Application, *names: str) -> None:
    async with asking(behind_middleware(app)) as client:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(client.post(f"/{name}", json={}) for name in names))


async def test_the_first_are_queued_before_the_last_are_begun() -> None:
    app, names = Application(), [f"request-{number}" for number in range(4 * AT_ONCE)]
    await ask_all(app, *names)
    assert (app.queued, app.most_unready) == (names, AT_ONCE)


async def test_one_that_is_refused_lets_the_next_one_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "MOST_S", FOREVER_S)
    app = Application()
    await ask_all(app, *(f"refused-{number}" for number in range(2 * AT_ONCE)), "last")
    assert app.queued == ["last"]


async def test_those_that_take_their_time_hold_up_the_others_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_order, "MOST_S", 0.01)
    app = Application()
    slow = [f"held-{number}" for number in range(2 * AT_ONCE)]
    asked = asyncio.create_task(ask_all(app, *slow, "quick"))
    async with asyncio.timeout(PATIENCE_S):
        await app.quick_is_queued.wait()
    assert app.queued == ["quick"]
    app.held.set()
    await asked
    assert sorted(app.queued[1:]) == sorted(slow)


async def test_places_go_round_whoever_leaves_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_order, "MOST_S", FOREVER_S)
    places = InOrder()
    taken = [await places.begin() for _ in range(AT_ONCE)]
    waiting = [asyncio.create_task(places.begin()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    taken[0].end()
    taken[0].end()  # again changes nothing
    async with asyncio.timeout(PATIENCE_S):
        second = await waiting[1]
    assert not waiting[2].done()
    waiting[2].cancel()  # as its turn comes
    for place in (second, *taken[1:]):
        place.end()
    async with asyncio.timeout(PATIENCE_S):
        last = [await places.begin() for _ in range(AT_ONCE)]
    for place in last:
        place.end()
