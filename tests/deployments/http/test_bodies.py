"""Bodies are read whole before anything sees them: each bounded, all together, and in a bounded time."""

import asyncio
from collections.abc import Iterable
from http import HTTPStatus

import pytest
from starlette.types import Message

from deployments.http.bodies import ClientLeftError, RequestBodies
from deployments.http.errors import HttpError
from deployments.http.in_process import replayed
from tests.deployments.bodies import request_bodies
from tests.waiting import until


class Client:
    """Sends parts of a body, and then nothing until it is told to go on."""

    def __init__(self, parts: Iterable[bytes], *, ends: bool = False) -> None:
        self._parts, self._ends = list(parts), ends
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        for number, part in enumerate(self._parts, start=1):
            more = not (ends and number == len(self._parts))
            self.messages.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def receive(self) -> Message:
        return await self.messages.get()

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


async def read(bodies: RequestBodies, client: Client) -> bytes:
    async with bodies.reading(client.receive) as body:
        return body.content


async def test_a_body_that_comes_in_parts_is_whole() -> None:
    bodies = request_bodies()
    assert await read(bodies, Client([b'{"a"', b": 1}"], ends=True)) == b'{"a": 1}'
    assert bodies.buffered_bytes == 0


async def test_a_body_that_never_ends_is_given_up_after_its_time() -> None:
    bodies = request_bodies(timeout_s=0.05)
    with pytest.raises(HttpError, match="0.05 s") as refused:
        await read(bodies, Client([b"a" * 4_000]))
    assert (refused.value.status, bodies.buffered_bytes) == (HTTPStatus.REQUEST_TIMEOUT, 0)


async def test_of_bodies_that_fill_all_room_the_largest_unfinished_one_gives_way() -> None:
    """Two hundred unfinished bodies of four megabytes kept as much memory for as long as they liked."""
    bodies = request_bodies(max_buffered_bytes=100_000)
    slow = [asyncio.create_task(read(bodies, Client([b"a" * 30_000]))) for _ in range(3)]
    await until(lambda: bodies.buffered_bytes == 90_000)
    assert await read(bodies, Client([b'"' + b"b" * 20_000 + b'"'], ends=True))
    done, waiting = await asyncio.wait(slow, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
    (gave_way,) = done
    with pytest.raises(HttpError, match="max_buffered_bytes") as refused:
        await gave_way
    assert (refused.value.status, bodies.buffered_bytes) == (HTTPStatus.SERVICE_UNAVAILABLE, 60_000)
    with pytest.raises(HttpError, match="max_buffered_bytes"):
        await read(bodies, Client([b"c" * 50_000]))
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    assert bodies.buffered_bytes == 0


async def test_a_body_may_come_in_the_very_moment_in_which_the_largest_is_given_up() -> None:
    bodies = request_bodies(max_buffered_bytes=100_000)
    largest = asyncio.create_task(read(bodies, Client([b"a" * 60_000])))
    await until(lambda: bodies.buffered_bytes == 60_000)
    (incoming,) = bodies._incoming
    other, loop, taken = type(incoming)(), asyncio.get_running_loop(), asyncio.Event()

    def take() -> None:
        assert incoming.deadline is not None and incoming.deadline.expired() and not largest.done()
        bodies._incoming.add(other)
        bodies._take(other, b"b" * 50_000)
        taken.set()

    incoming.deadline.reschedule(0)  # type: ignore[union-attr]
    loop.call_at(1e-9, take)
    await asyncio.wait_for(taken.wait(), 10)
    with pytest.raises(HttpError, match="not whole within"):
        await largest
    assert bodies.buffered_bytes == 50_000


async def test_what_is_served_counts_until_its_end() -> None:
    bodies = request_bodies(max_buffered_bytes=10_000)
    async with bodies.reading(Client([b'"' + b"a" * 8_000 + b'"'], ends=True).receive):
        assert bodies.buffered_bytes == 8_002
        with pytest.raises(HttpError):
            await read(bodies, Client([b"b" * 3_000]))
    assert bodies.buffered_bytes == 0


async def test_a_client_that_leaves_in_the_middle_is_not_waited_for() -> None:
    bodies, client = request_bodies(), Client([b"a" * 100])
    reading = asyncio.create_task(read(bodies, client))
    client.leave()
    with pytest.raises(ClientLeftError):
        await reading
    assert bodies.buffered_bytes == 0


async def test_a_body_that_asks_for_too_much_is_refused_however_large_it_is() -> None:
    bodies = request_bodies()
    for filler in (b"", b" " * 100_000):
        body = b'{"stop": [' + b",".join([b'"a"'] * 65) + b"]}" + filler
        with pytest.raises(HttpError, match="stop has 65 entries") as refused:
            await read(bodies, Client([body], ends=True))
        assert refused.value.status == HTTPStatus.BAD_REQUEST
    assert bodies.buffered_bytes == 0


async def test_after_the_body_comes_what_its_client_does_next() -> None:
    client = Client([])
    receive = replayed(b"{}", client.receive)
    assert await receive() == {"type": "http.request", "body": b"{}", "more_body": False}
    client.leave()
    assert await receive() == {"type": "http.disconnect"}
