"""vLLM's own HTTP application over the routed client, in the environment of routers."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.exceptions import GracefulHTTPError
from vllm.renderers.base import BaseRenderer

from deployments import app
from deployments.config.application import AppConfig
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.config.router import RouterSection
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.front_end import RoutedAsyncLLM, RoutedEngineCore
from deployments.engines.vllm.grammars import Compiled
from deployments.engines.vllm.validation import refuse_soon
from deployments.http.keys import digest
from deployments.http.middleware import log_causes
from deployments.serving import service
from policies.errors import AdmissionError, InputError, PolicyError, StateStoreError
from policies.live import Live
from router.metrics import RouterMetrics
from router.timing import HttpContext, current
from tests.deployments.bodies import behind_middleware, free
from tests.deployments.engines.vllm.routed import ROOM, Routed
from tests.waiting import until

pytestmark = pytest.mark.slow  # importing vLLM takes seconds

OF_THE_NODE = {"VLLM_API_KEY": "k", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
PAGE = "https://page.example"
# One that makes vLLM's front end tell its engine of transfers, counts of cached tokens, and a page that may ask.
OF_THE_OPERATOR = ["--kv-offloading-size", "1", "--enable-prompt-tokens-details", "--allowed-origins", f'["{PAGE}"]']
MOST_LOGPROBS = 100


class Compiles:
    """In place of the process that compiles grammars: refuses a regular expression that it is told."""

    async def compiled(self, fields: dict[str, Any]) -> Compiled:
        if fields["regex"] == "(a":
            raise InputError("structured output: the parenthesis is not closed")
        return Compiled(backend="xgrammar", was_auto=True, grammar="as it was checked")


@pytest.fixture
def routed() -> Routed:
    return Routed()


@pytest.fixture
async def vllms(monkeypatch: pytest.MonkeyPatch, routed: Routed) -> AsyncIterator[FastAPI]:
    for name, value in OF_THE_NODE.items():
        monkeypatch.setenv(name, value)
    for name, value in app.router_env().items():
        monkeypatch.setenv(name, value)
    args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, "--disable-log-stats", *OF_THE_OPERATOR])
    args.enable_offline_docs = True
    most = Live(MOST_LOGPROBS)
    llm = RoutedAsyncLLM(args, routed, None, most, made_grammars=lambda _: Compiles())  # type: ignore[arg-type, return-value]
    made = build_app(args, ("generate",), llm.model_config)
    refuse_soon(made)
    log_causes(made)
    await init_app_state(llm, made.state, args, ("generate",))
    made.state.server = SimpleNamespace()
    yield made
    assert not llm.output_processor.request_states
    llm.shutdown()


@pytest.fixture
def served(vllms: FastAPI) -> ASGIApp:
    return behind_middleware(vllms, ROOM)


@pytest.fixture
async def client(served: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://sluice") as made:
        yield made


async def test_a_request_for_more_answers_than_there_is_room_for_is_refused_before_any_is_made(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="deployments.http")
    most = {"prompt": ["a"] * 2, "n": 128, "max_tokens": 4}
    beyond = [{**most, "prompt": ["a"], "n": 129}, {**most, "prompt": ["a"] * 129, "n": 1}]
    for stream in (False, True):
        for body in beyond:
            refused = await client.post("/v1/completions", json={**body, "stream": stream})
            assert refused.status_code == 400
            assert "128" in refused.json()["error"]["message"]
        full = await client.post(
            "/v1/completions", json={**most, "stream": stream}, headers={"X-Sluice-Class": "narrow"}
        )
        assert (full.status_code, full.headers["retry-after"]) == (429, "7")
        assert full.json()["error"]["message"] == "no room"
        assert vars(caplog.records[-1])["outcomes"] == ["refused"]


@pytest.mark.parametrize(
    "error",
    [
        UnicodeEncodeError("utf-8", "a", 0, 1, "no such letter"),
        TypeError("no such type"),
        PolicyError("theirs:Order.key must answer a finite number, got nan"),
    ],
)
async def test_what_is_answered_with_500_leaves_its_cause(
    client: httpx.AsyncClient, routed: Routed, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    routed.raises = error
    assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 500
    (line,) = [record for record in caplog.records if record.message == "/v1/completions failed"]
    assert line.levelname == "ERROR" and line.exc_text is not None
    assert f"{type(error).__name__}: {error}" in line.exc_text


BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/messages": {"model": str(DEMO_MODEL), "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_request_that_may_not_queue_gets_its_status_streamed_or_not(
    client: httpx.AsyncClient, routed: Routed, path: str, stream: bool
) -> None:
    for error, status in ((AdmissionError("the rate is spent", 7.0), 429), (StateStoreError("Redis is away"), 503)):
        routed.raises = error
        response = await client.post(path, json={**BODIES[path], "stream": stream})
        assert (response.status_code, response.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("checks", [0, 1])
async def test_a_shared_state_that_is_lost_between_two_checks_is_answered_as_if_before(
    client: httpx.AsyncClient, routed: Routed, path: str, stream: bool, checks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks for a place before it begins a stream, and again for each engine request."""
    caplog.set_level("INFO", logger="deployments.http")
    routed.checks_until_cut_off = checks
    response = await client.post(path, json={**BODIES[path], "stream": stream})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "Redis is away")
    assert vars(caplog.records[-1])["outcomes"] == ["error"]
    assert not routed.asked


