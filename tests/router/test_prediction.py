"""What is predicted of requests, and what becomes known of those whose promise was not kept."""

import pytest

from policies.errors import AdmissionError
from policies.router.promise import Promise
from router.recent import latest
from tests.router.service import Service, request
from tests.waiting import until, until_async


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
