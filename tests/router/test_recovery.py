"""Requests that cannot stay where they are: recalled for more urgent ones, or on a replica that is lost or leaves."""

import asyncio
import socket

import msgspec
import pytest

from policies.errors import ReplicaLostError
from policies.router.tickets import Assignment
from router import wire
from router.ledger import State
from router.trail import Trail
from tests.fakes import undisturbed
from tests.router.service import (
    HEARTBEAT_S,
    Answer,
    FrontEnd,
    Line,
    Replica,
    Service,
    begun,
    info,
    over,
    request,
    requests,
    timed,
    told,
)
from tests.waiting import PATIENCE_S, until, until_async

pytestmark = pytest.mark.timeout(120)


# Work that fills idle capacity


async def ask_offline(front_end: FrontEnd, replica: Replica, number: int, *, replays: bool = False) -> list[Answer]:
    """Long answers in the middle of their streams. Slow ones: a Redis that is busy keeps urgent requests from their
    replica for a while, and must not find these over. `hurry` when it does not matter any more."""
    replica.engine.step_s = 0.02
    answers = [await front_end.ask(request(600, replays=replays), "offline") for _ in range(number)]
    await begun(answers)
    return answers


def hurry(replica: Replica) -> None:
    replica.engine.step_s = 0.001


async def test_offline_work_gives_its_slot_to_urgent_work_at_once_and_goes_on_where_it_stood(service: Service) -> None:
    replica = await service.replica(slots=3)
    one, other = [await service.front_end() for _ in range(2)]
    offline = await ask_offline(one, replica, 3)
    urgent = await other.ask_many(2)
    await over(urgent)
    assert not any(answer.outcome for answer in offline)
    hurry(replica)
    await service.finish([*urgent, *offline])
    assert one.count("requests_recalled_total", slo_class="offline") == 2


