"""When a router takes requests: all that come, once it does."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.config.application import AppConfig
from deployments.config.engine import EngineSection, Role
from deployments.config.live import EngineTerms, with_live
from deployments.serving import front_end as under_test
from deployments.serving.front_end import FrontEnd
from deployments.serving.live_settings import LiveSettings
from policies.errors import ReplicaLostError
from router.memory_store import MemoryStateStore
from router.metrics import merge
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

    async def join(
        self, replica_id: str, max_model_len: int, *classes: str, gang_max_wait_s: float | None = None
    ) -> None:
        info = ReplicaInfo(
            replica_id=replica_id,
            host="127.0.0.1",
            port=1,
            max_model_len=max_model_len,
            classes=classes,
            gang_max_wait_s=gang_max_wait_s,
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
    made = FrontEnd(config, None)
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
        await store.publish(router.router_id, {"metrics": router.metrics.exposition()}, 60.0)
        router.metrics.replicas_lost.inc()
    first, second = [merge(await router.metrics_pages()).decode() for router in routers]
    assert first == second
    for router in routers:
        assert f'sluice_replicas_lost_total{{model="m",router="{router.router_id}"}} 1.0' in first
        assert f'process_cpu_seconds_total{{router="{router.router_id}"}}' in first


def answering(store: Store, prefill_store: Store) -> FrontEnd:
    """As it is once it has started, with vLLM left out."""
    config = AppConfig.model_validate({"model": "m", "engine": {"prefill": {}}})
    made: Any = FrontEnd(config, None)
    made._store, made._prefill_store, made._max_batch_tokens = store, prefill_store, 512
    made.routed = made._routed_client(None, SimpleNamespace(engine_version="1"))
    made._llm = SimpleNamespace(limit_prompt_logprobs=lambda most: setattr(made, "most", most))
    made._grammars = SimpleNamespace(timeout_s=None)
    return cast(FrontEnd, made)


LIVE = {
    "classes": {
        "gold": {"ttft_s": 0.3, "tpot_s": 0.04, "max_waiting": 5, "fills_idle": True, "order": "longest_first"}
    },
    "default_class": "gold",
    "router": {"max_prompt_logprobs": 7, "grammar_timeout_s": 2, "max_wait_s": 8, "late_patience_s": 3},
}


def test_both_pools_go_by_another_configuration_at_once(store: Store) -> None:
    made: Any = answering(store, Store())
    made.adopt(LIVE, with_live(made._begun, LIVE))
    for client in (made.routed.decoding, made.routed.pool.client):
        assert (client.terms.now.door.max_waiting("gold"), client.terms.now.config.max_wait_s) == (5, 8)
    assert made.routed.config.itl_targets_s == {"gold": 0.04}
    assert (made.most, made._grammars.timeout_s) == (7, 2)
    assert (made._classifier._late_patience_s, made._classifier._fills_idle) == (3, {"gold": "longest_first"})


async def test_engines_of_both_pools_and_later_routers_are_told_and_again_what_was_lost(store: Store) -> None:
    made, prefill_store = answering(store, prefills := Store()), prefills
    await made.tell()
    assert await made.told_user_config() is None, "not before Ray Serve has said what it is"
    changed = with_live(made._begun, LIVE)
    made.adopt(LIVE, changed)
    for _ in range(2):
        await made.tell()
        assert await made.told_user_config() == LIVE
        for role, told in (("decode", store), ("prefill", prefill_store)):
            terms = await LiveSettings(told, made._begun).terms()
            assert terms == EngineTerms.of(made._begun, changed, cast(Role, role))
        store._settings.clear()
        prefill_store._settings.clear()


async def test_a_router_that_was_changed_before_does_not_overwrite_one_changed_since(store: Store) -> None:
    first, second = (answering(store, Store()) for _ in range(2))
    first.adopt({}, first._begun)
    await first.tell()
    second.adopt(LIVE, with_live(second._begun, LIVE))
    await second.tell()
    await first.tell()
    assert await first.told_user_config() == LIVE


def shown(store: Store, bin_edges: tuple[float, ...] = ()) -> FrontEnd:
    async def nothing() -> dict[str, object]:
        return {}

    router = front_end(store, 1)
    router.routed = SimpleNamespace(statuses=nothing)  # type: ignore[assignment]
    router._classifier = SimpleNamespace(  # type: ignore[assignment]
        bin_edges=bin_edges, bucket_edges=(), prefixes=SimpleNamespace(entries=7)
    )
    return router


async def test_the_status_page_shows_bins_what_waits_in_them_and_the_batches_that_went(store: Store) -> None:
    router = shown(store, bin_edges=(0.0, 18.0, math.inf))
    await store.join("a", 100, gang_max_wait_s=0.0)
    for name, bin_index in (("x", 1), ("y", 0), ("z", 0)):
        waits = Ticket(request_id=name, bin_index=bin_index, deadline_key=0.0, work_s=1.0, router_id="r")
        await store.enqueue(waits)
    status = await router.status()
    assert status["bin_edges_tokens"] == [0.0, 18.0, None]
    assert (status["waiting"], status["batches"]) == ({"standard:0": 2}, {"1:full": 1})
    assert status["replicas"]["a"]["takes_batches"]


async def test_the_status_page_shows_what_keys_were_served_and_not_whose_it_was(store: Store) -> None:
    router = shown(store)
    await store.join("a", 100)
    for name, work_s in (("modest", 0.5), ("greedy", 7.0)):
        waits = Ticket(request_id=name, bin_index=0, deadline_key=0.0, work_s=work_s, router_id="r", api_key=name)
        await store.enqueue(waits)
        await store.release("a", [name])
    status = await router.status()
    assert status["keys_served_s"] == [7.0, 0.5]
    assert "greedy" not in str(status)
    assert status["prefixes"]["entries"] == 7
