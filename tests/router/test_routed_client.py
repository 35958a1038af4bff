"""A request from its submission to its last token, when nothing goes wrong."""

import asyncio
import time
from typing import Any

import msgspec
import pytest

from policies.errors import ConfigError, InputError
from policies.router.promise import Promise
from policies.router.tickets import Assignment, Ticket
from router import event_loop, wire
from router.classifier import Mode
from router.clock import MonotonicClock
from router.ledger import Entry
from router.state_store import Queued
from router.terms import RoutedClientConfig
from tests.fakes import FakeRequest
from tests.router.service import STEP_TIMES, TARGETS_S, Service, begun, info, over, request, timed, told
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(120)


async def test_two_routers_share_two_replicas_and_every_request_gets_its_exact_tokens(service: Service) -> None:
    replicas = [await service.replica(slots=2) for _ in range(2)]
    front_ends = [await service.front_end() for _ in range(2)]
    answers = await asyncio.gather(*(front_end.ask_many(15) for front_end in front_ends))
    await service.finish(answer for batch in answers for answer in batch)
    assert [replica.engine.most_held for replica in replicas] == [2, 2]
    for front_end in front_ends:
        assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="length") == 15
        assert front_end.count("output_tokens_total", slo_class="standard") == 300


@pytest.mark.parametrize("reason", ["stop", "length", "repetition"])
async def test_an_answer_is_timed_and_learned_from_whatever_its_end(service: Service, reason: str) -> None:
    replica, front_end = await service.both()
    replica.engine.finish_reason = reason
    answer = await front_end.ask(request())
    await until(lambda: answer.outcome == reason)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome=reason) == 1
    assert front_end.count("e2e_seconds_count", slo_class="standard") == 1
    await until(lambda: front_end.client.classifier._seen == 1)  # type: ignore[attr-defined]


async def test_routers_tell_each_other_the_lengths_of_answers(service: Service) -> None:
    await service.replica(slots=8)
    asker, listener = [await service.front_end() for _ in range(2)]
    mine, theirs = asker.client.classifier, listener.client.classifier
    before = theirs.bin_edges
    await service.finish([answer for n in range(64) for answer in [await asker.ask(request(1 + n % 16))]])
    await until(lambda: mine.bin_edges != before and theirs.bin_edges == mine.bin_edges)


async def test_a_replica_tells_its_status(service: Service) -> None:
    _, front_end = await service.both(slots=3)
    status = {"running": 0, "waiting": 0, "held": 0, "slots": 3, "background_failures": {}}
    assert await front_end.client.statuses() == {"r0": status}


async def test_a_status_of_a_replica_that_is_gone_says_so(service: Service) -> None:
    replica, front_end = await service.both()
    await replica.die()
    assert "error" in (await front_end.client.statuses())["r0"]


