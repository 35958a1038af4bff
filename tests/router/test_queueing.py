"""Tickets in the shared state, when that forgets, is away or stands still, and when a router is lost."""

import asyncio
import os
import secrets
import signal

import pytest

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import EmbeddedRedis
from policies.errors import StateStoreError
from router import redis_store
from router.codec import RequestSize
from router.redis_store import connect
from tests.fakes import FakeRequest
from tests.gate import Gate
from tests.router.service import HEARTBEAT_S, Service, begun, over, request, requests, timed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)


async def test_a_router_that_dies_has_its_slots_released_and_its_queue_forgotten(service: Service) -> None:
    replica = await service.replica(slots=2, lease_s=0.5)
    victim, survivor = [await service.front_end(silence_s=0.5) for _ in range(2)]
    await victim.ask_many(5, 10_000)
    await until(lambda: replica.engine.held >= 2)  # more where the way there took longer than the lease
    await victim.die()
    service.front_ends.remove(victim)
    await service.finish(await survivor.ask_many(4))


async def test_a_router_that_leaves_takes_its_queue_with_it(service: Service) -> None:
    leaver, survivor = [await service.front_end(silence_s=3600.0) for _ in range(2)]
    await leaver.ask_many(5, 10_000)
    await leaver.close()
    service.front_ends.remove(leaver)
    replica = await service.replica(slots=2)
    await service.finish(await survivor.ask_many(4))
    assert replica.engine.taken == 4


async def test_a_request_that_no_replica_takes_fails_in_the_end(service: Service) -> None:
    front_end = await service.front_end(max_wait_s=0.2)
    answer = await front_end.ask(request())
    await until(lambda: answer.outcome == "error")
    assert str(answer.timing.unserved) == "no replica took it within 0.2 s"
    await service.is_empty()


