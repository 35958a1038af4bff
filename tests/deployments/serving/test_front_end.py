"""When a router takes requests: all that come, once it does."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from deployments.config.application import AppConfig, EngineSection
from deployments.serving import front_end as under_test
from deployments.serving.front_end import FrontEnd
from policies.errors import ReplicaLostError
from router.memory_store import MemoryStateStore
from router.metrics import merge
from router.redis_store import connect
from router.state_store import ReplicaInfo, Ticket
from tests.waiting import until


class Store(MemoryStateStore):
    """Counts how often a router has looked for replicas."""

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.looks = 0

    async def replica_infos(self) -> list[ReplicaInfo]:
        self.looks += 1
        return await super().replica_infos()

    async def join(self, replica_id: str, max_model_len: int, *classes: str) -> None:
        info = ReplicaInfo(
            replica_id=replica_id,
            host="127.0.0.1",
            port=1,
            max_model_len=max_model_len,
            classes=classes,
        )
        await self.register_replica(info, 1)

    async def looked(self, times: int) -> None:
        seen = self.looks
        await until(lambda: self.looks >= seen + times)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(under_test, "REPLICA_POLL_S", 0.001)
    return Store()


def front_end(store: Store, replicas: int, start_timeout_s: float = 600.0) -> FrontEnd:
    config = AppConfig(model="m", engine=EngineSection(replicas=replicas, start_timeout_s=start_timeout_s))
    made = FrontEnd(config, connect("redis://127.0.0.1:1/0"), None)
    made._store = store
    return made


async def longest(router: FrontEnd) -> list[int]:
    return sorted(info.max_model_len for info in await router._enough_replicas())


async def test_a_new_router_takes_no_requests_before_half_of_its_replicas_are_there(store: Store) -> None:
    """In a redeploy with other arguments all requests would come to the first of them."""
    start = asyncio.create_task(longest(front_end(store, 3)))
    await store.join("a", 100)
    await store.join("of-a-class", 100, "interactive")
    await store.looked(3)
    assert not start.done()
    await store.join("b", 90)
    assert await start == [90, 100, 100]


async def test_one_is_enough_where_other_routers_send_requests_to_it_already(store: Store) -> None:
    await store.join("a", 100)
    await store.beat_router("other", 60.0)
    assert await longest(front_end(store, 3)) == [100]


async def test_when_its_time_is_over_it_serves_with_the_replicas_that_there_are(store: Store) -> None:
    with pytest.raises(ReplicaLostError, match=r"no engine replica of m within 0\.01 s"):
        await longest(front_end(store, 3, 0.01))
    await store.join("a", 100)
    assert await longest(front_end(store, 3, 0.01)) == [100]


async def test_every_router_has_the_same_metrics_page(store: Store) -> None:
    """With its own numbers as old as the others have them: a scrape may come to one router, and the next to another."""

    async def nothing() -> dict[str, object]:
        return {}

    routers = [front_end(store, 1) for _ in range(2)]
    for router in routers:
        router.routed = SimpleNamespace(statuses=nothing)  # type: ignore[assignment]
        router.metrics.replicas_lost.inc()
        await store.beat_router(router.router_id, 60.0)
        await store.publish_metrics(router.router_id, router.metrics.exposition(), 60.0)
        router.metrics.replicas_lost.inc()
    first, second = [merge(await router.metrics_pages()).decode() for router in routers]
    assert first == second
    for router in routers:
        assert f'sluice_replicas_lost_total{{model="m",router="{router.router_id}"}} 1.0' in first
        assert f'process_cpu_seconds_total{{router="{router.router_id}"}}' in first


async def test_the_status_page_shows_what_keys_were_served_and_not_whose_it_was(store: Store) -> None:
    async def nothing() -> dict[str, object]:
        return {}

    router = front_end(store, 1)
    router.routed = router._answering = SimpleNamespace(statuses=nothing, bin_edges=(), bucket_edges=())  # type: ignore[assignment]
    await store.join("a", 100)
    for name, work_s in (("modest", 0.5), ("greedy", 7.0)):
        waits = Ticket(request_id=name, bin_index=0, deadline_key=0.0, work_s=work_s, router_id="r", api_key=name)
        await store.enqueue(waits)
        await store.release("a", [name])
    status = await router.status()
    assert status["keys_served_s"] == [7.0, 0.5]
    assert "greedy" not in str(status)
