"""What routers tell of their requests for scaling by promises."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from policies.errors import AdmissionError
from policies.router.promise import Promise
from router.scale_need import ScaleNeed, told
from router.timing import RequestTiming
from tests.router.service import Service, request
from tests.waiting import until, until_async


@pytest.mark.timeout(120)
async def test_it_tells_the_work_that_came_and_the_worst_ratio_of_its_promises(service: Service) -> None:
    replica, front_end = await service.replica(slots=1), await service.front_end(max_waiting=1)
    await until(lambda: bool(front_end.client.snapshot.replicas))

    def need() -> dict[str, float | None]:
        return dict(msgspec.json.decode(front_end.client.accounting.pages()["need"]))

    assert need() == {"arrived_s": 0.0, "ratio": None}
    replica.engine.pause()
    first = await front_end.ask(request(), promise=Promise(e2e_s=1e-6))
    came_s = need()["arrived_s"]
    assert came_s is not None and came_s > 0.0
    assert need()["ratio"] is None, "no first token was promised, and nothing has ended"
    second = await front_end.ask(request(), promise=Promise(ttft_s=600.0))
    assert 0.0 < (need()["ratio"] or 0.0) < 1.0
    with pytest.raises(AdmissionError, match="max_waiting"):
        await front_end.ask(request())
    assert (need()["arrived_s"] or 0.0) > 2.5 * came_s, "what is refused was asked for as well"
    replica.engine.resume()
    await service.finish([first, second])
    await until(lambda: (need()["ratio"] or 0.0) > 1.0)
    await until_async(lambda: is_published(service, need()))


async def is_published(service: Service, need: dict[str, float | None]) -> bool:
    return dict(told((await service.store.published("need")).values())) == need | {"routers": 1.0}


def test_what_fills_idle_capacity_calls_for_no_replica() -> None:
    timing = RequestTiming(received_s=0.0, submitted_s=0.0, promise=Promise(e2e_s=1.0))
    entry: Any = SimpleNamespace(timing=timing, slo_class="offline", ticket=SimpleNamespace(fills_idle=True))
    need = ScaleNeed()
    need.ended(entry, "stop", 60.0)
    assert msgspec.json.decode(need.page(60.0)) == {"arrived_s": 0.0, "ratio": None}


def test_routers_together_have_all_the_work_and_the_mean_of_their_ratios() -> None:
    pages = ({"arrived_s": 2.0, "ratio": 0.5}, {"arrived_s": 3.0, "ratio": 0.7}, {"arrived_s": 0.0, "ratio": None})
    assert told(map(msgspec.json.encode, pages)) == {"arrived_s": 5.0, "routers": 3.0, "ratio": pytest.approx(0.6)}
    assert told([]) == {"arrived_s": 0.0, "routers": 0.0}