async def test_lost_notices_are_found_by_the_heartbeat(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    front_end.task("listen").cancel()
    replica.engine.resume()
    await service.finish(answers)


async def test_it_listens_again_after_its_subscription_was_cut(redis_url: str, service: Service) -> None:
    _, front_end = await service.both(slots=1)
    admin = connect(redis_url)
    answers = []
    for _ in range(3):
        answers += await front_end.ask_many(3)
        await admin.client_kill_filter(_type="pubsub")
    await service.finish(answers)
    await admin.aclose()


async def test_a_flushed_redis_loses_nothing(redis_url: str, service: Service) -> None:
    for _ in range(2):
        await service.replica(slots=2)
    front_ends = [await service.front_end() for _ in range(2)]
    answers = [answer for front_end in front_ends for answer in await front_end.ask_many(10, 40)]
    await until(lambda: any(len(answer.tokens) > 10 for answer in answers))
    admin = connect(redis_url)
    await admin.flushall()
    await admin.aclose()
    answers += await (await service.front_end()).ask_many(4)  # one that comes after the flush reaches those from before
    await service.finish(answers)
    assert [replica.engine.most_held for replica in service.replicas] == [2, 2]


async def test_a_redis_that_comes_back_empty_loses_nothing() -> None:
    port, password = free_port(), secrets.token_urlsafe(16)
    server = EmbeddedRedis(port, password)
    service = Service(server.url)
    for _ in range(2):
        await service.replica(slots=2)
    front_end = await service.front_end()
    answers = await front_end.ask_many(12, 60)
    await until(lambda: any(len(answer.tokens) > 5 for answer in answers))
    server.close()
    await until(lambda: sum(answer.outcome is not None for answer in answers) >= 4)  # what runs is not disturbed
    server = EmbeddedRedis(port, password)
    await service.finish(answers)
    await service.close()
    server.close()


async def test_while_redis_is_away_new_requests_use_the_capacity_known_last(gate: Gate, parted: Service) -> None:
    replicas = [await parted.replica(slots=3) for _ in range(2)]
    front_end = await parted.front_end()
    for replica in replicas:  # none is over before the router knows of all
        replica.engine.pause()
    first = await front_end.ask_many(4, 200)
    await until(lambda: sum(replica.engine.held for replica in replicas) == 4)
    await until(lambda: not front_end.client.snapshot.waiting and front_end.running == 4)
    gate.shut()
    for replica in replicas:
        replica.engine.resume()
    more = await asyncio.gather(*(front_end.ask(request(20)) for _ in range(10)))
    await over(more)
    await until(lambda: not front_end.client.queueing.is_cut_off)
    late = await asyncio.gather(*(front_end.ask(request(60)) for _ in range(10)))
    await until(lambda: any(answer.tokens for answer in late))
    assert max(replica.engine.most_held for replica in replicas) <= 3
    await gate.open()
    await parted.finish([*first, *more, *late])


async def test_what_waited_when_redis_went_away_is_served_without_it(gate: Gate, parted: Service) -> None:
    replica, front_end = await parted.both(slots=2)
    answers = await front_end.ask_at_once(replica, requests(8, 60), held=2)
    await until(lambda: sum(bool(answer.tokens) for answer in answers) == 2)
    gate.shut()
    await over(answers)
    await gate.open()
    await parted.finish(answers)
    assert replica.engine.taken == 8


async def test_what_is_cancelled_while_redis_is_away_leaves_every_slot_to_others(gate: Gate, parted: Service) -> None:
    """Those that run on one connection or another, and those that wait."""
    for _ in range(2):
        await parted.replica(slots=3)
    front_end = await parted.front_end()
    await begun(await front_end.ask_many(6, 5000))
    await until(lambda: front_end.running == 6)
    gate.shut()
    waiting = await front_end.ask_many(4, 5000)
    await front_end.cancel(*front_end.answers.values())
    assert not front_end.does("cancel"), "all are told at once"
    await begun(await front_end.ask_many(6, 2000))
    await front_end.cancel(*front_end.answers.values())
    assert not any(answer.tokens for answer in waiting)
    await gate.open()


@pytest.mark.parametrize("known", [True, False], ids=["when all know", "before anybody knows"])
async def test_a_replica_lost_while_redis_is_away_loses_nothing(gate: Gate, parted: Service, known: bool) -> None:
    victim, _ = [await parted.replica() for _ in range(2)]
    front_end = await parted.front_end()
    await begun(answers := await front_end.ask_many(8, 100))
    gate.shut()
    if known:
        answers += await front_end.ask_many(2, 20)
    await victim.die()
    await over(answers)
    await gate.open()
    await parted.finish(answers)


async def test_a_redis_that_is_back_while_what_waits_is_taken_along_costs_nobody_an_answer(
    gate: Gate, parted: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts are hashed in a thread meanwhile."""
    replica, front_end = await parted.both(slots=1)
    replica.engine.pause()
    answers = await front_end.ask_many(2)
    await replica.holds(1)
    front_end.task("heartbeat").cancel()
    queueing, sized = front_end.client.queueing, front_end.client.caches.sized

    async def slowly_sized(asked: FakeRequest) -> RequestSize:
        if queueing.is_alone:
            await gate.open()
            await queueing._beat()
        return await sized(asked)

    monkeypatch.setattr(front_end.client.caches, "sized", slowly_sized)
    gate.shut()
    answers += await front_end.ask_many(1)
    front_end.client.repeat(front_end.client._heartbeat, "heartbeat")  # a notice may have come to no subscription
    replica.engine.resume()
    await parted.finish(answers)


async def test_a_new_request_does_not_wait_for_a_redis_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 10 * PATIENCE_S)
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    service = Service(server.url)
    _, front_end = await service.both()
    await service.finish(first := await front_end.ask_many(2))
    os.kill(server.pid, signal.SIGSTOP)
    try:
        second = await asyncio.wait_for(front_end.ask_many(2), PATIENCE_S)
        await over(second)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await service.finish([*first, *second])
    await service.close()
    server.close()


@pytest.mark.slow
async def test_a_class_that_was_full_when_redis_went_away_is_asked_again(gate: Gate, parted: Service) -> None:
    front_end = await parted.front_end(max_waiting=2)
    replica = await parted.replica(slots=1)
    replica.engine.pause()  # the first is not over before the router knows that the class is full
    running = await front_end.ask_many(3, 200)
    await until(lambda: replica.engine.held == 1 and front_end.client.entrance.room("standard") == 0)
    gate.shut()
    replica.engine.resume()
    await until(lambda: front_end.client.entrance.room("standard") > 0)
    await over(running)
    await over(more := await front_end.ask_many(1))
    assert replica.engine.taken == 4
    await gate.open()
    await parted.finish([*running, *more])


@pytest.mark.slow
async def test_without_redis_a_new_request_is_refused_in_words() -> None:
    server = EmbeddedRedis(free_port(), secrets.token_urlsafe(16))
    service = Service(server.url)
    front_end = await service.front_end()
    await until(lambda: not front_end.client.queueing.is_cut_off)
    server.close()
    with pytest.raises(StateStoreError, match="Redis"):
        await front_end.ask(request())
    assert not front_end.client.ledger
    await until(lambda: front_end.client.queueing.is_cut_off)
    timing = timed()
    with pytest.raises(StateStoreError):
        front_end.client.check_room("standard", 1, timing)
    assert timing.outcome == "error"
    await service.close()


@pytest.mark.slow
async def test_a_redis_that_stands_still_for_a_while_doubles_nothing(redis_url: str, service: Service) -> None:
    replica, front_end = await service.replica(slots=4, lease_s=3600.0), await service.front_end()
    admin = connect(redis_url)
    asking = []
    for _ in range(3):
        await admin.client_pause(round(4000 * HEARTBEAT_S))
        asking.append(asyncio.create_task(front_end.ask_many(6)))
        await asyncio.sleep(6 * HEARTBEAT_S)
    answers = [answer for batch in await asyncio.gather(*asking) for answer in batch]
    await service.finish(answers)
    assert (replica.engine.taken, replica.engine.most_held) == (18, 4)
    await admin.aclose()
