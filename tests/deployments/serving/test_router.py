"""The router's own pages, with small front ends in the place of vLLM's."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from deployments.batches.files import owner_of
from deployments.batches.metrics import BatchMetrics
from deployments.batches.runner import OpenBatches
from deployments.config.application import AppConfig
from deployments.config.services import BatchesSection, ResponsesSection
from deployments.http.keys import digest
from deployments.serving.router import Router
from policies.batches.in_flight import Load
from policies.errors import AdmissionError, ConfigError, SluiceError, StateStoreAccessError, StateStoreError
from router.metrics import RouterMetrics
from router.timing import current
from tests.deployments.bodies import free
from tests.otlp_receiver import receiving
from tests.waiting import PATIENCE_S

ASKED = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})


def vllms() -> FastAPI:
    app = FastAPI()
    app.add_middleware(CORSMiddleware)
    return app


class FrontEnd:
    router_id = "a"

    def __init__(self) -> None:
        self.asked = 0

    async def metrics_pages(self) -> list[bytes]:
        self.asked += 1
        metrics = RouterMetrics(labels={"model": "m", "router": "a"})
        metrics.replicas_lost.inc(self.asked)
        return [metrics.exposition()]


class Unserved(Router):
    def __del__(self) -> None:  # type: ignore[override]
        """Nothing was opened."""


@pytest.fixture
def router() -> Any:
    made: Any = Unserved(AppConfig(model="m"), "redis://127.0.0.1:1/0", [], None)
    made._front_ends = [FrontEnd()]
    return made


async def test_many_who_ask_for_the_metrics_at_once_cost_one_page(router: Any) -> None:
    pages = await asyncio.gather(*(router._metrics_page(ASKED) for _ in range(50)))
    assert router._front_ends[0].asked == 1
    assert {b'sluice_replicas_lost_total{model="m",router="a"} 1.0' in page.body for page in pages} == {True}


async def test_models_are_asked_for_their_metrics_at_once(router: Any) -> None:
    """In turn, one hung engine in each would keep the page from Prometheus longer than it waits."""
    all_asked = asyncio.Barrier(2)

    class Waits(FrontEnd):
        async def metrics_pages(self) -> list[bytes]:
            await all_asked.wait()
            return await super().metrics_pages()

    router._front_ends = [Waits(), Waits()]
    async with asyncio.timeout(PATIENCE_S):
        await router._metrics_page(ASKED)


async def test_no_request_scales_what_a_router_does_not_have(router: Any) -> None:
    """vLLM's own route says that it has scaled to one engine."""
    app = vllms()

    @app.post("/scale_elastic_ep")
    async def scale() -> str:
        return "Scaled to 1 data parallel engines"

    async def start(client: object, resources: object, background: object) -> FastAPI:
        return app

    metrics = RouterMetrics()
    router._front_ends = [
        SimpleNamespace(start=start, names=("m",), max_model_len=2048, takes_media=False, charge=free, metrics=metrics)
    ]
    served = await router.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://sluice") as client:
        response = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": 1})
    assert response.status_code == 501
    assert "engine.replicas" in response.json()["error"]["message"]


async def test_a_router_that_stores_no_responses_tells_none(router: Any) -> None:
    router._config = AppConfig(model="m", responses=ResponsesSection(store=False))
    given: list[object] = []

    async def start(client: object, resources: object, background: object) -> FastAPI:
        given.append(background)
        return vllms()

    router._front_ends = [
        SimpleNamespace(start=start, names=("m",), max_model_len=2048, takes_media=False, charge=free)
    ]
    served = await router.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://sluice") as client:
        asked = [await client.get("/v1/responses/resp_1"), await client.delete("/v1/responses/resp_1")]
    assert [(each.status_code, each.json()["error"]["param"]) for each in asked] == [(404, "response_id")] * 2
    assert given == [None]


async def test_a_router_told_to_leave_while_it_waits_for_engines_opens_nothing_more(router: Any) -> None:
    waits, opened = asyncio.Event(), []

    async def start(client: object, resources: AsyncExitStack, background: object) -> FastAPI:
        resources.callback(opened.append, "and closed")
        waits.set()
        await asyncio.sleep(0.2)
        opened.append("a connection that nobody closes")
        return vllms()

    router._front_ends = [SimpleNamespace(start=start, names=("m",), metrics=RouterMetrics())]
    starting = asyncio.create_task(router.__serve_build_asgi_app__())
    await waits.wait()
    await Router.__del__(router)
    await asyncio.wait([starting], timeout=1.0)
    assert opened == ["and closed"]
    with pytest.raises(SluiceError, match="told to end"):
        starting.result()