async def test_a_replica_that_hangs_up_as_it_is_greeted_costs_nobody_an_answer(service: Service) -> None:
    front_end = await service.front_end()
    gone = info("gone")

    async def welcome_and_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.accept_router(reader, writer, secret=gone.secret, replica_id="gone", engine_version="fake-1")
        writer.close()

    server = await asyncio.start_server(welcome_and_end, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await service.store.register_replica(msgspec.structs.replace(gone, port=port), 4, [])
    answers = await front_end.ask_many(4)
    await until(lambda: front_end.count("replicas_lost_total") > 0)
    server.close()
    await service.replica()
    await service.finish(answers)


@pytest.mark.slow
async def test_a_replica_of_no_use_to_one_router_goes_on_serving_another(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = await service.replica(slots=8)
    content = await service.front_end()
    unhappy = await service.front_end(max_moves=0, version="fake-2")
    running = await content.ask_many(4, 400)
    await begun(running)
    dropped: list[str] = []

    async def noted(replica_id: str) -> None:
        dropped.append(replica_id)

    monkeypatch.setattr(unhappy.client.store, "drop_replica", noted)
    assert isinstance((await unhappy.client.statuses())["r0"]["error"], str)
    waiting = await unhappy.ask_many(4)
    await until(lambda: unhappy.count("replicas_out_of_reach_total") > 3)
    await over(running)
    assert not dropped, "it listens, so it may serve others"
    await service.replica(version="fake-2")
    await service.finish([*running, *waiting])
    assert stranger.engine.taken == 4


@pytest.mark.slow
async def test_a_replica_of_measured_half_speed_gets_less(service: Service) -> None:
    slow = await service.replica(slots=64, step_s=0.04, step_times=STEP_TIMES)
    fast = await service.replica(slots=64, step_s=0.005, step_times=STEP_TIMES)
    front_end = await service.front_end()

    async def is_known() -> bool:
        speeds = (await service.store.snapshot()).replicas
        return speeds[slow.replica_id].slowness > 1.5 * speeds[fast.replica_id].slowness

    async with asyncio.timeout(PATIENCE_S):  # while the machine stands still, both measure the same step
        await service.finish(await front_end.ask_many(8, 60))
        while not await is_known():
            await service.finish(await front_end.ask_many(8, 60))
    before = fast.engine.taken, slow.engine.taken
    await service.finish(await front_end.ask_many(20, 40))
    assert fast.engine.taken - before[0] > slow.engine.taken - before[1]


async def test_in_shadow_mode_requests_start_as_they_came_and_the_plan_is_counted(service: Service) -> None:
    replica = await service.replica(slots=1)
    front_end = await service.front_end(mode="shadow")
    replica.engine.pause()  # all three are there before the first is over
    asked = {"standard": 60, "patient": 20, "soon": 250}  # the last one is long enough to be seen running
    answers = [await front_end.ask(request(max_tokens), name) for name, max_tokens in asked.items()]
    replica.engine.resume()
    await over([answers[1]])
    assert answers[2].outcome is None
    assert front_end.count("shadow_starts_total", slo_class="patient", plan="later") == 1
    await service.finish(answers)
    assert replica.engine.most_held == 1


@pytest.mark.parametrize("mode", ["stock", "shadow"])
async def test_where_requests_start_as_they_came_no_first_token_is_predicted(service: Service, mode: Mode) -> None:
    """It would be at infinity: in sums and causes, and in the ratio by which replicas are scaled."""
    replica, front_end = await service.replica(slots=1), await service.front_end(mode=mode)
    await until(lambda: bool(front_end.client.snapshot.replicas))
    answers = [await front_end.ask(request(), promise=Promise(ttft_s=1e-6, e2e_s=600.0)) for _ in range(12)]
    await service.finish(answers)
    assert front_end.count("ttft_error_seconds_total", slo_class="standard") == 0.0
    assert front_end.count("unkept_requests_total", slo_class="standard", cause="foreseen") == 0.0
    need = msgspec.json.decode(front_end.client.accounting.pages()["need"])
    assert need["arrived_s"] == 12.0 and 0.0 < need["ratio"] < 1.0
    assert replica.engine.most_held == 1


async def test_a_request_too_large_for_a_frame_fails_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    _, front_end = await service.both()
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 4096)
    large = await front_end.ask(request(4, prompt=[1] * 5000))
    answers = await front_end.ask_many(4)
    await until(lambda: large.outcome == "error")
    await service.finish(answers)


async def test_what_fails_at_the_end_of_one_answer_takes_no_token_from_any(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others of its step had been noted as sent, and it was over: its client would wait for ever."""
    replica, front_end = await service.both()
    learn, learned = front_end.client.classifier.observe, list[str]()

    def fails_once(slo_class: str, *others: Any, **more: Any) -> None:
        learned.append(slo_class)
        if len(learned) == 1:
            raise ZeroDivisionError("of a predictor")
        learn(slo_class, *others, **more)

    monkeypatch.setattr(front_end.client.classifier, "observe", fails_once)
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    await replica.holds(3)
    replica.engine.resume()
    await service.finish(answers)
    assert (len(learned), front_end.count("replicas_lost_total")) == (3, 0)
    assert "of a predictor" in caplog.text


async def test_what_fails_in_the_middle_of_one_answer_ends_that_alone(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, front_end = await service.both()
    came, failed = Entry.came, list[str]()

    def fails_once(entry: Entry[FakeRequest], *others: Any) -> None:
        if not failed:
            failed.append(entry.request_id)
            raise ZeroDivisionError("of a metric")
        came(entry, *others)

    monkeypatch.setattr(Entry, "came", fails_once)
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    await replica.holds(3)
    replica.engine.resume()
    await over(answers)
    (broken,) = (answer for answer in answers if answer.asked.request_id in failed)
    assert broken.outcome == "error"
    await service.finish(answer for answer in answers if answer is not broken)
    assert front_end.count("replicas_lost_total") == 0


async def test_a_request_that_cannot_be_encoded_is_refused_before_it_is_queued(service: Service) -> None:
    front_end = await service.front_end()
    with pytest.raises(InputError, match="cannot be sent to an engine"):
        await front_end.ask(request(4, prompt=[1 << 70]))
    assert not front_end.client.ledger
    await service.replica(slots=1, lease_s=3600.0)
    await service.finish(await front_end.ask_many(4))


async def test_a_router_that_stands_still_says_for_how_long(service: Service) -> None:
    front_end = await service.front_end()
    asyncio.get_running_loop().call_soon(time.sleep, 0.3)
    await until(lambda: front_end.count("event_loop_lag_seconds_sum") > 0.2)


async def test_a_router_says_for_how_long_it_has_waited_for_a_core(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "CORE_WAIT_LOOK_S", 0.01)
    monkeypatch.setattr(event_loop.CoreWait, "seconds", lambda _: 2.0 * time.monotonic())
    front_end = await service.front_end()
    await until(lambda: front_end.count("event_loop_core_wait_seconds_total") > 0.02)


async def test_an_engine_is_told_until_when_an_answer_is_to_end_also_when_it_goes_on(service: Service) -> None:
    front_end = await service.front_end()
    asked, timing, now_s = request(), timed(), front_end.client.queueing.arrival_s(timed())
    ticket = Ticket(request_id="a", bin_index=0, deadline_key=now_s, work_s=1.0, router_id="r")

    def sent() -> FakeRequest:
        parts = front_end.client.sending.encoded_at_first(asked, ticket, timing)
        return front_end.client.codec.decode_request([bytes(part) for part in parts])

    assert sent().ends_in_s is None
    timing.promise = Promise(ttft_s=1.0, e2e_s=9.0)
    assert sent().ends_in_s == pytest.approx(9.0, abs=0.5)
    timing.output_tokens = 3
    assert (sent().told, sent().ends_in_s) == ((None, True), pytest.approx(9.0, abs=0.5))


async def test_an_engine_is_told_how_much_time_is_left_when_a_request_is_sent(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    replica.engine.pause()
    first, second = await front_end.ask(request()), await front_end.ask(request())
    await replica.holds(1)
    await asyncio.sleep(0.1)
    waited_s = MonotonicClock().now() - second.timing.received_s
    await front_end.cancel(first)
    await until(lambda: replica.engine.held == 1 and second.timing.assigned_s is not None)
    await until(lambda: any(one.startswith(f"{second.asked.request_id}~") for one in replica.engine._held))
    left_s, resumed = told(replica, second.asked)
    assert left_s is not None and second.timing.assigned_s is not None
    assert waited_s > 0.1
    assert left_s == pytest.approx(
        TARGETS_S["standard"] - (second.timing.assigned_s - second.timing.received_s), abs=0.05
    )
    assert not resumed
    replica.engine.resume()
    await service.finish([second])


async def test_who_can_be_in_time_goes_before_who_is_late(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    replica.engine.pause()
    answers = [await front_end.ask(request(), name) for name in ("patient", "soon", "standard", "offline", "later")]
    await replica.holds(1)
    await asyncio.sleep(TARGETS_S["soon"])
    await until(lambda: front_end.count("waiting_max_seconds", slo_class="soon") > 0.1)
    replica.engine.resume()
    await service.finish(answers)
    starts_s = [answer.timing.assigned_s or 0.0 for answer in answers]
    assert sorted(range(5), key=starts_s.__getitem__) == [0, 2, 4, 1, 3]
    assert (await service.store.snapshot()).late == {("soon", "passed"): 1}
    await until(lambda: front_end.count("waiting_max_seconds", slo_class="soon") == 0.0)


async def test_a_replica_with_enough_to_read_leaves_the_others_in_the_queue_until_it_has_read(service: Service) -> None:
    replica, front_end = await service.replica(slots=8, credit_s=0.04, token_s=0.01), await service.front_end()
    await until(lambda: front_end.client.snapshot.replicas["r0"].max_unread_tokens == 4)
    replica.engine.pause()
    answers = await front_end.ask_many(6, 400)  # of 3 tokens each
    await replica.holds(2)
    load = (await service.store.snapshot()).replicas["r0"]
    assert (load.running, load.unread_tokens, load.credit) == (2, 6, 0)
    other = await service.replica(slots=1)
    await other.holds(1)  # what has no place there goes elsewhere
    replica.engine.resume()
    await replica.holds(5)  # long before one of them ends
    assert not any(answer.outcome for answer in answers)
    await service.finish(answers)
    assert (await service.store.snapshot()).replicas["r0"].unread_tokens == 0


async def test_an_assignment_told_twice_is_sent_once_and_the_slot_of_another_replica_given_back(
    service: Service,
) -> None:
    replica, front_end = await service.both()
    replica.engine.pause()
    answer = await front_end.ask(request())
    await replica.holds(1)
    for _ in range(3):
        front_end.client.sending.place(Assignment(answer.asked.request_id, "r0"))
    await service.store.register_replica(info("other"), 1, [])
    await service.store.drop_replica("r0")
    queued = await service.store.enqueue(front_end.client.ledger[answer.asked.request_id].ticket)
    assert isinstance(queued, Queued) and queued.assignments
    front_end.client.sending.place(Assignment(answer.asked.request_id, "other"))
    replica.engine.resume()
    await service.finish([answer])
    assert replica.engine.taken == 1


@pytest.mark.parametrize("wrong", [{"max_moves": -1}, {"heartbeat_s": 0.0}, {"silence_s": float("inf")}])
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RoutedClientConfig(**wrong)  # type: ignore[arg-type]