@pytest.mark.parametrize("path", BODIES)
async def test_streams_that_may_queue_come_whole(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json={**BODIES[path], "stream": True})
    assert response.status_code == 200
    assert "00" in response.text
    if path == "/v1/responses":
        assert "response.created" in response.text
        assert "response.completed" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_grammar_is_compiled_before_its_request_is_queued(
    client: httpx.AsyncClient, routed: Routed, path: str, stream: bool
) -> None:
    body = {**BODIES[path], "stream": stream}
    refused = await client.post(path, json={**body, "structured_outputs": {"regex": "(a"}})
    assert (refused.status_code, "not closed" in refused.text) == (400, True)
    assert not routed.asked
    served = await client.post(path, json={**body, "structured_outputs": {"regex": "a", "json_object": None}})
    assert served.status_code == 200
    (asked,) = routed.asked
    told = asked.sampling_params.structured_outputs
    assert (told._backend, told._backend_was_auto, told.grammar) == ("xgrammar", True, "as it was checked")


class Exchange:
    """One HTTP exchange in the way of Ray Serve's replica: its client sends a body and then nothing more."""

    def __init__(self, path: str, body: dict[str, Any], *, is_broken: bool) -> None:
        headers = [(b"content-type", b"application/json")]
        asgi = {"version": "3.0", "spec_version": "2.3"}
        self.scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.scope |= {"asgi": asgi, "root_path": "", "scheme": "http", "server": ("sluice", 80), "http_version": "1.1"}
        self._body: Message | None = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        self.has_left = asyncio.Event()
        self._is_broken = is_broken

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return body
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._is_broken:
            raise OSError("the connection is broken")


ONE = {path: (body, 1) for path, body in BODIES.items()}
SEVERAL = {
    "/v1/completions": ({"prompt": ["a", "b"], "n": 3, "max_tokens": 4}, 6),
    "/v1/chat/completions": ({**BODIES["/v1/chat/completions"], "n": 3}, 3),
}
ENDS = [("time is up", False), ("time is up", True), ("client left", False), ("client left", True)]
FREED_S = 1.0


@pytest.mark.parametrize(("path", "asked"), [*ONE.items(), *SEVERAL.items()])
@pytest.mark.parametrize(("how", "stream"), [*ENDS, ("connection broke", True)])
async def test_however_an_exchange_ends_the_slots_of_its_requests_are_free(
    served: ASGIApp, routed: Routed, how: str, stream: bool, path: str, asked: tuple[dict[str, Any], int]
) -> None:
    body, requests = asked
    routed.stalls = True
    exchange = Exchange(path, {**body, "stream": stream}, is_broken=how == "connection broke")
    serving = asyncio.create_task(served(exchange.scope, exchange.receive, exchange.send))
    await until(lambda: len(routed.asked) == requests or serving.done())
    if how == "time is up":
        serving.cancel()
    elif how == "client left":
        exchange.has_left.set()
    ended, _ = await asyncio.wait([serving], timeout=FREED_S)
    assert (len(ended), routed.running) == (1, set())


