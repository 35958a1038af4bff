"""What a router owes the shared state, over a store that fails like one over a network."""

from collections.abc import Sequence

import pytest

from policies.errors import StateStoreError
from policies.router.admission import Quota, Settlement
from router.admission import Tenant
from router.memory_store import MemoryStateStore
from router.settlements import MAX_IN_A_CALL, Bill, Settlements
from tests.fakes import ManualClock

TENANT = Tenant(name="t", tokens_per_minute=60)


class Unreliable(MemoryStateStore):
    """`loses` replies to calls that it obeyed; while it `is_away` it obeys none."""

    def __init__(self) -> None:
        super().__init__(ManualClock().now)
        self.loses = self.is_away = False
        self.calls: list[int] = []  # the settlements in each

    async def settle(self, router_id: str, number: int, settlements: Sequence[Settlement]) -> None:
        if self.is_away:
            raise StateStoreError("away")
        self.calls.append(len(settlements))
        await super().settle(router_id, number, settlements)
        if self.loses:
            raise StateStoreError("its reply was lost")

    def owed(self, name: str = "tokens_per_minute of t") -> float:
        return self._allowances.rested(name, self._now()).owed_s  # at a token a second


def settlements() -> tuple[Settlements, Unreliable]:
    store = Unreliable()
    return Settlements("a", store), store


def bill(charged_tokens: float | None = 30.0) -> Bill:
    made = Bill.of(TENANT, 10, 30.0)
    assert made is not None
    made.charged_tokens = charged_tokens
    return made


async def failing(mine: Settlements) -> None:
    with pytest.raises(StateStoreError):
        await mine.send()


async def test_a_bill_is_settled_once_however_often_one_asks() -> None:
    mine, store = settlements()
    long = bill()
    for output_tokens, is_over in ((5, False), (20, False), (21, False), (100, False), (100, True), (100, True)):
        mine.settle(long, output_tokens, is_over=is_over)
    await mine.send()
    await mine.send()
    assert (store.owed(), store.calls) == (80.0, [1])


async def test_while_an_answer_goes_on_nothing_comes_back() -> None:
    mine, store = settlements()
    await store.settle("before", 1, [Settlement(name="tokens_per_minute of t", cost=30.0, per_s=1.0)])
    short = bill()
    mine.settle(short, 5, is_over=False)
    await mine.send()
    assert store.owed() == 30.0
    mine.settle(short, 5)
    await mine.send()
    assert store.owed() == 15.0


async def test_an_answer_that_began_anew_is_charged_for_what_it_sent_in_the_end() -> None:
    mine, store = settlements()
    moved = bill()
    mine.settle(moved, 500, is_over=False)
    mine.settle(moved, 40)
    await mine.send()
    assert store.owed() == 20.0


async def test_nothing_follows_where_nobody_knows_whether_it_was_charged() -> None:
    mine, store = settlements()
    mine.settle(bill(None), 500)
    await mine.send()
    assert store.calls == []


async def test_a_lost_reply_is_asked_for_again_and_what_came_since_goes_with_it() -> None:
    mine, store = settlements()
    store.loses = True
    mine.settle(bill(), 100)
    await failing(mine)
    mine.settle(bill(), 100)
    await failing(mine)
    store.loses = False
    await mine.send()
    assert (store.owed(), store.calls) == (160.0, [1, 1, 1, 1])


async def test_what_waits_while_the_shared_state_is_away_is_as_long_as_there_are_keys() -> None:
    mine, store = settlements()
    store.is_away = True
    for _ in range(1000):
        mine.settle(bill(), 100)
        await failing(mine)
    store.is_away = False
    await mine.send()
    assert (store.owed(), store.calls) == (80_000.0, [1, 1])


async def test_no_call_is_longer_than_redis_can_bear() -> None:
    mine, store = settlements()
    for number in range(2 * MAX_IN_A_CALL + 1):
        mine.add(Quota(name=f"k{number}", cost=0.0, per_s=1.0, burst=1.0), 1.0)
    for _ in range(4):
        await mine.send()
    assert store.calls == [MAX_IN_A_CALL, MAX_IN_A_CALL, 1]
    assert all(store.owed(f"k{number}") == 1.0 for number in range(2 * MAX_IN_A_CALL + 1))


async def test_the_last_are_sent_at_the_end_and_what_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    mine, store = settlements()
    mine.settle(bill(), 100)
    await mine.close()
    assert store.owed() == 80.0
    store.is_away = True
    mine.settle(bill(), 100)
    await mine.close()
    assert "what 1 keys took" in caplog.text


async def test_at_the_end_those_of_all_keys_are_sent() -> None:
    mine, store = settlements()
    for number in range(2 * MAX_IN_A_CALL + 1):
        mine.add(Quota(name=f"k{number}", cost=0.0, per_s=1.0, burst=1.0), 1.0)
    await mine.close()
    assert store.calls == [MAX_IN_A_CALL, MAX_IN_A_CALL, 1]
