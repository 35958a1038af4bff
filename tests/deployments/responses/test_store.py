"""Stored responses in a real Redis."""

from collections.abc import AsyncIterator, Callable

import pytest

from deployments.process.ports import free_port
from deployments.responses.store import RECORD_BYTES, Lease, NoRoomError, Place, ResponseStore, TakenError, Usage
from policies.errors import StateStoreError
from tests.deployments.responses.stores import MINE, YOURS, encoded, end_lease, stores, unstored
from tests.waiting import until_async

ONE = encoded().size
New = Callable[..., ResponseStore]


@pytest.fixture
async def new(redis_url: str, namespace: str) -> AsyncIterator[New]:
    async with stores(redis_url, namespace) as make:
        yield make


async def test_any_router_tells_what_another_has_stored_and_only_its_owner_is_told(new: New) -> None:
    one, other = new(), new()
    await one.keep(MINE, encoded())
    stored = await other.get(MINE, with_messages=True)
    assert stored is not None
    assert (stored.status, stored.response, stored.messages) == ("ended", encoded().response, encoded().messages)
    assert await other.get(YOURS) is None
    assert not await other.delete(YOURS)
    assert await other.cancel(YOURS) is None
    assert await one.get(MINE) is not None


async def test_what_is_deleted_is_gone_with_its_bytes(new: New) -> None:
    store = new()
    await store.keep(MINE, encoded())
    assert await store.usage() == Usage(1, ONE)
    assert await store.delete(MINE)
    assert not await store.delete(MINE)
    assert await store.get(MINE) is None
    assert await store.usage() == Usage(0, 0)


async def test_a_response_under_an_id_that_is_there_takes_its_place(new: New) -> None:
    store = new()
    await store.keep(MINE, encoded(size=9))
    await store.keep(MINE, encoded())
    assert await store.usage() == Usage(1, ONE)


async def test_a_response_expires_with_its_bytes(new: New) -> None:
    store = new(keep_s=0.05)
    await store.keep(MINE, encoded())

    async def is_gone() -> bool:
        return await store.get(MINE) is None and await store.usage() == Usage(0, 0)

    await until_async(is_gone)


async def test_the_oldest_go_where_all_is_full_and_of_a_full_share_that_keys_own(new: New) -> None:
    store = new(max_stored_bytes=4 * ONE, max_key_share=0.75)
    places = [Place.of_key(key, f"resp_{number}") for number, key in enumerate(["you", "me", "me", "me"])]
    for place in places:
        await store.keep(place, encoded())
    await store.keep(Place.of_key("me", "resp_4"), encoded())
    assert [await store.get(place) is not None for place in places] == [True, False, True, True]
    await store.keep(Place.of_key("third", "resp_5"), encoded())
    assert [await store.get(place) is not None for place in places] == [False, False, True, True]
    assert await store.usage() == Usage(4, 4 * ONE)


async def test_what_can_never_fit_drives_nobody_out(new: New) -> None:
    store, nobodys = new(max_stored_bytes=2 * ONE, max_key_share=0.75), Place.of_key(None, "resp_2")
    await store.keep(MINE, encoded())
    with pytest.raises(NoRoomError, match="max_stored_bytes"):
        await store.keep(YOURS, encoded(size=ONE))
    assert await store.get(MINE) is not None
    await store.keep(nobodys, encoded(size=ONE))  # without keys there are no shares
    assert await store.get(nobodys) is not None


async def test_one_in_the_background_is_told_until_its_end(new: New) -> None:
    one, other = new(), new()

    async def status() -> str | None:
        stored = await other.get(MINE)
        return stored and stored.status

    lease = Lease.of(MINE)
    await one.begin(lease, encoded("queued"))
    assert await status() == "queued"
    with pytest.raises(TakenError, match="resp_1"):
        await other.begin(Lease.of(MINE), encoded("queued"))
    assert await one.beat({lease: "in_progress"}) == set()
    assert await status() == "in_progress"
    await one.complete(lease, encoded(size=5))
    stored = await other.get(MINE, with_messages=True)
    assert stored is not None
    assert (stored.status, stored.response, stored.is_background) == ("ended", encoded(size=5).response, True)
    assert await other.usage() == Usage(1, ONE + 5)