async def test_a_router_that_redis_refuses_says_so_before_it_starts_anything(router: Any, redis_url: str) -> None:
    router._redis_url = f"redis://:wrong@{redis_url.rpartition('@')[2]}"
    router._front_ends = [SimpleNamespace(names=("m",))]
    with pytest.raises(StateStoreAccessError, match="redis_url"):
        await router.__serve_build_asgi_app__()


class Reconfigured(FrontEnd):
    """Goes by what it is given, and knows what other routers have told."""

    name, names, max_model_len, takes_media, charge = "m", ("m",), 2048, False, staticmethod(free)
    tellings, is_away = 0, False

    def __init__(self, told: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.told, self.metrics = told, RouterMetrics()
        self.in_force: list[AppConfig] = []

    async def start(self, client: object, resources: object, background: object) -> FastAPI:
        return vllms()

    async def told_user_config(self) -> dict[str, Any] | None:
        return self.told

    def adopt(self, user_config: object, config: AppConfig) -> None:
        self.in_force.append(config)

    async def tell(self) -> None:
        self.tellings += 1
        if self.is_away:
            raise StateStoreError("no answer")

    async def status(self) -> dict[str, Any]:
        return {}


WRONG = {"router": {"replicas": 2}}


async def started(router: Any, user_config: object, told: dict[str, Any] | None = None) -> Reconfigured:
    """As Ray Serve does it."""
    router._front_ends = [front_end := Reconfigured(told)]
    await router.__serve_build_asgi_app__()
    await router.reconfigure(user_config, rank=None)
    return front_end


async def page(router: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await router._status_page(ASKED)).body)["user_config"]
    return found


async def test_a_user_config_is_in_force_for_requests_from_then_on_and_goes_again(router: Any) -> None:
    front_end = await started(router, None)
    assert await page(router) == {"in_force": {}, "refused": None}
    changed = {"classes": {"gold": {"ttft_s": 0.3}}, "default_class": "gold", "router": {"max_body_bytes": 2048}}
    await router.reconfigure(changed, rank=None)
    promised = router._served.promises.of(Headers(), None, may_tighten=True)
    assert (promised.slo_class, promised.promise.ttft_s) == ("gold", 0.3)
    assert router._bodies.is_too_large(2049)
    assert front_end.in_force[-1].classes.keys() == {"gold"}
    await router.reconfigure(None, rank=None)
    assert router._served.promises.of(Headers(), None, may_tighten=True).slo_class == "standard"
    assert not router._bodies.is_too_large(2049)


async def test_it_is_told_before_it_counts_as_taken_unless_the_shared_state_is_away(router: Any) -> None:
    """A router that dies right after that leaves it to those that start."""
    front_end = await started(router, {})
    assert front_end.tellings == 1
    front_end.is_away = True
    await router.reconfigure({"router": {"max_wait_s": 9}}, rank=None)
    assert (front_end.tellings, (await page(router))["refused"]) == (2, None)


async def test_a_wrong_one_leaves_in_force_what_is_and_is_shown(router: Any) -> None:
    """Ray Serve replaces whoever raises."""
    right = {"router": {"max_wait_s": 9}}
    front_end = await started(router, right)
    await router.reconfigure(WRONG, rank=None)
    found = await page(router)
    assert found["in_force"] == right and "router.replicas: cannot change while engines serve" in found["refused"]
    assert [each.router.max_wait_s for each in front_end.in_force] == [9]
    await router.reconfigure(right, rank=None)
    assert (await page(router))["refused"] is None


