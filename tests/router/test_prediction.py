"""What is predicted of requests, and what becomes known of those whose promise was not kept."""

import pytest

from policies.errors import AdmissionError
from policies.router.explanation import Foreseen
from policies.router.promise import Promise
from policies.router.tickets import Ticket
from router.prediction import foreseen
from router.recent import latest
from router.state_store import ReplicaLoad
from tests.router.service import Service, request
from tests.waiting import until, until_async

TICKET = Ticket(
    request_id="x",
    bin_index=0,
    deadline_key=0.0,
    work_s=1.0,
    router_id="a",
    unread_tokens=100,
    prefixes=(("near", 60),),
    prompt_token_s=0.01,
    step_s=0.1,
)
LOADS = {
    "near": ReplicaLoad(slots=4, running=4, outstanding_s=9.0, slowness=2.0, unread_tokens=50),
    "far": ReplicaLoad(slots=4, running=1, outstanding_s=9.0, unread_tokens=10, prompt_token_s=0.02),
}


@pytest.mark.parametrize(
    ("replica_id", "loads", "expected"),
    [
        ("near", LOADS, Foreseen(0.0, 0.1 + 0.02 * (40 + 50), 0.1 + 0.02 * 110, 2)),  # its own word, or by slowness
        ("far", LOADS, Foreseen(0.0, 0.1 + 0.02 * (100 + 10), None, 2)),
        (None, LOADS, Foreseen(3.0, 0.1 + 0.02 * 40, 0.1 + 0.02 * 110, 2)),  # by its turn what is ahead has been read
        ("new", {}, Foreseen(0.0, 0.0, None, 0)),
    ],
)
def test_the_first_token_is_predicted_by_what_replicas_said(
    replica_id: str | None, loads: dict[str, ReplicaLoad], expected: Foreseen
) -> None:
    found = foreseen(TICKET, expected.wait_s, replica_id, loads)
    assert found == Foreseen(*(each if each is None else pytest.approx(each) for each in expected))


@pytest.mark.timeout(120)
async def test_what_was_not_kept_is_told_with_what_was_predicted(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end(max_waiting=1)
    await until(lambda: bool(front_end.client.snapshot.replicas))
    replica.engine.pause()
    first = await front_end.ask(request(), promise=Promise(ttft_s=1e-6))
    kept = await front_end.ask(request(), promise=Promise(ttft_s=600.0))
    refused = request()
    with pytest.raises(AdmissionError, match="max_waiting"):
        await front_end.ask(refused)
    replica.engine.resume()
    await service.finish([first, kept])
    cause = str(first.timing.cause)
    told = {first.asked.request_id: cause, refused.request_id: "max_waiting"}
    await until(lambda: front_end.client.accounting.pages()["unkept"].count(b'"cause"') == len(told))
    await until_async(lambda: published_are(service, told))  # with the next heartbeat
    assert front_end.count("unkept_requests_total", slo_class="standard", cause=cause) == 1
    assert front_end.count("unkept_requests_total", slo_class="standard", cause="max_waiting") == 1
    assert front_end.count("foreseen_ttft_seconds_total", slo_class="standard") > 0.0
    assert kept.timing.cause is None


async def published_are(service: Service, causes: dict[str, str]) -> bool:
    """Args:
    causes: by request.
    """
    found = latest((await service.store.published("unkept")).values(), None)
    return {each["request_id"]: each["cause"] for each in found} == causes
