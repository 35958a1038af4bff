"""A router as Ray Serve starts, asks and ends it, with small front ends in the place of vLLM's."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
from deployments.batches.runner import OpenBatches, Troubles
from deployments.config.application import AppConfig
from deployments.http.keys import digest
from deployments.serving import service
from deployments.serving.candidates import Candidates
from deployments.serving.live_settings import InForce
from deployments.serving.pages import Pages
from deployments.serving.router import Router
from policies.batches.in_flight import Load
from policies.errors import (
    AdmissionError,
    ConfigError,
    ReplicaLostError,
    SluiceError,
    StateStoreAccessError,
    StateStoreError,
)
from policies.live import Live
from router.metrics import RouterMetrics
from router.timing import current
from tests.deployments.bodies import free
from tests.otlp_receiver import receiving
from tests.waiting import PATIENCE_S

ASKED = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})
AWAY = "redis://127.0.0.1:1/0"
WITH_KEY = {"Authorization": "Bearer key"}
WRONG = {"router": {"replicas": 2}}


class FrontEnd:
    """Goes by what is in force, and is its own announcer: it knows what other routers have told."""

    name, names, router_id, max_model_len, takes_media = "m", ("m",), "a", 2048, False
    charge = staticmethod(free)

    def __init__(self, told: dict[str, Any] | None = None) -> None:
        self.told, self.tellings, self.pages, self.is_away = told, 0, 0, False
        self.announcer, self.app = self, FastAPI()
        self.app.add_middleware(CORSMiddleware)

    @asynccontextmanager
    async def opened(self, in_force: Live[InForce], **parts: Any) -> AsyncIterator["FrontEnd"]:
        self.in_force, self.responses = in_force, parts["responses"]
        yield self

    async def told_user_config(self) -> dict[str, Any] | None:
        return self.told

    async def tell(self) -> None:
        self.tellings += 1
        if self.is_away:
            raise StateStoreError("no answer")

    async def metrics_pages(self) -> list[bytes]:
        self.pages += 1
        metrics = RouterMetrics(labels={"model": "m", "router": "a"})
        metrics.replicas_lost.inc(self.pages)
        return [metrics.exposition()]

    async def status(self) -> dict[str, Any]:
        return {}

    async def load(self) -> Load:
        return Load(slots=4)


class Made(Router):
    """As Ray Serve makes it: there is one before it is initialized, and it is told to leave also when that failed."""

    leave = Router.__del__

    def __del__(self) -> None:  # type: ignore[override]
        """It was told to leave."""


class Started:
    """A router, and its front ends in the order of their models."""

    def __init__(self, *front_ends: FrontEnd) -> None:
        self.router, self.front_ends = Made.__new__(Made), front_ends

    async def start(
        self, config: AppConfig, redis_url: str = AWAY, api_keys: str | None = None, runner: Any = None
    ) -> None:
        await self.router.__init__(config, redis_url, [], api_keys, None, runner)  # type: ignore[misc]

    async def page(self) -> dict[str, Any]:
        async with self.client() as client:
            return dict((await client.get("/sluice/status", headers=WITH_KEY)).json())

    def client(self, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.router._service.app)
        return httpx.AsyncClient(transport=transport, base_url="http://sluice", headers=headers)


Make = Callable[..., Started]
CONFIG = AppConfig(model="m")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    made: list[Started] = []

    def new(*front_ends: FrontEnd) -> Started:
        ones = iter(front_ends)
        monkeypatch.setattr(service, "opened_front_end", lambda *args, **named: next(ones).opened(*args, **named))
        made.append(Started(*front_ends))
        return made[-1]

    yield new
    for each in made:
        await each.router.leave()


@pytest.fixture
def start(make: Make) -> Callable[..., Awaitable[Started]]:
    async def start(user_config: object, front_end: FrontEnd | None = None, **parts: Any) -> Started:
        """As Ray Serve does it."""
        made = make(front_end or FrontEnd())
        await made.start(**{"config": CONFIG, **parts})
        await made.router.reconfigure(user_config, rank=None)
        return made

    return start


Start = Callable[..., Awaitable[Started]]


# Start and end


class Opens(FrontEnd):
    """Says when it was closed; waits, or fails, before it is open."""

    def __init__(self, closed: list[str], fails: Exception | None = None, waits: asyncio.Event | None = None) -> None:
        super().__init__()
        self.closed, self.fails, self.waits = closed, fails, waits

    @asynccontextmanager
    async def opened(self, in_force: Live[InForce], **parts: Any) -> AsyncIterator[FrontEnd]:
        if self.fails is not None:
            raise self.fails
        try:
            if self.waits is not None:
                self.waits.set()
                await asyncio.sleep(PATIENCE_S)
            self.in_force = in_force
            yield self
        finally:
            self.closed.append("front end")


async def test_what_was_open_is_closed_when_a_later_part_does_not_open(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    redis = service.connect(AWAY, None)

    async def aclose() -> None:
        closed.append("redis")

    monkeypatch.setattr(redis, "aclose", aclose)
    monkeypatch.setattr(service, "connect", lambda *_: redis)
    two = AppConfig.model_validate({"model": "m", "more_models": [{"model": "n"}]})
    made = make(Opens(closed), Opens(closed, fails=ReplicaLostError("no engine replica of n")))
    with pytest.raises(ReplicaLostError, match="of n"):
        await made.start(two)
    assert closed == ["front end", "redis"]


async def test_a_router_told_to_leave_while_it_waits_for_engines_opens_nothing_more(make: Make) -> None:
    closed, waits = list[str](), asyncio.Event()
    made = make(Opens(closed, waits=waits))
    starting = asyncio.create_task(made.start(CONFIG))
    await waits.wait()
    await made.router.leave()
    await asyncio.wait([starting], timeout=1.0)
    assert closed == ["front end"]
    with pytest.raises(SluiceError, match="told to end"):
        starting.result()


async def test_a_router_that_redis_refuses_says_so_before_it_starts_anything(make: Make, redis_url: str) -> None:
    with pytest.raises(StateStoreAccessError, match="redis_url"):
        await make().start(CONFIG, f"redis://:wrong@{redis_url.rpartition('@')[2]}")


# Pages


def pages(*front_ends: Any) -> Pages:
    return Pages(front_ends, SimpleNamespace(), Candidates([]), None, None)  # type: ignore[arg-type]


async def test_many_who_ask_for_the_metrics_at_once_cost_one_page() -> None:
    asked = pages(front_end := FrontEnd())
    found = await asyncio.gather(*(asked.metrics(ASKED) for _ in range(50)))
    assert front_end.pages == 1
    assert {b'sluice_replicas_lost_total{model="m",router="a"} 1.0' in page.body for page in found} == {True}


async def test_models_are_asked_for_their_metrics_at_once() -> None:
    """In turn, one hung engine in each would keep the page from Prometheus longer than it waits."""
    all_asked = asyncio.Barrier(2)

    class Waits(FrontEnd):
        async def metrics_pages(self) -> list[bytes]:
            await all_asked.wait()
            return await super().metrics_pages()

    async with asyncio.timeout(PATIENCE_S):
        await pages(Waits(), Waits()).metrics(ASKED)


async def test_no_request_scales_what_a_router_does_not_have(start: Start) -> None:
    """vLLM's own route says that it has scaled to one engine."""
    front_end = FrontEnd()

    @front_end.app.post("/scale_elastic_ep")
    async def scale() -> str:
        return "Scaled to 1 data parallel engines"

    async with (await start(None, front_end)).client() as client:
        response = await client.post("/scale_elastic_ep", json={"new_data_parallel_size": 1})
    assert response.status_code == 501
    assert "engine.replicas" in response.json()["error"]["message"]


