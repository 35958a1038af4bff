"""Several models behind one address, with small applications in the place of vLLM's."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from deployments.http import model_switch as module
from deployments.http.bodies import IN_A_THREAD_BYTES
from deployments.http.middleware import SluiceMiddleware
from deployments.http.model_switch import ModelSwitch, _name
from tests.deployments.bodies import asking, behind_middleware, request_bodies

LIMIT = 100_000


def model_app(name: str, *, healthy: bool = True, lists: str = "well") -> FastAPI:
    app = FastAPI()
    app.add_middleware(CORSMiddleware, allow_origins=["*"])

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        if body.get("model", name) not in (name, f"adapter-of-{name}"):
            return JSONResponse({"error": f"no {body['model']}"}, 404)
        return JSONResponse({"by": name, "prompt_chars": len(body["prompt"])})

    @app.get("/v1/models")
    async def models() -> Response:
        if lists == "raises":
            raise RuntimeError(name)
        if lists == "error":
            return JSONResponse({"error": {"message": f"{name} is out of order"}}, 503)
        return JSONResponse({"object": "list", "data": [{"id": name}]})

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if healthy else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"by": name}

    return app


def three_models(**lists: str) -> SluiceMiddleware:
    apps = {name: model_app(name, healthy=name != "c", lists=lists.get(name, "well")) for name in "abc"}
    switch = ModelSwitch({**apps, "adapter-of-b": apps["b"]})
    return behind_middleware(switch, bodies=request_bodies(LIMIT, context_tokens=8192))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with asking(three_models()) as made:
        yield made


@pytest.mark.parametrize(("name", "by"), [("a", "a"), ("b", "b"), ("adapter-of-b", "b")])
async def test_a_request_goes_to_the_model_that_it_or_its_adapter_names(
    client: httpx.AsyncClient, name: str, by: str
) -> None:
    long = "x" * 50_000
    response = await client.post("/v1/completions", json={"prompt": long, "model": name, "more": {"model": "c"}})
    assert response.json() == {"by": by, "prompt_chars": 50_000}


async def test_a_body_in_pieces_arrives_whole(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": "b", "prompt": "x" * 2000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    assert (await client.post("/v1/completions", content=pieces())).json() == {"by": "b", "prompt_chars": 2000}


async def test_without_a_name_the_first_model_answers(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", json={"prompt": ""})).json()["by"] == "a"
    assert (await client.get("/version")).json() == {"by": "a"}


@pytest.mark.parametrize(
    "body", [b'{"model": "\xff"}', b'{"model": 1}', b"[NaN]", b"not JSON", b'{"x": ' + b"[" * 100_000]
)
def test_a_body_that_names_nobody_is_the_first_models_to_refuse(body: bytes) -> None:
    assert _name(body) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "b", "top_p": NaN}',
        b'{"model": "b", "top_p": -Infinity}',
        b'{"model": "b", "prompt": "\\ud800"}',
        b'\xef\xbb\xbf{"model": "b"}',
        '{"model": "b"}'.encode("utf-16"),
    ],
)
def test_a_body_names_the_model_that_vllm_reads_in_it(body: bytes) -> None:
    assert (_name(body), json.loads(body)["model"]) == ("b", "b")


async def test_an_unknown_name_gets_404(client: httpx.AsyncClient) -> None:
    assert (await client.post("/v1/completions", json={"prompt": "", "model": "z"})).status_code == 404


async def models_where(**lists: str) -> httpx.Response:
    async with asking(three_models(**lists)) as client:
        return await client.get("/v1/models", headers={"Origin": "https://page.example"})


@pytest.mark.parametrize("how", ["error", "raises"])
@pytest.mark.parametrize("broken", ["a", "b"])
async def test_a_model_out_of_order_is_missing_in_the_list_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture, broken: str, how: str
) -> None:
    response = await models_where(**{broken: how})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert [model["id"] for model in response.json()["data"]] == [name for name in "abc" if name != broken]
    assert f"{broken} is missing in /v1/models" in caplog.text


async def test_without_any_model_the_list_is_the_first_one_s_error() -> None:
    response = await models_where(a="error", b="raises", c="error")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "a is out of order")


async def test_a_page_of_another_site_may_read_the_list(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models", headers={"Origin": "https://page.example"})
    assert response.headers["access-control-allow-origin"] == "*"
    for name in ("content-length", "content-type"):
        assert len(response.headers.get_list(name)) == 1
    assert len(response.json()["data"]) == 3


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
async def test_what_does_not_get_a_page_that_is_merged_is_the_first_model_s_to_answer(
    client: httpx.AsyncClient, path: str
) -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "GET"}
    preflight = await client.options(path, headers=asked)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, "*")
    for method in ("OPTIONS", "HEAD", "POST"):
        assert (await client.request(method, path)).status_code == 405


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_health_is_good_when_every_model_s_is_and_all_models_are_listed(prefix: str) -> None:
    async with asking(three_models(), prefix=prefix) as client:
        listed = (await client.get(f"{prefix}/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["a", "b", "c"]
        assert (await client.get(f"{prefix}/health")).status_code == 503


async def test_an_application_that_listens_for_a_disconnect_hears_nothing_while_pages_are_merged() -> None:
    heard: list[str] = []

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        async def listen() -> None:
            while True:
                heard.append((await receive())["type"])
                await asyncio.sleep(0)

        listener = asyncio.create_task(listen())
        await asyncio.sleep(0.01)
        listener.cancel()
        await Response()(scope, receive, send)

    async with asking(ModelSwitch({"a": listening})) as client:
        assert (await client.get("/health")).status_code == 200
    assert heard == ["http.request"]


async def test_a_large_body_is_read_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that JSON does not know is enough to have it read at Python's pace."""
    readers = list[int]()

    def name(body: bytes) -> str | None:
        readers.append(threading.get_ident())
        return _name(body)

    monkeypatch.setattr(module, "_name", name)
    large = b'{"model": "b", "x": NaN, "prompt": "%s"}' % (b"a" * IN_A_THREAD_BYTES)
    for body in (b'{"model": "b", "prompt": ""}', large):
        assert (await client.post("/v1/completions", content=body)).json()["by"] == "b"
    assert [each == threading.get_ident() for each in readers] == [True, False]
