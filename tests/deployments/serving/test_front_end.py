"""When a router takes requests: all that come, once it does."""

import asyncio
import math
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from deployments.config.application import AppConfig
from deployments.config.engine import EngineSection, Role
from deployments.config.live import EngineTerms, with_live
from deployments.serving import front_end_start as under_test
from deployments.serving.front_end import FrontEnd
from deployments.serving.live_settings import Announcer, InForce, LiveSettings
from policies.errors import ReplicaLostError
from policies.live import Live
from router.exposition import merge
from router.memory_store import MemoryStateStore
from router.state_store import ReplicaInfo, Ticket
from router.terms import TicketTerms
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


def longest(store: Store, replicas: int, start_timeout_s: float = 600.0) -> Coroutine[Any, Any, list[int]]:
    """Contexts of the replicas with which a router starts."""
    config = AppConfig(model="m", engine=EngineSection(replicas=replicas, start_timeout_s=start_timeout_s))

    async def found() -> list[int]:
        return sorted(info.max_model_len for info in await under_test.enough_replicas(config, store))

    return found()


async def test_a_new_router_takes_no_requests_before_half_of_its_replicas_are_there(store: Store) -> None:
    """In a redeploy with other arguments all requests would come to the first of them."""
    start = asyncio.create_task(longest(store, 3))
    await store.join("a", 100)
    await store.join("of-a-class", 100, "interactive")
    await store.looked(3)
    assert not start.done()
    await store.join("b", 90)
    assert await start == [90, 100, 100]


async def test_one_is_enough_where_other_routers_send_requests_to_it_already(store: Store) -> None:
    await store.join("a", 100)
    await store.beat_router("other", 60.0)
    assert await longest(store, 3) == [100]


async def test_when_its_time_is_over_it_serves_with_the_replicas_that_there_are(store: Store) -> None:
    with pytest.raises(ReplicaLostError, match=r"no engine replica of m within 0\.01 s"):
        await longest(store, 3, 0.01)
    await store.join("a", 100)
    assert await longest(store, 3, 0.01) == [100]


def front_end(store: Store, prefill_store: Store | None = None) -> FrontEnd:
    """As it is once it has started, with vLLM left out."""
    config = AppConfig.model_validate({"model": "m", **({} if prefill_store is None else {"engine": {"prefill": {}}})})
    in_force, router_id = Live(InForce(config)), uuid4().hex
    metrics = under_test.router_metrics(config, router_id, speaks_for_process=True)
    stores: dict[Role, Any] = {"decode": store} | ({} if prefill_store is None else {"prefill": prefill_store})
    clients = under_test.engine_clients(
        in_force,
        router_id=router_id,
        metrics=metrics,
        store=store,
        prefill_store=prefill_store or Store(),
        codec=SimpleNamespace(engine_version="1"),  # type: ignore[arg-type]
        learned=None,
        max_model_len=2048,
        max_batch_tokens=512,
    )
    vllms: Any = SimpleNamespace()
    return FrontEnd(
        in_force=in_force,
        router_id=router_id,
        metrics=metrics,
        store=store,
        clients=clients,
        reader=vllms,
        app=vllms,
        announcer=Announcer(in_force, stores),
        max_model_len=2048,
        takes_media=False,
    )


def changed(made: FrontEnd, user_config: dict[str, Any]) -> AppConfig:
    """With another `user_config` in force."""
    made.in_force.replace(InForce(with_live(made.config, user_config), user_config))
    return made.config


async def test_every_router_has_the_same_metrics_page(store: Store) -> None:
    """With its own numbers as old as the others have them: a scrape may come to one router, and the next to another."""
    routers = [front_end(store) for _ in range(2)]
    for router in routers:
        router.metrics.replicas_lost.inc()
        await store.beat_router(router.router_id, 60.0)
        await store.publish(router.router_id, {"metrics": router.metrics.exposition()}, 60.0)
        router.metrics.replicas_lost.inc()
    first, second = [merge(await router.metrics_pages()).decode() for router in routers]
    assert first == second
    for router in routers:
        assert f'sluice_replicas_lost_total{{model="m",router="{router.router_id}"}} 1.0' in first
        assert f'process_cpu_seconds_total{{router="{router.router_id}"}}' in first


LIVE = {
    "classes": {
        "gold": {"ttft_s": 0.3, "tpot_s": 0.04, "max_waiting": 5, "fills_idle": True, "order": "longest_first"}
    },
    "default_class": "gold",
    "router": {"max_prompt_logprobs": 7, "grammar_timeout_s": 2, "max_wait_s": 8, "late_patience_s": 3},
}


def test_both_pools_go_by_another_configuration_at_once(store: Store) -> None:
    made = front_end(store, Store())
    changed(made, LIVE)
    clients: Any = made.clients
    for client in (clients.answering, clients.routed.pool.client):
        assert (client.terms.now.door.max_waiting("gold"), client.terms.now.config.max_wait_s) == (5, 8)
    assert clients.routed.config.now.itl_targets_s == {"gold": 0.04}
    assert clients.classifier._terms.now == TicketTerms(fills_idle={"gold": "longest_first"}, late_patience_s=3)


async def test_engines_of_both_pools_and_later_routers_are_told_and_again_what_was_lost(store: Store) -> None:
    made = front_end(store, prefill_store := Store())
    begun, tells = made.config, made.announcer
    await tells.tell()
    assert await tells.told_user_config() is None, "not before Ray Serve has said what it is"
    now = changed(made, LIVE)
    for _ in range(2):
        await tells.tell()
        assert await tells.told_user_config() == LIVE
        for role, told in (("decode", store), ("prefill", prefill_store)):
            terms = await LiveSettings(told, begun).terms()
            assert terms == EngineTerms.of(begun, now, cast(Role, role))
        store._settings.clear()
        prefill_store._settings.clear()


async def test_a_router_that_was_changed_before_does_not_overwrite_one_changed_since(store: Store) -> None:
    first, second = (front_end(store) for _ in range(2))
    changed(first, {})
    await first.announcer.tell()
    changed(second, LIVE)
    await second.announcer.tell()
    await first.announcer.tell()
    assert await first.announcer.told_user_config() == LIVE


async def test_the_status_page_shows_bins_what_waits_in_them_and_the_batches_that_went(store: Store) -> None:
    router = front_end(store)
    router.clients.classifier._bins.adopt((0.0, 18.0, 20.0, 30.0, math.inf))
    await store.join("a", 100, gang_max_wait_s=0.0)
    for name, bin_index in (("x", 1), ("y", 0), ("z", 0)):
        waits = Ticket(request_id=name, bin_index=bin_index, deadline_key=0.0, work_s=1.0, router_id="r")
        await store.enqueue(waits)
    status = await router.status()
    assert status["bin_edges_tokens"] == [0.0, 18.0, 20.0, 30.0, None]
    assert (status["waiting"], status["batches"]) == ({"standard:0": 2}, {"1:full": 1})
    assert status["replicas"]["a"]["takes_batches"]


async def test_the_status_page_shows_what_keys_were_served_and_not_whose_it_was(store: Store) -> None:
    router = front_end(store)
    await store.join("a", 100)
    for name, work_s in (("modest", 0.5), ("greedy", 7.0)):
        waits = Ticket(request_id=name, bin_index=0, deadline_key=0.0, work_s=work_s, router_id="r", api_key=name)
        await store.enqueue(waits)
        await store.release("a", [name])
    status = await router.status()
    assert status["keys_served_s"] == [7.0, 0.5]
    assert "greedy" not in str(status)
