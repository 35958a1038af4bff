"""What keys are charged, what they owe, and what is counted of their requests."""

import pytest

from policies.errors import AdmissionError
from router.admission import Tenant
from tests.gate import Gate
from tests.router.service import PROMPT_TOKENS, SLOW_TENANT, FrontEnd, Service, begun, over, request, timed
from tests.router.test_key_metrics import counts as page_counts
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)


def usage(front_end: FrontEnd, key: str) -> tuple[float, float]:
    """Prompt and output tokens of a key so far."""
    found = page_counts(front_end.metrics.keys.page())
    return found.get(("sluice_key_prompt_tokens_total", key), 0), found.get(("sluice_key_output_tokens_total", key), 0)


async def test_an_answer_longer_than_predicted_is_paid_before_the_key_may_ask_again(service: Service) -> None:
    _, front_end = await service.both()
    answer = await front_end.ask(request(400), tenant=SLOW_TENANT)
    assert await service.owed() < PROMPT_TOKENS + 17, "so much was predicted"
    await service.finish([answer])
    await service.owes(PROMPT_TOKENS + 400)
    with pytest.raises(AdmissionError, match="tokens_per_minute of slow") as refused:
        await front_end.ask(request(1), tenant=SLOW_TENANT)
    assert refused.value.retry_after_s > 390 / 0.1
    other = await front_end.ask(request(1), tenant=Tenant(name="other", tokens_per_minute=6))
    await service.finish([other])


async def test_an_answer_that_goes_on_is_charged_as_it_goes(service: Service) -> None:
    replica, front_end = await service.both()
    answer = await front_end.ask(request(1_000_000), tenant=SLOW_TENANT)
    await begun([answer], 300)
    replica.engine.pause()
    ((_, generated),) = replica.engine._states.values()
    await until(lambda: answer.timing.output_tokens == generated)
    await service.owes(PROMPT_TOKENS + answer.timing.output_tokens)
    assert answer.outcome is None
    await front_end.cancel(answer)
    await service.owes(PROMPT_TOKENS + answer.timing.output_tokens)
    replica.engine.resume()
    await service.is_empty()


async def test_what_a_cancelled_request_did_not_take_comes_back(service: Service) -> None:
    replica, front_end = await service.both()
    replica.engine.pause()
    answer = await front_end.ask(request(900, min_tokens=900), tenant=SLOW_TENANT)
    assert await service.owed() > PROMPT_TOKENS + 890
    await front_end.cancel(answer)
    await service.owes(PROMPT_TOKENS)  # which was read
    assert answer.tokens == []
    replica.engine.resume()
    await service.is_empty()
    generous = Tenant(name="generous", tokens_per_minute=1000)
    for _ in range(20):  # each would take nearly all that it has
        await front_end.cancel(await front_end.ask(request(900, min_tokens=900), tenant=generous))
        await service.until_owed(0, 90, generous)
    await service.is_empty()


@pytest.mark.parametrize(
    "fields", [{}, {"replays": True}, {"replays": True, "in_one_piece": True}], ids=["resumed", "replayed", "anew"]
)
async def test_a_request_that_was_moved_is_settled_and_counted_once(service: Service, fields: dict[str, bool]) -> None:
    victim, front_end = await service.replica(step_s=0.01), await service.front_end()
    answer = await front_end.ask(request(200, **fields), tenant=SLOW_TENANT)
    await service.until_owed(PROMPT_TOKENS + 30)  # more than it was charged for at first
    await victim.die()
    await service.replica()
    await service.finish([answer])
    await service.owes(PROMPT_TOKENS + 200)
    assert usage(front_end, "slow") == (PROMPT_TOKENS, 200)


async def test_a_request_that_was_called_back_is_settled_once(service: Service) -> None:
    replica, front_end = await service.replica(slots=1, step_s=0.02), await service.front_end()
    offline = await front_end.ask(request(600), "offline", tenant=SLOW_TENANT)
    await begun([offline], 20)
    await over(urgent := await front_end.ask_many(1))
    replica.engine.step_s = 0.001
    await service.finish([*urgent, offline])
    assert front_end.count("requests_recalled_total", slo_class="offline") == 1
    await service.owes(PROMPT_TOKENS + 600)


async def test_what_was_served_while_redis_was_away_is_charged_when_it_is_back(gate: Gate, parted: Service) -> None:
    replica, front_end = await parted.both()
    replica.engine.pause()
    began = await front_end.ask(request(200), tenant=SLOW_TENANT)
    await replica.holds(1)
    gate.shut()
    replica.engine.resume()
    more = [await front_end.ask(request(50), tenant=SLOW_TENANT) for _ in range(4)]  # quotas are out of sight
    await front_end.client.entrance.charge(SLOW_TENANT, 1000)
    await over([began, *more])
    await gate.open()
    await parted.finish([began, *more])
    await parted.owes(PROMPT_TOKENS + 200 + 4 * (PROMPT_TOKENS + 50) + 1000)


async def test_a_router_that_leaves_settles_what_its_answers_took(service: Service) -> None:
    await service.replica()
    staying, leaving = [await service.front_end() for _ in range(2)]
    leaving.task("settle").cancel()
    answer = await leaving.ask(request(200), tenant=SLOW_TENANT)
    await service.finish([answer])
    await leaving.close()
    await service.owes(PROMPT_TOKENS + 200)
    assert staying.client.entrance.room("standard") > 0


async def test_tokens_of_prompts_and_answers_are_counted_by_class_and_by_key(service: Service) -> None:
    _, front_end = await service.both()
    mine = [await front_end.ask(request(20), tenant=Tenant(name="mine")) for _ in range(2)]
    others = [await front_end.ask(request(30), tenant=Tenant(name="other")), await front_end.ask(request(40))]
    await service.finish([*mine, *others])
    assert front_end.count("prompt_tokens_total", slo_class="standard") == 4 * PROMPT_TOKENS
    assert front_end.count("output_tokens_total", slo_class="standard") == 20 + 20 + 30 + 40
    assert usage(front_end, "mine") == (2 * PROMPT_TOKENS, 40)
    assert usage(front_end, "other") == (PROMPT_TOKENS, 30)


async def test_what_is_refused_or_never_came_to_a_replica_took_no_tokens(service: Service) -> None:
    front_end, tenant = await service.front_end(max_waiting=1), Tenant(name="t")
    waits = await front_end.ask(request(), tenant=tenant)
    with pytest.raises(AdmissionError, match="max_key_share"):
        await front_end.ask(request(), tenant=tenant)
    await until(lambda: front_end.client.entrance.room("standard") == 0)
    with pytest.raises(AdmissionError, match="room for 0 of 1"):
        front_end.client.check_room("standard", 1, timed(), tenant)
    await front_end.cancel(waits)
    assert front_end.count("prompt_tokens_total", slo_class="standard") == 0
    assert page_counts(front_end.metrics.keys.page()) == {
        ("sluice_key_requests_total", "t", "refused"): 2,
        ("sluice_key_requests_total", "t", "cancelled"): 1,
    }