async def test_a_router_that_stores_no_responses_tells_none(start: Start) -> None:
    made = await start(None, config=AppConfig.model_validate({"model": "m", "responses": {"store": False}}))
    async with made.client() as client:
        asked = [await client.get("/v1/responses/resp_1"), await client.delete("/v1/responses/resp_1")]
    assert [(each.status_code, each.json()["error"]["param"]) for each in asked] == [(404, "response_id")] * 2
    assert made.front_ends[0].responses is None


# The user_config


def served_class(made: Started) -> tuple[str, float | None]:
    promised = made.router._service.middleware._promises.now.of(Headers(), None, may_tighten=True)
    return promised.slo_class, promised.promise.ttft_s


async def test_a_user_config_is_in_force_for_requests_from_then_on_and_goes_again(start: Start) -> None:
    made = await start(None)
    assert (await made.page())["user_config"] == {"in_force": {}, "refused": None}
    changed = {"classes": {"gold": {"ttft_s": 0.3}}, "default_class": "gold", "router": {"max_body_bytes": 2048}}
    bodies = made.router._service.middleware._bodies
    for user_config, slo_class, refuses in ((changed, ("gold", 0.3), True), (None, ("standard", 2.0), False)):
        await made.router.reconfigure(user_config, rank=None)
        assert served_class(made) == slo_class
        assert bodies.is_too_large(2049) is refuses
        assert made.front_ends[0].in_force.now.config.default_class == slo_class[0]