async def test_one_that_is_cancelled_or_deleted_is_stopped_and_never_comes_back(new: New) -> None:
    one, other, second = new(), new(), Place.of_key("me", "resp_2")
    leases = [Lease.of(place) for place in (MINE, second)]
    for lease in leases:
        await one.begin(lease, encoded("queued"))
    stored = await other.cancel(MINE)
    assert stored is not None and stored.status == "cancelled"
    assert await other.delete(second)
    assert await one.beat(dict.fromkeys(leases, "in_progress")) == {*leases}
    for lease in leases:
        await one.complete(lease, encoded())
        await one.fail(lease, "too late")
    stored = await other.cancel(MINE)  # once more says the same
    assert stored is not None and stored.status == "cancelled"
    assert await other.get(second) is None


async def test_one_that_is_begun_under_an_id_that_was_deleted_is_another(new: New) -> None:
    store, first, second = new(), Lease.of(MINE), Lease.of(MINE)
    await store.begin(first, encoded("queued"))
    await store.delete(MINE)
    await store.begin(second, encoded("queued"))
    assert await store.beat({first: "in_progress", second: "queued"}) == {first}
    await store.complete(first, encoded(size=1))
    await store.fail(first, "it failed")
    await store.withdraw(first)
    stored = await store.get(MINE)
    assert stored is not None and (stored.status, stored.error) == ("queued", "")
    await store.withdraw(second)
    assert await store.get(MINE) is None and await store.usage() == Usage(0, 0)


async def test_one_whose_router_was_lost_has_failed_and_says_so(new: New) -> None:
    one, other, lease = new(), new(), Lease.of(MINE)
    await one.begin(lease, encoded("queued"))
    await end_lease(one, MINE)
    stored = await other.get(MINE)
    assert stored is not None
    assert (stored.status, "router" in stored.error) == ("failed", True)
    await one.complete(lease, encoded())  # it was not dead: its client has read that it was
    assert await other.get(MINE) == stored
    assert await one.beat({lease: "in_progress"}) == {lease}


async def test_lost_ones_that_nobody_asks_for_expire_too(new: New) -> None:
    store = new(keep_s=0.05)
    await store.begin(Lease.of(MINE), encoded("queued"))
    await end_lease(store, MINE)

    async def is_gone() -> bool:
        return await store.usage() == Usage(0, 0)

    await until_async(is_gone)


async def test_one_that_is_being_made_gives_way_to_none(new: New) -> None:
    store, others = (
        new(max_stored_bytes=2 * ONE, max_key_share=1.0),
        [Place.of_key("me", f"resp_{number}") for number in range(2, 5)],
    )
    lease = Lease.of(MINE)
    await store.begin(lease, encoded("queued"))
    for place in others:
        await store.keep(place, encoded())
    assert [await store.get(place) is not None for place in (MINE, *others)] == [True, False, False, True]
    await store.begin(Lease.of(others[0]), encoded("queued"))
    with pytest.raises(NoRoomError, match="no room"):
        await store.begin(Lease.of(others[1]), encoded("queued"))
    with pytest.raises(NoRoomError):
        await store.complete(lease, encoded(size=RECORD_BYTES))
    assert unstored(store, "room") == 2
    stored = await store.get(MINE)
    assert stored is not None
    assert (stored.status, "room" in stored.error) == ("failed", True)


async def test_a_redis_that_is_away_is_said_so_and_not_tried_for_a_moment_unasked(namespace: str) -> None:
    async with stores(f"redis://127.0.0.1:{free_port()}/0", namespace) as make:
        store = make()
        for tries, why in ((False, "Redis: "), (False, "a moment ago"), (True, "Redis: ")):
            with pytest.raises(StateStoreError, match=why):
                await store.keep(MINE, encoded(), tries=tries)
        assert unstored(store, "redis") == 3