async def test_of_a_traced_request_is_noted_that_it_was_recalled_and_where_it_went_on(service: Service) -> None:
    replica, front_end = await service.replica(slots=1, step_s=0.02), await service.front_end()
    (timing := timed()).trail = trail = Trail(
        {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    )
    offline = await front_end.ask(request(600), "offline", timing=timing)
    await begun([offline])
    await over(urgent := await front_end.ask_many(1))
    hurry(replica)
    await service.finish([*urgent, offline])
    first, second = trail.stays
    assert (first.because, first.way, second.because, second.way) == ("recalled", "resumed", None, None)
    assert first.first_s is not None and second.first_s is not None and second.sent_tokens > 0
    assert first.left_s is not None and first.sent_s <= first.first_s <= first.left_s <= second.sent_s <= second.first_s


async def test_urgent_work_that_finds_a_free_slot_disturbs_nobody(service: Service) -> None:
    replica, front_end = await service.both()
    offline = await ask_offline(front_end, replica, 3)
    await over(urgent := await front_end.ask_many(1))
    hurry(replica)
    await service.finish([*urgent, *offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 0


async def test_what_cannot_be_continued_exactly_keeps_its_slot(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    (offline,) = await ask_offline(front_end, replica, 1, replays=True)
    urgent = await front_end.ask_many(2)
    hurry(replica)
    await until(lambda: any(answer.tokens for answer in urgent))
    assert offline.outcome is not None
    await service.finish([*urgent, offline])


async def test_a_request_loses_its_slot_only_so_often(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    (offline,) = await ask_offline(front_end, replica, 1)
    answers = []
    for number in range(6):
        if number == 3:
            hurry(replica)  # from now on it keeps its slot, to its end
        seen = len(offline.tokens)
        await over(urgent := await front_end.ask_many(1))
        await until(lambda least=seen: len(offline.tokens) > least or offline.outcome)  # type: ignore[misc]
        answers += urgent
    await service.finish([*answers, offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 3


async def test_a_recall_whose_notice_is_lost_is_found_with_the_heartbeat(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    (offline,) = await ask_offline(front_end, replica, 1)
    front_end.task("listen").cancel()
    await over(urgent := await front_end.ask_many(1))
    assert offline.outcome is None
    hurry(replica)
    await service.finish([*urgent, offline])


# When a replica is lost


async def test_requests_that_had_sent_nothing_start_anew(service: Service) -> None:
    victim, front_end = await service.both()
    victim.engine.pause()
    answers = await front_end.ask_many(4)
    await victim.holds(4)
    await victim.die()
    await service.replica()
    await service.finish(answers)
    assert front_end.count("requests_recovered_total", way="requeued") == 4


@pytest.mark.parametrize(("replays", "way"), [(False, "resumed"), (True, "replayed")])
async def test_requests_survive_one_replica_after_another(service: Service, replays: bool, way: str) -> None:
    victim, front_end = await service.both()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=replays), held=4)
    for tokens in (5, 20, 35):
        await begun(answers, tokens)
        await victim.die()
        victim = await service.replica()
    await service.finish(answers)
    assert front_end.count("requests_recovered_total", way=way) == 12


async def test_what_goes_on_after_a_loss_starts_before_all_that_wait(service: Service) -> None:
    lost, front_end = await service.both(slots=1)
    answer = await front_end.ask(request(600))
    await begun([answer])
    waiting = [await front_end.ask(request(), "soon") for _ in range(3)]
    await lost.die()
    other = await service.replica(slots=1)
    other.engine.pause()
    await other.holds(1)
    assert told(other, answer.asked) == (None, True), "it has no first token to come"
    other.engine.resume()
    await service.finish([answer, *waiting])
    assert answer.timing.last_token_s is not None
    assert all(each.timing.first_token_s > answer.timing.last_token_s for each in waiting)  # type: ignore[operator]


async def just_lost(front_end: FrontEnd) -> None:
    """The connection to the first replica is closed, and its reader has not woken yet."""
    connection = front_end.client.connections.get("r0")
    assert connection is not None
    connection._writer.transport.abort()
    await asyncio.sleep(0)
    assert front_end.client.connections.get("r0") is connection


async def test_a_request_for_a_connection_that_broke_a_moment_ago_goes_on(service: Service) -> None:
    replica, front_end = await service.both()
    replica.engine.pause()
    answer = await front_end.ask(request())
    await replica.holds(1)
    entry = front_end.client.ledger[answer.asked.request_id]
    await just_lost(front_end)
    entry.take_back("lost", 0.0)
    entry.move(State.QUEUEING)
    front_end.client.sending.place(Assignment(entry.request_id, "r0"))
    replica.engine.resume()
    await service.finish([answer])


async def test_requests_on_a_connection_that_broke_a_moment_ago_can_be_cancelled(service: Service) -> None:
    replica, front_end = await service.both()
    replica.engine.pause()
    answers = await front_end.ask_many(2)
    await replica.holds(2)
    await just_lost(front_end)
    await front_end.cancel(*answers)
    replica.engine.resume()
    await service.is_empty()


async def test_a_connection_that_broke_a_moment_ago_is_asked_nothing(service: Service) -> None:
    _, front_end = await service.both()
    await service.finish([await front_end.ask(request())])
    connection = front_end.client.connections.get("r0")
    assert connection is not None
    await just_lost(front_end)
    with pytest.raises(ReplicaLostError, match="gone"):
        await connection.call("status", timeout_s=3600.0)


async def test_a_replica_lost_in_the_middle_of_a_replay_changes_nothing(service: Service) -> None:
    victim, front_end = await service.both()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=True), held=4)
    await begun(answers, 30)
    await victim.die()
    victim = await service.replica(step_s=0.01)
    victim.engine.pause()
    await victim.holds(4)
    victim.engine.resume()
    await asyncio.sleep(0.1)  # about ten tokens of thirty
    await victim.die()
    await service.replica()
    await service.finish(answers)


@pytest.mark.parametrize(("salt", "max_tokens"), [(1, 60), (0, 10)], ids=["other tokens", "too soon over"])
async def test_a_replay_that_differs_ends_with_an_error(service: Service, salt: int, max_tokens: int) -> None:
    victim, front_end = await service.both()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=True), held=4)
    await begun(answers, 20)
    for answer in answers:
        answer.asked.max_tokens = max_tokens  # what the other replica will be asked for
    await victim.die()
    other = await service.replica(salt=salt)
    await over(answers)
    assert {answer.outcome for answer in answers} == {"error"}
    for answer in answers:
        assert answer.tokens == answer.expected[: len(answer.tokens)]
    await service.is_empty()
    assert other.relay.healthy


async def test_an_answer_in_one_piece_begins_anew_where_a_replay_would_differ(service: Service) -> None:
    victim, front_end = await service.both()
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=True, in_one_piece=True), held=4)
    entries = list(front_end.client.ledger.values())
    await until(lambda: all(len(entry.sent) > 5 for entry in entries))
    assert not any(answer.tokens for answer in answers)
    await victim.die()
    await service.replica(salt=1)
    await over(answers)
    for answer in answers:
        assert (answer.outcome, answer.tokens) == ("length", undisturbed(answer.asked.prompt, 60, salt=1))
    assert front_end.count("output_tokens_total", slo_class="standard") == 240
    await service.is_empty()