async def test_it_is_told_before_it_counts_as_taken_unless_the_shared_state_is_away(start: Start) -> None:
    """A router that dies right after that leaves it to those that start."""
    made = await start({}, front_end := FrontEnd())
    assert front_end.tellings == 1
    front_end.is_away = True
    await made.router.reconfigure({"router": {"max_wait_s": 9}}, rank=None)
    assert (front_end.tellings, (await made.page())["user_config"]["refused"]) == (2, None)


async def test_a_wrong_one_leaves_in_force_what_is_and_is_shown(start: Start) -> None:
    """Ray Serve replaces a router that raises."""
    right = {"router": {"max_wait_s": 9}}
    made = await start(right)
    await made.router.reconfigure(WRONG, rank=None)
    found = (await made.page())["user_config"]
    assert found["in_force"] == right and "router.replicas: cannot change while engines serve" in found["refused"]
    assert made.front_ends[0].in_force.now.config.router.max_wait_s == 9
    await made.router.reconfigure(right, rank=None)
    assert (await made.page())["user_config"]["refused"] is None


async def test_what_goes_wrong_unforeseen_costs_no_router_either(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await start({})
    monkeypatch.setattr("deployments.serving.user_config.with_live", lambda *_: {}["a fault"])
    await made.router.reconfigure({"router": {"max_wait_s": 9}}, rank=None)
    assert (await made.page())["user_config"] == {"in_force": {}, "refused": "'a fault'"}


async def test_one_that_starts_with_a_wrong_one_goes_by_what_others_of_its_kind_have_taken(start: Start) -> None:
    made = await start(WRONG, FrontEnd(told={"router": {"max_wait_s": 9}}))
    assert made.front_ends[0].in_force.now.config.router.max_wait_s == 9
    assert "router.replicas" in (await made.page())["user_config"]["refused"]


async def test_a_deploy_with_a_wrong_one_fails_with_its_keys_and_leaves_nothing_open(start: Start) -> None:
    closed: list[str] = []
    with pytest.raises(ConfigError, match=r"router\.replicas: cannot change while engines serve"):
        await start(WRONG, Opens(closed))
    assert closed == ["front end"]


async def test_keys_may_name_classes_that_come_by_user_config_alone(start: Start) -> None:
    keys = json.dumps([{"name": "a", "sha256": digest("key"), "default_class": "gold"}])
    gold = {"classes": {"gold": {}}, "default_class": "gold"}
    made = await start(gold, api_keys=keys)
    await made.router.reconfigure({}, rank=None)
    found = (await made.page())["user_config"]
    assert found["in_force"] == gold and "the key 'a' names classes ['gold']" in found["refused"]


# Batches


class Runner:
    """What runs batches, as a router sees it through its handle."""

    def __init__(self) -> None:
        self.looks, self.is_away, self._metrics = 0, False, BatchMetrics()

    async def look(self) -> None:
        self.looks += 1

    async def metrics(self) -> bytes:
        self._metrics.show([], {})
        return self._metrics.exposition()

    async def open_batches(self, owner: str) -> OpenBatches | None:
        return None if self.is_away else OpenBatches(count=1, oldest=[{"id": owner}])

    async def troubles(self, owner: str) -> Troubles:
        return {}


class Completes(FrontEnd):
    """Answers completions with the key and class that they came under."""

    def __init__(self) -> None:
        super().__init__()

        @self.app.post("/v1/completions")
        async def complete(request: Request) -> dict[str, Any]:
            context = current.get()
            assert context is not None and context.tenant is not None
            return {"key": context.tenant.name, "class": context.slo_class, "asked": await request.json()}

        @self.app.post("/v1/chat/completions")
        async def refuse() -> None:
            raise AdmissionError("the quota is spent", retry_after_s=7.0)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    made = Runner()
    monkeypatch.setattr("deployments.serving.router.RemoteRunner", lambda _: made)
    return made


@pytest.fixture
async def with_batches(start: Start, runner: Runner, tmp_path: Path) -> Started:
    config = AppConfig.model_validate({"model": "m", "batches": {"folder": str(tmp_path)}})
    keys = json.dumps([{"name": "team", "sha256": digest("key")}])
    return await start(None, Completes(), config=config, api_keys=keys, runner="a handle")


async def test_a_request_of_a_batch_goes_under_its_class_in_the_name_of_its_key(with_batches: Started) -> None:
    reply = await with_batches.router.answer_of_batch("team", "/v1/completions", b'{"prompt": "x"}')
    assert reply.status == 200
    assert json.loads(reply.body) == {"key": "team", "class": "offline", "asked": {"prompt": "x"}}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Any:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.target)
        yield receiver


