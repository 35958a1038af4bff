"""Sessions over several routers, and the deadlines of their tasks."""

import asyncio

import pytest

from policies.router.promise import Promise
from policies.router.sessions import Sessions
from router.sessions import begin
from router.timing import InSession
from tests.router.service import Answer, FrontEnd, Service, request, timed
from tests.waiting import until

PAUSE_S = 0.3  # longer than the clocks of routers differ
pytestmark = pytest.mark.timeout(120)


async def turn(front_end: FrontEnd, service: Service, session: str, task_s: float | None = None) -> Answer:
    timing = timed()
    timing.session = InSession(name=session, task_s=task_s)
    answer = await front_end.ask(request(4), timing=timing)
    await service.finish([answer])
    await asyncio.sleep(PAUSE_S)
    return answer


async def test_every_router_knows_the_turns_of_all(service: Service) -> None:
    await service.replica(slots=8)
    one, other = [await service.front_end() for _ in range(2)]
    for front_end in (one, other, one):
        await turn(front_end, service, "s1")
    for front_end in (one, other):
        sessions = front_end.client.classifier.sessions
        await until(lambda sessions=sessions: sessions.turns == 3)
        known = sessions.find("s1")
        assert known is not None and known.turns == 3
        await until(lambda front_end=front_end: front_end.count("sessions") == 1.0)


async def test_a_task_goes_on_at_any_router_with_what_it_has_left(service: Service) -> None:
    await service.replica(slots=8)
    one, other = [await service.front_end() for _ in range(2)]
    first = await turn(one, service, "s1", task_s=600.0)
    assert first.timing.session is not None and first.timing.promise.e2e_s == 600.0
    await until(lambda: other.client.classifier.sessions.find("s1") is not None)
    second = await turn(other, service, "s1")
    assert second.timing.session is not None and second.timing.session.task == first.timing.session.task
    left_s = second.timing.session.task_left_s
    assert left_s == second.timing.promise.e2e_s == pytest.approx(600.0, abs=120.0)


async def test_what_is_no_turn_and_what_was_cut_off_is_not_known(service: Service) -> None:
    await service.replica(slots=8)
    front_end = await service.front_end()
    await service.finish([await front_end.ask(request(4))])
    await front_end.cancel(await front_end.ask(request(400)))
    assert front_end.client.classifier.sessions.turns == 0


def test_a_turn_keeps_to_the_closer_of_both_deadlines() -> None:
    part = InSession(name="a", task_s=600.0)
    assert begin(part, Sessions(), 0.0, Promise(ttft_s=2.0, e2e_s=1.0)) == Promise(ttft_s=2.0, e2e_s=1.0)
    assert part.comes_back
    assert begin(part, Sessions(), 1.0, Promise(e2e_s=1000.0)) == Promise(e2e_s=600.0)


def test_once_the_task_is_late_its_turns_are_promised_what_all_are() -> None:
    sessions, part = Sessions(), InSession(name="a", task_s=10.0)
    begin(part, sessions, 0.0, Promise())
    timing = timed()
    timing.session, timing.last_token_s = part, timing.received_s + 20.0
    last = timing.turn(7)
    assert last is not None
    sessions.observe(last)
    late = InSession(name="a")
    assert begin(late, sessions, 30.0, Promise(ttft_s=2.0)) == Promise(ttft_s=2.0)
    assert late.task_left_s == -20.0


def test_a_request_without_a_session_is_promised_what_it_was() -> None:
    assert begin(None, Sessions(), 0.0, Promise(ttft_s=2.0)) == Promise(ttft_s=2.0)