async def test_what_goes_wrong_unforeseen_costs_no_router_either(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await started(router, {})
    monkeypatch.setattr("deployments.serving.router.with_live", lambda *_: {}["a fault"])
    await router.reconfigure({"router": {"max_wait_s": 9}}, rank=None)
    assert await page(router) == {"in_force": {}, "refused": "'a fault'"}


async def test_one_that_starts_with_a_wrong_one_goes_by_what_others_of_its_kind_have_taken(router: Any) -> None:
    front_end = await started(router, WRONG, told={"router": {"max_wait_s": 9}})
    assert front_end.in_force[-1].router.max_wait_s == 9
    assert "router.replicas" in (await page(router))["refused"]


async def test_a_deploy_with_a_wrong_one_fails_with_its_keys_and_opens_nothing(router: Any) -> None:
    closed: list[str] = []
    router._resources.callback(closed.append, "all")
    with pytest.raises(ConfigError, match=r"router\.replicas: cannot change while engines serve"):
        await started(router, WRONG)
    assert closed == ["all"]


async def test_keys_may_name_classes_that_come_by_user_config_alone(router: Any) -> None:
    router._api_keys = json.dumps([{"name": "a", "sha256": "0" * 64, "default_class": "gold"}])
    gold = {"classes": {"gold": {}}, "default_class": "gold"}
    await started(router, gold)
    await router.reconfigure({}, rank=None)
    found = await page(router)
    assert found["in_force"] == gold and "the key 'a' names classes ['gold']" in found["refused"]
    await Router.__del__(router)


class Runner:
    """Of batches, as a router sees it through its handle."""

    def __init__(self) -> None:
        self.looks, self.is_away, self._metrics = 0, False, BatchMetrics()

    async def look(self) -> None:
        self.looks += 1

    async def metrics(self) -> bytes:
        self._metrics.show([], {})
        return self._metrics.exposition()

    async def open_batches(self, owner: str) -> OpenBatches | None:
        return None if self.is_away else OpenBatches(count=1, oldest=[{"id": owner}])


class Completes(Reconfigured):
    """Answers completions with the key and class that they came under."""

    async def start(self, client: object, resources: object, background: object) -> FastAPI:
        app = vllms()

        @app.post("/v1/completions")
        async def complete(request: Request) -> dict[str, Any]:
            context = current.get()
            assert context is not None and context.tenant is not None
            return {"key": context.tenant.name, "class": context.slo_class, "asked": await request.json()}

        @app.post("/v1/chat/completions")
        async def refuse() -> None:
            raise AdmissionError("the quota is spent", retry_after_s=7.0)

        return app

    async def load(self) -> Load:
        return Load(slots=4)


@pytest.fixture
async def with_batches(router: Any, tmp_path: Path) -> Any:
    async with begun_with_batches(router, tmp_path) as begun:
        yield begun


@asynccontextmanager
async def begun_with_batches(router: Any, tmp_path: Path) -> Any:
    section = BatchesSection(folder=str(tmp_path))
    router._config = router._config.model_copy(update={"batches": section})
    router._api_keys = json.dumps([{"name": "team", "sha256": digest("key")}])
    router._front_ends, router._batch_runner = [Completes()], Runner()
    app = await router.__serve_build_asgi_app__()
    await router.reconfigure(None, rank=None)
    try:
        yield router, app
    finally:
        await Router.__del__(router)


async def test_a_request_of_a_batch_goes_under_its_class_in_the_name_of_its_key(with_batches: Any) -> None:
    router, _ = with_batches
    reply = await router.answer_of_batch("team", "/v1/completions", b'{"prompt": "x"}')
    assert reply.status == 200
    assert json.loads(reply.body) == {"key": "team", "class": "offline", "asked": {"prompt": "x"}}


async def test_a_request_of_a_batch_goes_on_in_the_trace_of_its_line(
    router: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, line = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.target)
        async with begun_with_batches(router, tmp_path) as (made, _):
            of_line = {"traceparent": f"00-{trace}-{line}-01"}
            assert (await made.answer_of_batch("team", "/v1/completions", b"{}", of_line)).status == 200
        span = receiver.one("POST /v1/completions")  # its end waits for what is not sent yet
    assert (span.trace_id, span.parent, span.attributes["sluice.class"]) == (trace, line, "offline")


async def test_a_request_of_a_batch_whose_key_was_removed_is_refused(with_batches: Any) -> None:
    router, _ = with_batches
    assert (await router.answer_of_batch("gone", "/v1/completions", b"{}")).status == 401


async def test_a_request_of_a_batch_that_may_not_queue_says_when_to_come_again(with_batches: Any) -> None:
    router, _ = with_batches
    reply = await router.answer_of_batch("team", "/v1/chat/completions", b"{}")
    assert (reply.status, reply.retry_after_s) == (429, 7.0)


async def test_a_batch_is_told_to_what_runs_it_and_its_metrics_are_on_the_page(with_batches: Any) -> None:
    router, app = with_batches
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s", headers=headers) as client:
        form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        assert (await client.post("/v1/batches", json=asked)).status_code == 200
        wrong = await client.post("/v1/batches", json={**asked, "endpoint": "/v1/embeddings"})
        assert "/v1/chat/completions, /v1/completions," in wrong.json()["error"]["message"]
    assert router._batch_runner.looks == 1
    assert b'sluice_batches_open{status="in_progress"} 0.0' in (await router._metrics_page(ASKED)).body
    assert await router.loads() == {"m": Load(slots=4)}


async def test_the_status_has_the_open_batches_of_the_key_that_asks_alone(with_batches: Any) -> None:
    router, app = with_batches
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s", headers=headers) as client:
        found = (await client.get("/sluice/status")).json()
        assert found["open_batches"] == {"count": 1, "oldest": [{"id": owner_of("team")}]}
        router._batch_runner.is_away = True
        assert (await client.get("/sluice/status")).json()["open_batches"] is None


async def test_without_a_folder_there_is_no_batch_api(router: Any) -> None:
    await started(router, None)
    app = router._served
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as client:
        assert (await client.post("/v1/files", content=b"x" * 4096)).status_code == 501
        assert "open_batches" not in (await client.get("/sluice/status")).json()
