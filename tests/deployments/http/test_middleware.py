"""The middleware around a small application of the kind that vLLM's is."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http import exchange
from deployments.http.exchange import split_time
from deployments.http.keys import KeyRing, digest
from deployments.http.middleware import SluiceMiddleware
from deployments.http.promises import Promises
from policies.errors import AdmissionError, ReplicaLostError, StateStoreError
from policies.router.promise import TARGETS, Promise
from policies.router.sessions import Task
from router.admission import Tenant
from router.timing import HttpContext, RequestTiming, current
from tests.deployments.bodies import asking, behind_middleware, key_ring, request_bodies
from tests.waiting import PATIENCE_S

LIMIT = 1000
CLASSES = ("standard", "offline", "fast")
PROMISES = Promises(
    {"standard": Promise(ttft_s=2.0, tpot_s=0.1), "offline": Promise(), "fast": Promise(ttft_s=0.5, e2e_s=30.0)},
    "standard",
    {"priority": "fast", "default": "standard", "flex": "offline"},
)


async def leave(app: ASGIApp) -> None:
    """Asks, and when the application waits for what comes next, leaves in Ray Serve's way."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    body: Message = {"type": "http.request", "body": b"", "more_body": False}
    asked_again = asyncio.Event()

    async def receive() -> Message:
        if asked_again.is_set():
            return await messages.get()
        asked_again.set()
        return body

    async def send(message: Message) -> None:
        raise AssertionError(f"nobody is there for {message}")

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    request = asyncio.create_task(wrapped(app)(scope, receive, send))
    await asked_again.wait()
    messages.put_nowait({"type": "http.disconnect"})
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def test_a_handler_in_a_task_of_its_own_hears_that_its_client_has_left() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """As vLLM's `with_cancellation`: a cancellation of `wait` leaves its tasks alone."""
        await receive()

        async def listen() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        handler, listener = asyncio.create_task(work()), asyncio.create_task(listen())
        _, pending = await asyncio.wait([handler, listener], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(handler, return_exceptions=True)

    await asyncio.wait_for(leave(app), 30)
    assert ended == ["work"]


async def test_an_application_that_does_not_listen_is_cancelled_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "LEAVE_S", 0.0)
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await asyncio.wait_for(leave(app), 30)
    await asyncio.wait_for(ended.wait(), 30)


def context() -> HttpContext:
    found = current.get()
    assert found is not None
    return found


async def what_it_got(request: Request) -> JSONResponse:
    return JSONResponse(
        {
            "bytes": len(await request.body()),
            "slo_class": context().slo_class,
            "promise": [getattr(context().promise, name) for name in TARGETS],
            "service_tier": None,  # as vLLM leaves it
            "expected_tokens": context().expected_tokens,
        }
    )


async def served(request: Request) -> PlainTextResponse:
    """As if an engine had done it: 0.2 s after its arrival it was queued, 0.3 s later assigned, 0.5 s later done."""
    made = context()
    made.received_s -= 1.5
    submitted_s = made.received_s + 0.2
    made.timings.append(
        RequestTiming(
            received_s=made.received_s,
            submitted_s=submitted_s,
            assigned_s=submitted_s + 0.3,
            last_token_s=submitted_s + 0.8,
            output_tokens=7,
            outcome="stop",
        )
    )
    return PlainTextResponse("done")


async def broken(request: Request) -> PlainTextResponse:
    raise RuntimeError("broken")


async def refused(request: Request) -> JSONResponse | StreamingResponse:
    """As vLLM does: a stream has begun when the engine refuses, or when no replica came for what was queued."""
    found, why = context(), request.query_params["why"]
    if why == "Redis is away":
        found.refused = StateStoreError(why)
        return JSONResponse({}, 500)

    async def stream() -> AsyncIterator[bytes]:
        if why == "no room":
            found.refused = AdmissionError(why, 6.2)
        else:
            found.timings.append(RequestTiming(received_s=0.0, submitted_s=0.0, unserved=ReplicaLostError(why)))
        yield b'data: {"error": ...}'
        yield b"data: [DONE]"

    found.queued = why != "no room"
    return StreamingResponse(stream(), media_type="text/event-stream")