async def test_a_request_of_a_batch_goes_on_in_the_trace_of_its_line(traces: Any, with_batches: Started) -> None:
    trace, line = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    of_line = {"traceparent": f"00-{trace}-{line}-01"}
    assert (await with_batches.router.answer_of_batch("team", "/v1/completions", b"{}", of_line)).status == 200
    await with_batches.router.leave()  # its end waits for what is not sent yet
    span = traces.one("POST /v1/completions")
    assert (span.trace_id, span.parent, span.attributes["sluice.class"]) == (trace, line, "offline")


@pytest.mark.parametrize(
    ("key", "path", "status", "retry_after_s"),
    [("gone", "/v1/completions", 401, None), ("team", "/v1/chat/completions", 429, 7.0)],
    ids=["its key was removed", "it may not queue"],
)
async def test_a_request_of_a_batch_that_is_refused_says_why(
    with_batches: Started, key: str, path: str, status: int, retry_after_s: float | None
) -> None:
    reply = await with_batches.router.answer_of_batch(key, path, b"{}")
    assert (reply.status, reply.retry_after_s) == (status, retry_after_s)


async def test_a_batch_is_told_to_what_runs_it_and_its_metrics_are_on_the_page(
    with_batches: Started, runner: Runner
) -> None:
    async with with_batches.client(WITH_KEY) as client:
        form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
        file = (await client.post("/v1/files", **form)).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        assert (await client.post("/v1/batches", json=asked)).status_code == 200
        wrong = await client.post("/v1/batches", json={**asked, "endpoint": "/v1/embeddings"})
        assert "/v1/chat/completions, /v1/completions," in wrong.json()["error"]["message"]
        assert 'sluice_batches_open{status="in_progress"} 0.0' in (await client.get("/metrics")).text
    assert runner.looks == 1
    assert await with_batches.router.loads() == {"m": Load(slots=4)}


async def test_the_status_has_the_open_batches_of_the_key_that_asks_alone(
    with_batches: Started, runner: Runner
) -> None:
    assert (await with_batches.page())["open_batches"] == {"count": 1, "oldest": [{"id": owner_of("team")}]}
    runner.is_away = True
    assert (await with_batches.page())["open_batches"] is None


async def test_without_a_folder_there_is_no_batch_api(start: Start) -> None:
    made = await start(None)
    async with made.client() as client:
        assert (await client.post("/v1/files", content=b"x" * 4096)).status_code == 501
    assert "open_batches" not in await made.page()