async def test_an_answer_in_one_piece_that_can_be_resumed_is_not_computed_twice(service: Service) -> None:
    victim, front_end = await service.both()
    answer = await front_end.ask(request(60, in_one_piece=True))
    await begun([answer], 5)
    await victim.die()
    await service.replica()
    await service.finish([answer])
    assert front_end.count("requests_recovered_total", way="resumed") == 1


async def test_a_request_is_not_moved_for_ever(service: Service) -> None:
    front_end = await service.front_end(max_moves=1)
    answer = await front_end.ask(request(10_000))
    for _ in range(2):
        victim = await service.replica()
        await victim.holds(1)
        await victim.die()
    await until(lambda: answer.outcome == "error")
    await service.is_empty()


async def test_an_engine_that_dies_hands_its_requests_over_at_once(service: Service) -> None:
    victim, front_end = await service.replica(silence_s=3600.0), await service.front_end()
    await begun(answers := await front_end.ask_many(4, 60))
    victim.engine.die()
    await service.replica()
    await service.finish(answers)
    await victim.relay.drain()


async def test_requests_cancelled_while_the_loss_of_their_replica_is_told_are_not_queued_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, front_end = await service.both()
    victim.engine.pause()
    answers = await front_end.ask_many(4)
    await victim.holds(4)
    told, go_on = asyncio.Event(), asyncio.Event()
    drop = front_end.client.store.drop_replica

    async def slow(replica_id: str) -> None:
        told.set()
        await go_on.wait()
        await drop(replica_id)

    monkeypatch.setattr(front_end.client.store, "drop_replica", slow)
    await victim.die()
    await told.wait()
    await front_end.cancel(*answers)
    go_on.set()
    await until(lambda: not front_end.does("connection") and not front_end.does("requeue"))
    assert not (await service.store.snapshot()).waiting


@pytest.mark.parametrize("replays", [False, True])
async def test_an_engine_that_is_told_to_end_cuts_no_answer_short(service: Service, replays: bool) -> None:
    victim, front_end = await service.replica(), await service.front_end(silence_s=3600.0)
    answers = await front_end.ask_at_once(victim, requests(4, 60, replays=replays), held=4)
    await begun(answers, 5)
    victim.engine.end()
    await service.replica()
    await service.finish(answers)
    assert not victim.relay.healthy