@pytest.mark.parametrize("ends", ["before it is queued", "while it is queued"])
async def test_what_a_handler_asks_for_after_the_end_of_its_exchange_holds_no_slot(ends: str) -> None:
    class Slow(Routed):
        async def submit(self, request: Any, **_: Any) -> None:
            await super().submit(request)
            await context.end()

    routed, context = Slow(), HttpContext(received_s=0.0, slo_class="standard")
    current.set(context)
    if ends == "before it is queued":
        await context.end()
    request: Any = SimpleNamespace(request_id="late", resumable=False)
    with pytest.raises(GracefulHTTPError):
        await RoutedEngineCore(routed, "m").add_request_async(request)
    assert (len(routed.asked), routed.running) == (int(ends == "while it is queued"), set())


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"prompt_logprobs": 4}, 200),
        ({"prompt_logprobs": 5}, 400),
        ({"echo": True, "logprobs": 5, "max_tokens": 1}, 400),
        ({"prompt_logprobs": 5, "n": 2}, 400),
    ],
)
async def test_logprobs_of_a_prompt_are_as_many_as_are_made_in_a_moment(
    client: httpx.AsyncClient, routed: Routed, asked: dict[str, Any], status: int
) -> None:
    """All streams wait while they are made."""
    answered = await client.post("/v1/completions", json={"prompt": [300] * 20, "max_tokens": 4, **asked})
    assert (answered.status_code, "max_prompt_logprobs" in answered.text) == (status, status == 400)
    assert len(routed.asked) == (status == 200)


