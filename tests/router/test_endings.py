"""Requests that are cancelled, and what is counted of those that end."""

import asyncio
import contextlib
from itertools import product

import pytest

from policies.router.promise import Promise
from tests.router.service import TARGETS_S, Service, request

pytestmark = pytest.mark.timeout(120)


async def test_cancelling_what_waits_and_what_runs_frees_every_slot(service: Service) -> None:
    replica, front_end = await service.replica(slots=3), await service.front_end()
    replica.engine.pause()
    answers = await front_end.ask_many(8)
    await replica.holds(3)
    ids = [answer.asked.request_id for answer in answers]
    await front_end.client.cancel([*ids, ids[0], "never-heard-of"], "cancelled")
    replica.engine.resume()
    await service.is_empty()
    assert not any(answer.tokens for answer in answers)
    assert front_end.count("requests_total", slo_class="standard", bin="0", outcome="cancelled") == 8


async def test_a_slot_given_to_a_cancelled_request_goes_to_the_next(service: Service) -> None:
    replica, front_end = await service.both(slots=1)
    replica.engine.pause()
    first, second, third = await front_end.ask_many(3)
    await replica.holds(1)
    await front_end.cancel(second)
    replica.engine.resume()
    await service.finish([first, third])
    assert replica.engine.taken == 2


async def test_the_mean_gap_of_a_whole_answer_is_told_where_one_was_promised(service: Service) -> None:
    _, front_end = await service.both()
    promised = await front_end.ask(request(), promise=Promise(ttft_s=5.0, tpot_s=0.001))
    unpromised = await front_end.ask(request())
    await service.finish([promised, unpromised])
    assert front_end.count("promise_gap_seconds_count", slo_class="standard") == 1
    assert front_end.count("promise_gap_seconds_sum", slo_class="standard") == promised.timing.gap_s


async def test_a_request_whose_sender_goes_away_while_it_is_queued_leaves_nothing(service: Service) -> None:
    replica, front_end = await service.replica(slots=100, lease_s=3600.0), await service.front_end()
    for number in range(60):
        asking = asyncio.create_task(front_end.ask(request(10_000)))
        await asyncio.sleep(number * 5e-5)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await front_end.cancel(await asking)
    await service.is_empty()
    assert replica.relay.healthy


async def test_an_answer_that_ends_too_late_has_missed_that_target_alone(service: Service) -> None:
    _, front_end = await service.both()
    await service.finish([await front_end.ask(request(), promise=Promise(ttft_s=60.0, e2e_s=1e-6))])
    assert front_end.count("slo_requests_total", slo_class="standard", ttft="met", tpot="met", e2e="missed") == 1


async def test_promises_kept_and_missed_are_counted_and_what_its_client_left_is_not(service: Service) -> None:
    replica, front_end = await service.both()
    replica.engine.pause()
    late, left = await front_end.ask(request(), "soon"), await front_end.ask(request(), "soon")
    await replica.holds(2)
    await asyncio.sleep(TARGETS_S["soon"])
    await front_end.cancel(left)
    replica.engine.resume()
    await service.finish([late, await front_end.ask(request(), "patient")])
    assert front_end.count("slo_requests_total", slo_class="soon", ttft="missed", tpot="met", e2e="met") == 1
    assert front_end.count("slo_requests_total", slo_class="patient", ttft="met", tpot="met", e2e="met") == 1
    ways = product(("met", "missed"), repeat=3)
    assert sum(front_end.count("slo_requests_total", slo_class="soon", ttft=a, tpot=b, e2e=c) for a, b, c in ways) == 1
