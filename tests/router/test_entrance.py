"""Whether a request may queue: limits of classes, quotas of keys, and room for several at once."""

import pytest

from policies.errors import AdmissionError
from router.admission import Tenant
from router.clock import MonotonicClock
from tests.router.service import Service, request, timed
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


async def test_there_is_room_for_what_the_replicas_could_start_and_what_may_wait(service: Service) -> None:
    front_end = await service.front_end(max_waiting=2)
    room = front_end.client.entrance.room
    assert room("standard") == 2
    answers = await front_end.ask_many(2)
    with pytest.raises(AdmissionError, match="max_waiting"):
        await front_end.ask(request())
    await until(lambda: room("standard") == 0)
    await service.replica()
    await service.finish(answers)
    await until(lambda: room("standard") == 2 + 4)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="refused") == 1


async def test_more_than_there_is_room_for_are_refused_and_counted_before_they_are_made(service: Service) -> None:
    front_end, replica = await service.front_end(max_waiting=3), await service.replica(slots=1)
    replica.engine.pause()
    answers = await front_end.ask_many(3)
    await until(lambda: front_end.client.snapshot.waiting == 2)
    timing = timed()
    front_end.client.check_room("standard", 1, timing)
    assert timing.outcome is None
    with pytest.raises(AdmissionError, match="room for 1 of 2 requests") as refused:
        front_end.client.check_room("standard", 2, timing)
    assert refused.value.retry_after_s == front_end.client.snapshot.waiting_s > 0
    assert timing.outcome == "refused"
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="refused") == 1
    replica.engine.resume()
    await service.finish(answers)


async def test_a_spent_quota_is_refused_with_the_time_of_the_next_try(service: Service) -> None:
    _, front_end = await service.both()
    tenant = Tenant(name="t", requests_per_minute=2)
    began_s = MonotonicClock().now()
    answers = [await front_end.ask(request(), tenant=tenant) for _ in range(2)]
    with pytest.raises(AdmissionError, match="requests_per_minute of t") as refused:
        await front_end.ask(request(), tenant=tenant)
    assert 29.9 - (MonotonicClock().now() - began_s) < refused.value.retry_after_s <= 30
    answers.append(await front_end.ask(request()))
    await service.finish(answers)


async def test_what_would_be_late_is_refused_where_its_class_says_so_and_what_it_was_told_is_checked(
    service: Service,
) -> None:
    replica, front_end = await service.both(slots=1)
    replica.engine.pause()
    waiting = await front_end.ask_many(160)  # 0.04 predicted seconds each, due before a strict request that comes later
    with pytest.raises(AdmissionError, match="late") as refused:
        await front_end.ask(request(), "strict")
    assert 0.0 < refused.value.retry_after_s < 4.0
    replica.engine.resume()
    await service.finish(waiting)
    await service.finish([await front_end.ask(request(), "strict")])
    assert front_end.count("retry_after_error_seconds_count", slo_class="strict") == 1
    assert front_end.count("requests_total", slo_class="strict", bin="0", outcome="refused") == 1
    assert front_end.count("refused_requests_total", slo_class="strict", reason="late") == 1
    assert front_end.count("slo_requests_total", slo_class="strict", ttft="missed", tpot="missed", e2e="missed") == 1
    assert front_end.count("slo_requests_total", slo_class="strict", ttft="met", tpot="met", e2e="met") == 1


async def test_a_key_that_floods_is_refused_alone_and_told_when_its_own_work_is_done(service: Service) -> None:
    one, other = [await service.front_end(max_waiting=20) for _ in range(2)]
    replica = await service.replica(slots=1)
    replica.engine.pause()
    flooding, patient = Tenant(name="flooding"), Tenant(name="patient")
    answers = [await one.ask(request(), tenant=flooding) for _ in range(1 + 10)]  # one of them runs
    refusals = []
    for number in range(200):
        with pytest.raises(AdmissionError, match="max_key_share") as refused:
            await (one, other)[number % 2].ask(request(), tenant=flooding)
        refusals.append(refused.value.retry_after_s)
    assert len(set(refusals)) == 1
    answers += [await other.ask(request(), tenant=patient) for _ in range(10)]
    await until(lambda: one.client.snapshot.waiting == 20)
    assert refusals[0] == pytest.approx(one.client.snapshot.waiting_s / 2, rel=1e-6)  # of all that waits by now
    replica.engine.resume()
    await service.finish(answers)
    answers = [await one.ask(request(), tenant=flooding) for _ in range(10)]
    await service.finish(answers)


async def test_work_that_makes_no_request_is_charged_and_refused_alike(service: Service) -> None:
    front_end = await service.front_end()
    tenant = Tenant(name="t", tokens_per_minute=6000)
    await front_end.client.entrance.charge(tenant, 5900)
    with pytest.raises(AdmissionError, match="tokens_per_minute of t are spent") as refused:
        await front_end.client.entrance.charge(tenant, 5000)
    assert 40 < refused.value.retry_after_s <= 49
    with pytest.raises(AdmissionError, match="tokens_per_minute of t"):
        await front_end.ask(request(5000, min_tokens=5000), tenant=tenant)
    for unlimited in (None, Tenant(name="u")):
        await front_end.client.entrance.charge(unlimited, 1e9)
