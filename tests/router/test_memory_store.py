"""Turns among API keys over time, by a clock that the test moves. What both stores do is in tests/contracts."""

import math
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.router.order import Band, banded, deadline_keys
from policies.router.tickets import Ticket
from router.memory_store import MemoryStateStore
from router.state_store import ReplicaInfo

TTFT_S = 2.0


@dataclass
class Clock:
    now_s: float = 0.0

    def now(self) -> float:
        return self.now_s


@dataclass
class Replica:
    """One slot; each request takes the seconds of its work."""

    clock: Clock = field(default_factory=Clock)
    runs: str = ""

    def __post_init__(self) -> None:
        self.store = MemoryStateStore(self.clock.now)

    async def begin(self) -> None:
        info = ReplicaInfo(replica_id="r", host="h", port=1, max_model_len=9, silence_s=math.inf)
        await self.store.register_replica(info, 0)

    async def next(self, waiting: list[str]) -> str:
        """What it starts after what it runs; the slot comes free only when all those are queued."""
        await self.store.release("r", [self.runs])
        await self.store.beat_replica("r", 1, math.inf)
        places = await self.store.locate(waiting)
        self.runs = next((name for name, place in zip(waiting, places, strict=True) if place), "")
        return self.runs


def late(request_id: str, api_key: str, work_s: float) -> Ticket:
    key = banded(Band.LATE, 1e9)
    return Ticket(
        request_id=request_id,
        bin_index=0,
        deadline_key=key,
        late_key=key,
        work_s=work_s,
        router_id="a",
        api_key=api_key,
    )


works = st.floats(0.01, 8.0)


@given(
    ours=st.lists(works, min_size=12, max_size=12),
    theirs=st.lists(works, min_size=12, max_size=12),
    started_before=st.floats(0.0, 100.0),
    pauses_s=st.lists(st.sampled_from([0.0, 1.0, 61.0]), min_size=24, max_size=24),
)
async def test_what_two_keys_were_served_differs_by_one_requests_work_at_most(
    ours: list[float], theirs: list[float], started_before: float, pauses_s: list[float]
) -> None:
    """Once it has not differed by more. From a greater difference on it shrinks with every start."""
    replica, works_s = Replica(), dict[str, float]()
    await replica.begin()
    await replica.store.beat_router("a", math.inf)
    await replica.store.enqueue(late("before", "ours", started_before))
    await replica.next(["before"])
    for key, each in (("ours", ours), ("theirs", theirs)):
        for number, work_s in enumerate(each):
            works_s[f"{key} {number:02}"] = work_s
            await replica.store.enqueue(late(f"{key} {number:02}", key, work_s))
    most, gap = max(works_s.values()), started_before
    for pause_s in pauses_s:
        replica.clock.now_s += pause_s
        await replica.store.beat_router("a", math.inf)
        del works_s[await replica.next(list(works_s))]
        if len({name.split()[0] for name in works_s}) == 1:
            break  # one of them has nothing left
        served_s = (await replica.store.snapshot()).served_s
        before, gap = gap, abs(served_s.get("ours", 0.0) - served_s.get("theirs", 0.0))
        assert gap <= most + 1e-9 or gap < before


async def in_time(keys: dict[str, float], *, named: bool, seconds: float = 120.0) -> dict[str, float]:
    """The share of each key's requests that starts in time, where one per second can start.

    `keys` are requests per second by key. A request that has waited for 20 s gives up.
    """
    replica, sent, kept, lots = Replica(), Counter[str](), Counter[str](), Random(0)
    await replica.begin()
    owners, deadlines_s = dict[str, str](), dict[str, float]()
    for second in range(int(seconds)):
        replica.clock.now_s = float(second)
        await replica.store.beat_router("a", math.inf)
        for owner, rate in keys.items():
            while sent[owner] < rate * (second + 1):
                name = f"{lots.random()} {owner}"  # by which those go that are due at once
                sent[owner] += 1
                owners[name], deadlines_s[name] = owner, second + TTFT_S
                key, late_key = deadline_keys(second, TTFT_S)
                await replica.store.enqueue(
                    Ticket(
                        request_id=name,
                        bin_index=0,
                        deadline_key=key,
                        late_key=late_key,
                        deadline_s=deadlines_s[name],
                        work_s=1.0,
                        router_id="a",
                        api_key=owner if named else "",
                    )
                )
        started = await replica.next(list(owners))
        kept[owners[started]] += second <= deadlines_s[started]
        gone = [name for name in owners if name == started or second > deadlines_s[name] + 20.0]
        await replica.store.cancel([name for name in gone if name != started])
        owners = {name: owner for name, owner in owners.items() if name not in gone}
    return {key: kept[key] / sent[key] for key in keys}


async def test_a_key_that_asks_for_little_is_in_time_beside_one_that_floods() -> None:
    """Ten times what can be served, and a tenth of it."""
    keys = {"flood": 10.0, "small": 0.1}
    alike = await in_time(keys, named=False)
    apart = await in_time(keys, named=True)
    assert alike["small"] < 0.3
    assert apart["small"] > 0.9  # all but the first, which came before anybody was late
    assert sum(apart[key] * rate for key, rate in keys.items()) == pytest.approx(
        sum(alike[key] * rate for key, rate in keys.items()), abs=0.02
    )