@pytest.mark.parametrize("found_by_another", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_replica_that_hangs_is_left(service: Service, found_by_another: bool) -> None:
    """After its silence; or at once where another router's connection to its host broke: ours will not for long."""
    victim = await service.replica(silence_s=3600.0 if found_by_another else 0.5)
    front_end = await service.front_end()
    await begun(answers := await front_end.ask_many(4, 60))
    await victim.stop_beating()
    if found_by_another:
        await service.store.drop_replica(victim.replica_id)
    await service.replica()
    await service.finish(answers)


async def test_a_replica_that_accepts_and_says_nothing_costs_no_move(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 10 * HEARTBEAT_S)
    front_end = await service.front_end(max_moves=0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await service.store.register_replica(info("silent", port=silent.getsockname()[1]), 4, [])
        answers = await front_end.ask_many(3)
        await asyncio.sleep(4 * HEARTBEAT_S)
        await service.replica()
        await service.finish(answers)
    assert front_end.count("requests_recovered_total", way="requeued") == 0


async def test_a_replica_that_one_router_cannot_reach_serves_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of two versions, of which each reaches its own."""
    replicas = [await service.replica(version=version) for version in ("fake-1", "fake-2")]
    front_ends = [await service.front_end(version=version) for version in ("fake-1", "fake-2")]
    dropped: list[str] = []
    for front_end in front_ends:
        monkeypatch.setattr(front_end.client.store, "drop_replica", dropped.append)
    await service.finish([*await front_ends[0].ask_many(10), *await front_ends[1].ask_many(10)])
    assert [replica.engine.taken for replica in replicas] == [10, 10]
    assert any(front_end.client.connections.out_of_reach for front_end in front_ends)
    assert dropped == []


async def test_a_router_that_reaches_no_replica_though_they_live_says_so_until_it_does(service: Service) -> None:
    await service.replica(version="fake-2")
    front_end = await service.front_end(silence_s=10 * HEARTBEAT_S)
    await asyncio.sleep(12 * HEARTBEAT_S)
    assert not front_end.client.reaches_no_engine, "nothing was wanted of it"
    answers = await front_end.ask_many(2)
    await until(lambda: front_end.client.reaches_no_engine)
    await service.replica()
    await service.finish(answers)
    await until(lambda: not front_end.client.reaches_no_engine)


async def test_a_replica_that_refuses_connections_is_dead_and_no_trouble_of_the_router(service: Service) -> None:
    front_end = await service.front_end(silence_s=10 * HEARTBEAT_S)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        await service.store.register_replica(info("dead", port=closed.getsockname()[1]), 4, [])
    answers = await front_end.ask_many(2)
    await until_async(lambda: is_dropped(service, "dead"))
    assert not front_end.client.connections.out_of_reach
    await service.replica()
    await service.finish(answers)


async def is_dropped(service: Service, replica_id: str) -> bool:
    return replica_id not in (await service.store.snapshot()).replicas


async def test_a_replica_that_comes_back_and_stays_out_of_reach_holds_no_request_beyond_its_wait(
    service: Service,
) -> None:
    front_end = await service.front_end(max_wait_s=60 * HEARTBEAT_S, max_moves=0)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unreachable = info("unreachable", port=closed.getsockname()[1])
    asked_s = asyncio.get_running_loop().time()
    answers = await front_end.ask_many(3)
    async with asyncio.timeout(PATIENCE_S):
        while not all(answer.outcome for answer in answers):
            await service.store.register_replica(unreachable, 4, [])
            await asyncio.sleep(HEARTBEAT_S / 2)
    assert {answer.outcome for answer in answers} == {"error"}
    assert asyncio.get_running_loop().time() - asked_s > 59 * HEARTBEAT_S, "they were given up before their time"
    assert front_end.count("replicas_out_of_reach_total") > 0
    await service.is_empty()


async def test_a_broken_network_between_the_living_loses_nothing(service: Service) -> None:
    replica, front_end = await service.both()
    answers = await front_end.ask_many(8, 60)
    for tokens in (5, 15, 25):
        await until(lambda tokens=tokens: any(len(answer.tokens) > tokens for answer in answers))  # type: ignore[misc]
        before = set(replica.relay._writers)
        replica.hang_up()
        await until(lambda before=before: not before & replica.relay._writers)  # type: ignore[misc]
    await service.finish(answers)
    assert replica.relay.healthy


async def test_a_request_that_comes_again_while_its_old_connection_seems_alive_starts_clean(service: Service) -> None:
    replica = await service.replica()
    line = await Line.to(replica.relay.info.port)
    await service.store.register_replica(msgspec.structs.replace(replica.relay.info, port=line.port), 4, [])
    front_end = await service.front_end()
    answers = await front_end.ask_at_once(replica, requests(4, 60), held=4)
    await begun(answers, 5)
    replica.engine.step_s = 0.1  # none ends before all have come again
    line.cut_off_router()
    await until(lambda: replica.engine.taken == 8)
    replica.engine.pause()
    answers += await front_end.ask_many(4)
    line.hang_up()
    await until(lambda: len(replica.relay._writers) == 1)
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert (replica.engine.held, replica.engine.most_held, replica.engine.taken) == (4, 4, 8)
    replica.engine.step_s = 0.002
    replica.engine.resume()
    await service.finish(answers)


# When a replica leaves


async def test_a_replica_drains_before_it_leaves(service: Service) -> None:
    leaver, front_end = await service.both()
    await begun(answers := await front_end.ask_many(4, 60))
    other = await service.replica(slots=1)
    other.engine.pause()
    leaving = asyncio.create_task(leaver.leave())
    await until(lambda: front_end.client.snapshot.replicas["r0"].slots == 0)  # all know it, and not the leaver alone
    answers += await front_end.ask_many(4)
    await leaving
    await until(lambda: [answer.outcome for answer in answers] == ["length"] * 4 + [None] * 4)
    other.engine.resume()
    await service.finish(answers)
    assert (leaver.engine.taken, other.engine.taken) == (4, 4)
    assert front_end.count("requests_recovered_total", way="resumed") == 0


async def test_the_last_replicas_serve_what_waits_before_they_leave_and_are_not_counted_as_lost(
    service: Service,
) -> None:
    """Both leave at once, and neither can count on the other; some requests have not arrived when they are told to."""
    leavers, front_end = [await service.replica(slots=2) for _ in range(2)], await service.front_end()
    answers = await front_end.ask_many(12)
    await asyncio.gather(*(leaver.relay.drain() for leaver in leavers))
    for leaver in leavers:
        await leaver.relay.close()
    await service.finish(answers)
    assert sum(leaver.engine.taken for leaver in leavers) == 12
    await until(lambda: not front_end.does("connection"))
    assert front_end.count("replicas_lost_total") == 0


async def test_the_last_replica_serves_what_waits_no_longer_than_it_may(service: Service) -> None:
    leaver, front_end = await service.both(slots=1)
    leaver.engine.pause()
    answers = await front_end.ask_many(3)
    await leaver.holds(1)
    draining = asyncio.create_task(leaver.relay.drain(serving_s=0.0))
    await until(lambda: front_end.client.snapshot.replicas["r0"].slots == 0)
    leaver.engine.resume()
    await draining
    await leaver.relay.close()
    await service.replica()
    await service.finish(answers)
    assert leaver.engine.taken == 1


async def test_a_replica_does_not_stay_for_what_it_may_not_take(service: Service) -> None:
    front_end = await service.front_end()
    answers = await front_end.ask_many(2)
    leaver = await service.replica(classes=("patient",))
    await leaver.leave()
    await service.replica()
    await service.finish(answers)


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_idle_replica_that_dies_or_hangs_is_counted_as_lost(service: Service, hangs: bool) -> None:
    victim, front_end = await service.replica(silence_s=0.5 if hangs else 3600.0), await service.front_end()
    await service.finish(await front_end.ask_many(4))
    await (victim.stop_beating() if hangs else victim.die())
    await until(lambda: front_end.count("replicas_lost_total") > 0)