STREAMED = ("a", "data: {", '"service_tier":null')


async def streamed(request: Request) -> StreamingResponse:
    async def stream() -> AsyncIterator[bytes]:
        for text in STREAMED:
            yield f'data: {{"content":{json.dumps(text)}}}\n\n'.encode()
        yield b"data: [DONE]\n\n"

    return StreamingResponse(stream(), media_type="text/event-stream")


PATHS = {
    "/stream": streamed,
    "/": what_it_got,
    "/served": served,
    "/broken": broken,
    "/refused": refused,
    "/health": what_it_got,
}


def starlette_app() -> ASGIApp:
    return Starlette(routes=[Route(path, endpoint, methods=["GET", "POST"]) for path, endpoint in PATHS.items()])


def fastapi_app() -> ASGIApp:
    app = FastAPI()

    @app.post("/")
    async def typed(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return app


def wrapped(app: ASGIApp, **parts: Any) -> SluiceMiddleware:
    return behind_middleware(app, CLASSES, **{"bodies": request_bodies(LIMIT), "promises": PROMISES, **parts})


def client_of(app: ASGIApp, prefix: str = "", **parts: Any) -> httpx.AsyncClient:
    return asking(wrapped(app, **parts), prefix=prefix, raises=False)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(starlette_app()) as made:
        yield made


async def chunks(total: int) -> AsyncIterator[bytes]:
    """A body that does not say its length."""
    for _ in range(total // 100):
        yield b"x" * 100


def durations(response: httpx.Response) -> dict[str, float]:
    """Milliseconds by name."""
    parts = (part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    return {name: float(value) for name, value in parts}


# Keys

ENTRIES = [
    {"name": "all", "sha256": digest("key-all")},
    {"name": "night", "sha256": digest("key-night"), "classes": ["offline"], "default_class": "offline"},
    {"name": "closer", "sha256": digest("key-closer"), "may_tighten": True},
]


@pytest.fixture
async def keys() -> KeyRing:
    made = key_ring(CLASSES, entries=ENTRIES)
    await made.reload()
    return made


@pytest.fixture
async def locked(keys: KeyRing) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(starlette_app(), keys=keys) as made:
        yield made


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}


@pytest.mark.parametrize("headers", [{}, bearer("key-al"), bearer(""), {"Authorization": "Basic key-all"}])
async def test_without_a_known_key_nothing_is_served(locked: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await locked.post("/", headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_probes_and_the_page_need_no_key(keys: KeyRing, log: pytest.LogCaptureFixture, prefix: str) -> None:
    async with client_of(starlette_app(), prefix, keys=keys) as client:
        assert (await client.get(f"{prefix}/health")).status_code == 200
        assert not logged(log)
        for path in ("/v1/models", "/llm/health"):
            assert (await client.get(prefix + path)).status_code == 401
        assert (await client.get(f"{prefix}/")).status_code == 200  # the page, which asks for one
        assert (await client.post(f"{prefix}/")).status_code == 401


# What is promised


async def promised(client: httpx.AsyncClient, tier: str | None = None, **headers: str) -> tuple[str, list[float]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await client.post("/", json={} if tier is None else {"service_tier": tier}, headers=named)
    assert response.status_code == 200, response.text
    return response.json()["slo_class"], response.json()["promise"]


async def test_a_request_has_its_class_s_promise_and_headers_change_each_target_by_itself(
    client: httpx.AsyncClient,
) -> None:
    assert await promised(client) == ("standard", [2.0, 0.1, None])
    assert await promised(client, x_slo_ttft_ms="800") == ("standard", [0.8, 0.1, None])
    assert await promised(client, x_slo_tpot_ms="62.5", x_sluice_class="fast") == ("fast", [0.5, 0.0625, 30.0])
    assert await promised(client, x_slo_e2e_ms="9000") == ("standard", [2.0, 0.1, 9.0])
    both = await client.get("/", headers={"x-slo-ttft-ms": "3000", "x-slo-tpot-ms": "200"})
    assert both.json()["promise"] == [3.0, 0.2, None]


async def test_a_class_is_named_by_header_before_tier_before_key_before_application(locked: httpx.AsyncClient) -> None:
    key = bearer("key-all")
    assert await promised(locked, "priority", x_sluice_class="offline", **key) == ("offline", [None, None, None])
    assert await promised(locked, "priority", **key) == ("fast", [0.5, None, 30.0])
    assert (await promised(locked, "flex", **bearer("key-night")))[0] == "offline"
    assert (await promised(locked, "auto", **bearer("key-night")))[0] == "offline"
    assert (await promised(locked, None, **bearer("key-night")))[0] == "offline"
    assert (await promised(locked, "scale", **key))[0] == "standard"


@pytest.mark.parametrize(
    ("headers", "tier", "named"),
    [({"X-Sluice-Class": "standard"}, None, "'standard'"), ({}, "priority", "service_tier 'priority'")],
)
async def test_a_class_that_the_key_may_not_use_is_forbidden(
    locked: httpx.AsyncClient, headers: dict[str, str], tier: str | None, named: str
) -> None:
    response = await locked.post("/", json={"service_tier": tier}, headers=bearer("key-night", **headers))
    assert (response.status_code, named in response.json()["error"]["message"]) == (403, True)


@pytest.mark.parametrize(("asked", "served"), [("priority", "priority"), ("auto", "default"), ("flex", "flex")])
async def test_an_answer_says_under_which_tier_it_was_served(
    client: httpx.AsyncClient, asked: str, served: str
) -> None:
    response = await client.post("/", json={"service_tier": asked})
    assert response.json()["service_tier"] == served
    assert int(response.headers["content-length"]) == len(response.content)
    assert (await client.post("/", json={})).json()["service_tier"] is None
    named = await client.post("/", json={"service_tier": asked}, headers={"X-Sluice-Class": "fast"})
    assert named.json()["service_tier"] == "priority"


async def test_every_chunk_of_a_stream_says_under_which_tier_it_is_served(client: httpx.AsyncClient) -> None:
    response = await client.post("/stream", json={"service_tier": "priority"})
    *chunks, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    assert [json.loads(chunk.removeprefix("data: ")) for chunk in chunks] == [
        {"service_tier": "priority", "content": text} for text in STREAMED
    ]
    assert '"priority"' not in (await client.post("/stream", json={})).text


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-e2e-ms"])
@pytest.mark.parametrize("value", ["", "soon", "0", "-5", "1e3", "nan", "inf", "1_000", "86400001", "9" * 400, "1.2.3"])
@pytest.mark.parametrize("by_class", [{}, {"X-Sluice-Class": "fast"}])
async def test_a_malformed_target_is_refused_by_the_name_of_its_header(
    client: httpx.AsyncClient, name: str, value: str, by_class: dict[str, str]
) -> None:
    response = await client.post("/", headers={name: value, **by_class}, content=b"x" * LIMIT)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{name} must be milliseconds")
    assert len(response.text) < 300


@pytest.mark.parametrize("tier", [3, ["flex"], {"a": 1}, True])
async def test_a_service_tier_that_is_no_word_is_refused(client: httpx.AsyncClient, tier: object) -> None:
    response = await client.post("/", json={"service_tier": tier})
    assert (response.status_code, "service_tier" in response.text) == (400, True)


async def test_a_key_may_ask_for_more_time_than_its_class_has_and_not_for_less(locked: httpx.AsyncClient) -> None:
    key = bearer("key-all")
    assert await promised(locked, x_slo_ttft_ms="2000", x_slo_tpot_ms="150", **key) == ("standard", [2.0, 0.15, None])
    assert await promised(locked, "priority", x_slo_ttft_ms="700", **key) == ("fast", [0.7, None, 30.0])
    assert await promised(locked, "priority", x_slo_e2e_ms="31000", **key) == ("fast", [0.5, None, 31.0])
    assert (await locked.post("/", headers={"x-slo-e2e-ms": "1000", **key})).status_code == 403
    refused = await locked.post("/", headers={"x-slo-ttft-ms": "1999", **key})
    assert refused.status_code == 403
    for part in ("x-slo-ttft-ms", "'standard' has 2000", "may_tighten"):
        assert part in refused.json()["error"]["message"]
    none_there = await locked.post("/", headers={"x-slo-tpot-ms": "50", "X-Sluice-Class": "fast", **key})
    assert "'fast' has no such target" in none_there.json()["error"]["message"]
    assert await promised(locked, x_slo_ttft_ms="100", **bearer("key-closer")) == ("standard", [0.1, 0.1, None])


async def whole_answer_s(client: httpx.AsyncClient, body: dict[str, Any] | None = None, **headers: str) -> Any:
    response = await client.post("/", json=body or {}, headers={n.replace("_", "-"): v for n, v in headers.items()})
    assert response.status_code == 200, response.text
    return response.json()["promise"][TARGETS.index("e2e_s")]


@pytest.mark.parametrize("name", ["x_stainless_timeout", "x_stainless_read_timeout", "x_request_timeout"])
async def test_a_client_that_waits_for_a_whole_answer_wants_it_before_it_gives_up(
    client: httpx.AsyncClient, name: str
) -> None:
    assert await whole_answer_s(client, **{name: "20"}) == 20.0
    assert await whole_answer_s(client, **{name: "20.5"}, x_request_timeout_seconds="60") == 20.5
    assert await whole_answer_s(client, {"stream": True}, **{name: "20"}) is None
    assert await whole_answer_s(client, {"background": True}, **{name: "20"}) is None
    assert await whole_answer_s(client, **{name: "20"}, x_slo_e2e_ms="25000") == 25.0
    fast = {"x_sluice_class": "fast"}
    assert [await whole_answer_s(client, **fast, **{name: time_s}) for time_s in ("20", "40")] == [20.0, 30.0]


async def test_a_request_that_ends_after_its_time_is_to_be_whole_by_then_also_as_a_stream(
    client: httpx.AsyncClient,
) -> None:
    assert await whole_answer_s(client, {"stream": True}, x_request_timeout_seconds="7.5") == 7.5


@pytest.mark.parametrize("value", ["600", "600.0", "3600", "0", "-1", "NOT_GIVEN", "None", "30s", "inf", ""])
async def test_a_timeout_that_nobody_has_chosen_or_that_is_none_promises_nothing(
    client: httpx.AsyncClient, value: str
) -> None:
    assert await whole_answer_s(client, x_stainless_timeout=value) is None


async def test_a_key_that_may_not_tighten_gets_nothing_for_its_timeout_and_no_error(locked: httpx.AsyncClient) -> None:
    timeout = {"x_stainless_timeout": "5"}
    assert await whole_answer_s(locked, **timeout, **bearer("key-all")) is None
    assert await whole_answer_s(locked, **timeout, x_sluice_class="fast", **bearer("key-all")) == 30.0
    assert await whole_answer_s(locked, **timeout, **bearer("key-closer")) == 5.0


# What is let in


@pytest.mark.parametrize(
    ("why", "status", "retry_after"),
    [("no room", 429, "7"), ("no replica took it", 503, "5"), ("Redis is away", 503, "5")],
)
async def test_a_refusal_is_a_refusal_even_if_a_stream_had_begun(
    client: httpx.AsyncClient, why: str, status: int, retry_after: str | None
) -> None:
    response = await client.post("/refused", params={"why": why})
    assert (response.status_code, response.json()["error"]["message"]) == (status, why)
    assert response.headers.get("retry-after") == retry_after


async def test_a_body_at_the_limit_passes(client: httpx.AsyncClient) -> None:
    assert (await client.post("/", content=b"x" * LIMIT)).json()["bytes"] == LIMIT
    assert (await client.post("/", content=chunks(LIMIT))).json()["bytes"] == LIMIT


@pytest.mark.parametrize(
    ("content", "headers"),
    [(b"x" * (LIMIT + 1), {}), (b"x", {"content-length": "9" * 5000}), (chunks(LIMIT + 500), {"content-length": "10"})],
    ids=["told", "told in thousands of digits", "understated"],
)
async def test_a_body_beyond_the_limit_is_refused_with_the_setting(
    client: httpx.AsyncClient, content: Any, headers: dict[str, str]
) -> None:
    response = await client.post("/", content=content, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"] == {
        "message": "the body exceeds 1000 bytes (router.max_body_bytes)",
        "type": "RequestEntityTooLarge",
        "param": None,
        "code": 413,
    }


@pytest.mark.parametrize("app", [starlette_app, fastapi_app])
async def test_a_body_that_grows_beyond_the_limit_is_refused(app: Any) -> None:
    async with client_of(app()) as client:
        response = await client.post("/", content=chunks(LIMIT + 500), headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert "1000 bytes" in response.text


async def test_a_body_that_is_late_is_told_so_and_its_connection_closed() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(60)

    async with client_of(starlette_app(), bodies=request_bodies(LIMIT, timeout_s=0.05)) as client:
        late = await client.post("/", content=slow())
    assert (late.status_code, late.headers["connection"]) == (408, "close")
    assert late.json()["error"]["type"] == "RequestTimeout"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/chat/completions/render"])
async def test_a_route_that_only_reads_is_charged_before_it_does(keys: KeyRing, path: str) -> None:
    charged: list[float] = []

    async def charge(tenant: Tenant | None, tokens: float) -> None:
        assert tenant is not None
        charged.append(tokens)
        if len(charged) > 1:
            raise AdmissionError("tokens_per_minute of all are spent", 6.5)

    read: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        read.append(scope["path"])
        await PlainTextResponse("1 token")(scope, receive, send)

    async with client_of(app, keys=keys, charge=charge) as client:
        for expected in (200, 429):
            answer = await client.post(path, content=b'"' + b"a" * 398 + b'"', headers=bearer("key-all"))
            assert answer.status_code == expected
        assert answer.headers["retry-after"] == "7"
        assert (await client.post("/other", content=b"{}", headers=bearer("key-all"))).status_code == 200
    assert (charged, read) == ([100.0, 100.0], [path, "/other"])


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"X-Sluice-Class": "gold"}, "no class 'gold'; there are fast, offline, standard"),
        ({"X-Request-Id": "x" * 129}, "X-Request-Id exceeds 128 characters"),
        *(({"X-Sluice-Expected-Tokens": wrong}, "Expected") for wrong in ("0", "-3", "many", "1" * 12, "1" * 5000)),
    ],
)
async def test_a_header_that_means_nothing_is_refused_in_words(
    client: httpx.AsyncClient, headers: dict[str, str], words: str
) -> None:
    response = await client.post("/", headers=headers)
    assert (response.status_code, words in response.json()["error"]["message"]) == (400, True)


async def test_a_client_may_say_how_long_an_answer_it_expects(client: httpx.AsyncClient) -> None:
    asked = {"X-Sluice-Expected-Tokens": "250", "X-Request-Id": "x" * 128}
    assert (await client.post("/", headers=asked)).json()["expected_tokens"] == 250


# Timing


async def test_every_response_says_where_its_time_went(client: httpx.AsyncClient) -> None:
    for path in ("/", "/broken", "/not-there"):
        assert set(durations(await client.get(path))) == {"queue", "engine", "framework"}


async def test_queue_and_engine_are_what_the_engine_requests_say(client: httpx.AsyncClient) -> None:
    before_s = time.monotonic()
    shown = durations(await client.get("/served"))
    took_s = time.monotonic() - before_s
    assert shown["queue"] == pytest.approx(300.0, abs=0.01)
    assert shown["engine"] == pytest.approx(500.0, abs=0.01)
    assert 700.0 - 0.05 <= shown["framework"] <= 700.0 + took_s * 1e3 + 0.05


def test_the_times_add_up_to_all_that_has_passed() -> None:
    now_s = time.monotonic()
    timings = [
        RequestTiming(received_s=now_s - 10, submitted_s=now_s - 9, assigned_s=now_s - 7, last_token_s=now_s - 1),
        RequestTiming(received_s=now_s - 10, submitted_s=now_s - 8, assigned_s=now_s - 6, last_token_s=now_s - 2),
        RequestTiming(received_s=now_s - 10, submitted_s=now_s - 8),
    ]
    split = split_time(HttpContext(now_s - 10, "standard", timings=timings))
    assert split["queue"] == pytest.approx(2.0)
    assert split["engine"] == pytest.approx(6.0)
    assert 10.0 <= sum(split.values()) <= 10.0 + (time.monotonic() - now_s) + 1e-6
    assert min(split.values()) >= 0.0
    without_replica = split_time(HttpContext(now_s - 1, "standard", [RequestTiming(received_s=0.0, submitted_s=now_s)]))
    assert (without_replica["queue"], without_replica["engine"]) == (0.0, 0.0)
    assert without_replica["framework"] >= 1.0


# Streams, message by message


SCOPE: Scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}


async def nothing_more() -> Message:
    await asyncio.sleep(3600)
    raise AssertionError


async def test_a_stream_starts_with_its_first_chunk_and_not_later() -> None:
    go_on, sent = asyncio.Event(), asyncio.Queue[Message]()

    async def two_chunks(scope: Scope, receive: Receive, send: Send) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"first"
            await go_on.wait()
            yield b"second"

        await StreamingResponse(body())(scope, receive, send)

    serving = asyncio.create_task(wrapped(two_chunks)(dict(SCOPE), nothing_more, sent.put))
    async with asyncio.timeout(30):
        start, first = await sent.get(), await sent.get()
    assert (start["type"], start["status"], first["body"]) == ("http.response.start", 200, b"first")
    assert [name for name, _ in start["headers"]].count(b"server-timing") == 1
    go_on.set()
    await serving
    assert [sent.get_nowait()["body"] for _ in range(sent.qsize())] == [b"second", b""]


def events(pieces: list[bytes], *, then: str) -> ASGIApp:
    """Pieces that vLLM sends before it asks the engine, and what that says `then`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def body() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            if then == "refused":
                context().refused = AdmissionError("no room", 6.2)
            if then == "queued":
                context().queued = True
                yield b"first token"
                yield b"second token"
            elif then != "ended":
                raise RuntimeError("the response has started already")

        await StreamingResponse(body(), media_type="text/event-stream")(scope, receive, send)

    return app


async def sent_by(app: ASGIApp) -> list[Message]:
    """What its client gets, whether it ends with an error or not."""
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    await asyncio.gather(wrapped(app)(dict(SCOPE), nothing_more, send), return_exceptions=True)
    return sent


async def test_a_stream_that_is_refused_after_its_first_events_is_answered_as_that() -> None:
    start, body = await sent_by(events([b"created", b"in progress"], then="refused"))
    assert start["status"] == 429
    assert dict(start["headers"])[b"retry-after"] == b"7"
    assert json.loads(body["body"])["error"]["message"] == "no room"


@pytest.mark.parametrize("error", [StateStoreError("Redis: gone"), ReplicaLostError("no engine")])
async def test_what_is_away_is_told_with_when_to_come_back_wherever_it_is_met(error: Exception) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    start, body = await sent_by(app)
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (503, b"5")
    assert json.loads(body["body"])["error"]["message"] == str(error)


@pytest.mark.parametrize(("again_s", "said"), [(120.0, "spent"), (120.5, "spent; try again in 121 s")])
async def test_a_refusal_for_longer_than_clients_wait_says_for_how_long(again_s: float, said: str) -> None:
    async def spent(scope: Scope, receive: Receive, send: Send) -> None:
        raise AdmissionError("spent", again_s)

    start, body = await sent_by(spent)
    assert (start["status"], json.loads(body["body"])["error"]["message"].partition(", for")[0]) == (429, said)


@pytest.mark.parametrize(
    ("then", "rest"), [("queued", [b"first token", b"second token", b""]), ("ended", [b""]), ("broken", [])]
)
async def test_what_was_held_of_a_stream_comes_once_it_is_known_how_it_goes_on(then: str, rest: list[bytes]) -> None:
    start, *pieces = await sent_by(events([b"created", b"in progress"], then=then))
    assert start["status"] == 200
    assert [piece["body"] for piece in pieces] == [b"created", b"in progress", *rest]


async def test_no_more_than_a_few_events_are_held() -> None:
    start, *pieces = await sent_by(events([b"event"] * 9, then="refused"))
    assert (start["status"], len(pieces)) == (200, 9)


async def test_the_start_and_the_end_of_the_server_pass_untouched_and_websockets_do_not() -> None:
    seen: list[Scope] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "lifespan"}
    await wrapped(app)(scope, nothing_more, send)
    assert (seen, sent) == ([scope], [])
    await wrapped(app)({"type": "websocket", "path": "/v1/realtime", "headers": []}, nothing_more, send)
    assert seen == [scope]
    assert [message["type"] for message in sent] == ["websocket.close"]


# The log


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="deployments.http.exchange"):
        yield caplog


def logged(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in log.records if record.name == "deployments.http.exchange"]


async def test_a_request_leaves_one_line_with_its_id(client: httpx.AsyncClient, log: pytest.LogCaptureFixture) -> None:
    await client.get("/served", headers={"X-Request-Id": "mine"})
    (line,) = logged(log)
    told = {"request_id": "mine", "method": "GET", "path": "/served", "status": 200, "slo_class": "standard"}
    assert line | told | {"output_tokens": 7, "outcomes": ["stop"]} == line
    assert (line["queue_s"], line["engine_s"]) == (pytest.approx(0.3), pytest.approx(0.5))


ENDED = {
    "prompt_tokens": 5, "predicted_tokens": 9.5, "wait_s": 0.2, "ttft_s": 0.3, "replica": "r1", "moves": 1, "resumed": 1
}  # fmt: skip


async def test_it_has_what_the_router_tells_of_its_answers(log: pytest.LogCaptureFixture) -> None:
    """Two answers and a refused one: the sums of their numbers, and the times of the first."""

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        context().model = "m"
        told = [ENDED, {**ENDED, "predicted_tokens": None, "wait_s": 0.1, "replica": "r2"}, None]
        context().timings += [RequestTiming(received_s=0.0, submitted_s=0.0, ended=each) for each in told]
        await JSONResponse({})(scope, receive, send)

    async with client_of(answers) as asked:
        await asked.get("/")
    (line,) = logged(log)
    totals = {"prompt_tokens": 10, "predicted_tokens": 9.5, "moves": 2, "resumed": 2}
    expected = {**totals, "model": "m", "wait_s": 0.1, "ttft_s": 0.3, "replicas": ["r1", "r2"]}
    assert {name: line[name] for name in expected} == expected
    assert line["duration_s"] == pytest.approx(line["queue_s"] + line["engine_s"] + line["framework_s"], abs=1e-4)


async def test_the_line_of_an_error_says_what_the_client_was_told(
    client: httpx.AsyncClient, log: pytest.LogCaptureFixture
) -> None:
    await client.post("/", headers={"X-Sluice-Class": "nobody"})
    await client.get("/nowhere")
    await client.get("/served")
    assert [line["error"] for line in logged(log)] == [
        "X-Sluice-Class: no class 'nobody'; there are fast, offline, standard",
        "Not Found",
        None,
    ]


async def test_pages_that_machines_poll_leave_none(client: httpx.AsyncClient, log: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/metrics"):
        await client.get(path)
    assert not logged(log)


async def test_a_client_that_leaves_before_its_response_is_logged_as_such(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LEAVE_S", 0.05)

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(3600)

    serving = asyncio.create_task(wrapped(waits)(dict(SCOPE), nothing_more, nothing_more))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    (line,) = logged(log)
    assert line["status"] == 499


async def test_an_application_that_raises_before_its_response_is_logged_as_failed(
    log: pytest.LogCaptureFixture,
) -> None:
    """Ray Serve answers 500 for it."""

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    ended = list[int]()

    async def tells(scope: Scope, receive: Receive, send: Send) -> None:
        context().when_over.append(ended.append)
        await fails(scope, receive, send)

    assert await sent_by(tells) == []
    (line,) = logged(log)
    assert (line["status"], ended) == (500, [500])


async def test_a_client_that_reads_nothing_more_is_given_up_and_a_slow_one_is_not(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_UNREAD_S", 0.5)
    monkeypatch.setattr(exchange, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(exchange, "LEAVE_S", 0.05)
    taken, has_ended = list[Message](), asyncio.Event()

    async def talks(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"a word", "more_body": True})
        finally:
            has_ended.set()

    async def reads(message: Message) -> None:
        taken.append(message)
        await asyncio.sleep(0.1 if len(taken) < 10 else 3600)

    await asyncio.wait_for(wrapped(talks)(dict(SCOPE), nothing_more, reads), PATIENCE_S)  # type: ignore[arg-type]
    await asyncio.wait_for(has_ended.wait(), PATIENCE_S)
    (line,) = logged(log)
    assert (len(taken), line["status"], line["error"]) == (10, 200, "the client read nothing for 0.5 s")


# Sessions


def of_session(context: HttpContext) -> list[Any]:
    return [context.session, context.task_s]


async def session_behind(keys: KeyRing | None, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context = current.get()
        assert context is not None
        await JSONResponse(of_session(context))(scope, receive, send)

    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client_of(app, **({} if keys is None else {"keys": keys})) as client:
        return await client.post("/", json=body or {}, headers=named)


async def test_a_session_is_found_in_headers_or_body_and_goes_by_its_digest() -> None:
    named = await session_behind(None, x_sluice_session="s1")
    assert named.json() == (await session_behind(None, {"prompt_cache_key": "s1"})).json()
    assert named.json()[1] is None and "s1" not in named.text
    assert (await session_behind(None)).json() == [None, None]
    assert (await session_behind(None, {"n": 2}, x_sluice_session="s1")).json() == [None, None]
    assert (await session_behind(None, x_sluice_session="s" * 300)).status_code == 400


async def test_a_session_of_one_key_is_none_of_another_s(keys: KeyRing) -> None:
    mine, theirs = [
        (await session_behind(keys, x_sluice_session="s1", **bearer(key))).json() for key in ("key-all", "key-closer")
    ]
    assert mine[0] and theirs[0] and mine != theirs


async def test_a_task_s_deadline_needs_a_session_and_a_key_that_may_tighten(keys: KeyRing) -> None:
    task = {"x_slo_task_ms": "600000"}
    assert (await session_behind(None, {"prompt_cache_key": "s1"}, **task)).json()[1] == 600.0
    refused = await session_behind(None, **task)
    assert refused.status_code == 400 and "x-sluice-session" in refused.json()["error"]["message"]
    for wrong in ("0", "soon", "86400001"):
        refused = await session_behind(None, x_sluice_session="s1", x_slo_task_ms=wrong)
        assert refused.status_code == 400 and "x-slo-task-ms" in refused.json()["error"]["message"]
    assert (await session_behind(keys, x_sluice_session="s1", **task, **bearer("key-all"))).status_code == 403
    assert (await session_behind(keys, x_sluice_session="s1", **task, **bearer("key-closer"))).status_code == 200


async def test_the_answer_says_what_the_task_had_left() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        context = current.get()
        assert context is not None
        timing = context.timing(0.0)
        if timing.session is not None:
            timing.session.task = Task(600.0, 500.0)
        context.timings.append(timing)
        await PlainTextResponse("answer")(scope, receive, send)

    async with client_of(app) as client:
        told = await client.post("/", json={}, headers={"x-sluice-session": "s1"})
        assert told.headers["x-sluice-task-left-ms"] == "500000"
        assert "x-sluice-task-left-ms" not in (await client.post("/", json={})).headers