async def test_a_long_text_leaves_a_thread_to_short_ones(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many long ones as there are threads, which go on until a short one has been answered."""
    may_end, begun = threading.Event(), []
    get = BaseRenderer.get_tokenizer

    class Waits:
        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def __call__(self, text: str, **settings: Any) -> Any:
            if len(text) > 1000:
                begun.append(text)
                assert may_end.wait(60)
            return self._tokenizer(text, **settings)

    monkeypatch.setattr("deployments.engines.vllm.front_end.INLINE_CHARS", 10)
    monkeypatch.setattr("deployments.engines.vllm.front_end.SHORT_TEXT_CHARS", 1000)
    monkeypatch.setattr(BaseRenderer, "get_tokenizer", lambda renderer: Waits(get(renderer)))
    long = [asyncio.create_task(client.post("/tokenize", json={"prompt": "a" * 2000})) for _ in range(4)]
    await until(lambda: bool(begun))
    try:
        async with asyncio.timeout(30):
            short = await client.post("/tokenize", json={"prompt": "a"})
    finally:
        may_end.set()
    assert {answer.status_code for answer in [short, *await asyncio.gather(*long)]} == {200}


async def test_answers_to_a_long_prompt_are_as_many_as_it_is_copied_in_a_moment(
    client: httpx.AsyncClient, routed: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.engines.vllm.front_end.MAX_COPIED_TOKENS", 1000)
    for answers, status in ((10, 200), (11, 400)):
        body = {"prompt": [300] * 100, "max_tokens": 4, "n": answers}
        assert (await client.post("/v1/completions", json=body)).status_code == status
    assert len(routed.asked) == 10


def posted(vllms: FastAPI) -> dict[str, dict[str, Any]]:
    """The fields of what every route takes, by its path: of whatever vLLM is installed."""
    schemas = vllms.openapi()["components"]["schemas"]
    fields: dict[str, dict[str, Any]] = {}
    for path, methods in vllms.openapi()["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        named = [ref.rsplit("/", 1)[-1] for ref in re.findall(r"'\$ref': '([^']*)'", str(body))]
        fields[path] = {name: field for each in named for name, field in schemas[each].get("properties", {}).items()}
    return {path: found for path, found in fields.items() if found}


async def test_no_field_of_any_route_takes_more_than_a_request_may_hold(
    vllms: FastAPI, client: httpx.AsyncClient, routed: Routed
) -> None:
    routes = posted(vllms)
    assert {"/tokenize", "/generative_scoring", "/v1/chat/completions/batch", *BODIES} <= routes.keys()
    for path, fields in routes.items():
        for field in fields:
            for large in (["a"] * 5000, "a" * 40_000, {str(n): "a" for n in range(5000)}, [[1] * 70_000]):
                refused = await client.post(path, json={**BODIES.get(path, {}), field: large})
                assert (refused.status_code, field in refused.text or "the body" in refused.text) == (400, True)
    assert not routed.asked


async def test_no_list_of_any_route_makes_more_engine_requests_than_one_may(
    vllms: FastAPI, client: httpx.AsyncClient, routed: Routed
) -> None:
    """Lists of prompts of every form, in every field: of a route that comes with another vLLM too."""
    texts, chats = ["a"] * 300, [[{"role": "user", "content": "a"}]] * 300
    questions = {str(n): {"type": "boolean", "instructions": "a"} for n in range(300)}
    for path, fields in posted(vllms).items():
        for field in fields:
            for many in (texts, [[300]] * 300, chats, questions):
                routed.asked.clear()
                others = {
                    "messages": chats[0],
                    "prompt": "a",
                    "input": "a",
                    "state": "a",
                    "query": "a",
                    "max_tokens": 1,
                }
                others |= {"model": str(DEMO_MODEL), "label_token_ids": [300, 301], "items": ["a"]}
                asked = await client.post(path, json={**others, field: many})
                assert len(routed.asked) <= 256, (path, field, asked.status_code)


async def test_of_a_route_that_nobody_foresaw_the_engine_requests_are_counted(routed: Routed) -> None:
    core = RoutedEngineCore(routed, "m")  # type: ignore[arg-type]
    context = HttpContext(0.0, "standard", max_engine_requests=2)
    current.set(context)

    async def ask(request_id: str) -> None:
        request: Any = SimpleNamespace(request_id=request_id, resumable=False, sampling_params=None)
        await core.add_request_async(request)

    await asyncio.gather(ask("0"), ask("1"))
    with pytest.raises(GracefulHTTPError, match="more than 2"):
        await ask("2")
    context.timings[0].outcome = "stop"
    await ask("3")
    assert [request.request_id for request in routed.asked] == ["0", "1", "3"]


async def test_what_a_client_says_of_transfers_reaches_no_engine_and_no_count(
    client: httpx.AsyncClient, routed: Routed
) -> None:
    forged = {"kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 999}}
    for answers in (1, 2):
        done = await client.post("/v1/completions", json={**BODIES["/v1/completions"], **forged, "n": answers})
        assert "999" not in str(done.json()["usage"])
    assert [request.sampling_params.extra_args for request in routed.asked] == [None] * 3


async def test_for_a_request_that_vllm_refuses_no_other_takes_a_slot(client: httpx.AsyncClient, routed: Routed) -> None:
    """To tell a KV connector of it vLLM sends one that the engine would end without a word."""
    refused = {"model": "nobody", "kv_transfer_params": {"do_remote_prefill": True}}
    assert (await client.post("/v1/completions", json={**BODIES["/v1/completions"], **refused})).status_code == 404
    assert not routed.asked


async def test_vllm_asks_for_no_key_opens_no_route_of_developers_and_stores_no_response(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get("/v1/models")).status_code == 200
    assert (await client.post("/reset_prefix_cache")).status_code == 404
    stored = await client.post("/v1/responses", json={"input": "a", "background": True})
    assert (stored.status_code, "RESPONSES_API_STORE" in stored.text) == (400, True)


LIMIT_BYTES = 2048
KEY = {"name": "a", "sha256": digest("a key"), "classes": ["standard"]}
WITH_KEY = {"Authorization": "Bearer a key", "Content-Type": "application/json"}


@pytest.fixture
async def whole(vllms: FastAPI, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that serves under a prefix and asks for a key."""

    metrics = RouterMetrics(labels={"router": "a"})

    async def pages() -> list[bytes]:
        return [metrics.exposition()]

    async def nobody() -> None:
        """No engine is there to be told of settings."""

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(
            app=vllms,
            announcer=SimpleNamespace(tell=nobody),
            name="m",
            names=("m",),
            metrics_pages=pages,
            max_model_len=2048,
            takes_media=False,
            charge=free,
        )

    monkeypatch.setattr(service, "opened_front_end", opened)
    monkeypatch.setattr("deployments.serving.user_config.log_by", lambda settings: None)
    config = AppConfig(model="m", router=RouterSection(max_body_bytes=LIMIT_BYTES))
    async with service.opened_service(config, "redis://127.0.0.1:1/0", api_keys=json.dumps([KEY])) as serving:
        await serving.user_config.change({})  # as Ray Serve does before a request comes
        transport = httpx.ASGITransport(serving.app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://sluice/llm") as made:
            yield made


async def test_a_browser_may_ask_whether_it_may_send_its_key_and_read_why_it_is_refused(
    whole: httpx.AsyncClient, routed: Routed
) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-sluice-class"}
    preflight = await whole.options("/v1/completions", headers={"Origin": PAGE, **asked})
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    for headers, size, status in (
        ({}, 10, 401),
        (WITH_KEY | {"X-Sluice-Class": "gold"}, 10, 400),
        (WITH_KEY | {"X-Sluice-Class": "offline"}, 10, 403),
        (WITH_KEY, LIMIT_BYTES + 1, 413),
        (WITH_KEY, 10, 400),
    ):
        refused = await whole.post("/v1/completions", content=b"x" * size, headers={"Origin": PAGE, **headers})
        allowed = refused.headers.get_list("access-control-allow-origin")
        assert (refused.status_code, allowed) == (status, [PAGE])
    routed.raises = AdmissionError("the rate is spent", 7.0)
    spent = await whole.post("/v1/completions", json=BODIES["/v1/completions"], headers={"Origin": PAGE, **WITH_KEY})
    assert (spent.status_code, spent.headers["access-control-allow-origin"]) == (429, PAGE)
    assert "access-control-allow-origin" not in (await whole.get("/metrics", headers={"Origin": "https://x"})).headers


async def test_the_metrics_page_is_one_under_both_its_names_and_nothing_is_below(whole: httpx.AsyncClient) -> None:
    pages = [await whole.get(path) for path in ("/metrics", "/metrics/")]
    assert [page.status_code for page in pages] == [200, 200]
    assert 'sluice_replicas_lost_total{router="a"} 0.0' in pages[0].text
    assert pages[0].text == pages[1].text
    below = await whole.get("/metrics/x", headers=WITH_KEY)
    assert below.status_code == 404


async def test_a_route_that_tries_a_body_as_each_kind_of_request_is_not_served(whole: httpx.AsyncClient) -> None:
    assert (await whole.post("/invocations", json={"prompt": "a"}, headers=WITH_KEY)).status_code == 404


async def test_the_page_of_the_api_needs_nothing_from_other_hosts(whole: httpx.AsyncClient, vllms: FastAPI) -> None:
    assert vllms.openapi_schema is not None, "it would be made while streams wait"
    page = await whole.get("/docs", headers=WITH_KEY)
    assert (page.status_code, "http://" in page.text, "https://" in page.text) == (200, False, False)
    for address in ("static/swagger-ui-bundle.js", "static/swagger-ui.css", "openapi.json"):
        assert address in page.text
        assert (await whole.get(f"/{address}", headers=WITH_KEY)).status_code == 200


def test_an_environment_that_names_other_limits_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "7")
    assert app.router_env()["VLLM_MAX_N_SEQUENCES"] == "7"
    assert app.router_env()["VLLM_MAX_COMPLETION_PROMPTS"] == "128"


OF_THE_BUILD_FOR_GPUS = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.32.0" if name == "vllm" else version(name)
from vllm.platforms import current_platform
print(repr(current_platform.device_type))
"""


@pytest.mark.parametrize(("env", "found"), [({}, "''"), (app.router_env(), "'cpu'")], ids=["as it is", "in a router"])
def test_the_build_for_gpus_makes_front_ends_where_there_is_no_gpu(env: dict[str, str], found: str) -> None:
    told = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | env
    command = [sys.executable, "-c", OF_THE_BUILD_FOR_GPUS]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == found
