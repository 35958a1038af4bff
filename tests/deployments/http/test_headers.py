"""In front of Ray Serve's own layers, as a router's HTTP server puts them together."""

from collections.abc import AsyncIterator

import httpx
import pytest
from ray.serve._private.http_util import (
    _apply_middlewares,
    configure_http_middlewares,
    parse_disconnect_disabled_header,
    parse_session_id_header,
)
from ray.serve.config import HTTPOptions
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from deployments.app import router_env
from deployments.http.headers import CALLBACK_ENV, MAX_HEADER_BYTES, TIMEOUT_HEADER
from deployments.process.environment import serve_env
from tests.deployments.bodies import asking


async def served(scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    parse_session_id_header(headers)
    assert not parse_disconnect_disabled_header(headers)
    await PlainTextResponse("served")(scope, receive, send)


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(
        "ray.serve._private.http_util.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", router_env()[CALLBACK_ENV]
    )
    app = _apply_middlewares(served, configure_http_middlewares(HTTPOptions(middlewares=[])).middlewares)
    async with asking(app) as made:
        yield made


@pytest.mark.parametrize(
    "name",
    (
        *("X-Request-Id", "X-Request-Timeout-Seconds", "X-Request-Disconnect-Disabled", "X-Session-Id"),
        *("x_session-id", "Serve-Multiplexed-Model-Id", "serve_multiplexed_model_id", "Traceparent", "Tracestate"),
    ),
)
async def test_a_header_that_ray_cannot_read_gets_400_by_its_name(client: httpx.AsyncClient, name: str) -> None:
    refused = await client.get("/", headers={name: b"caf\xe9"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"{name.lower()} is not UTF-8"
    if name != TIMEOUT_HEADER:
        assert (await client.get("/", headers={name: "café".encode()})).text == "served"
    # What Ray does not read may hold any bytes.
    assert (await client.get("/", headers={"Cookie": b"caf\xe9"})).text == "served"


@pytest.mark.parametrize("wrong", ["nan", "-1", "0", "0.0", "soon", "", "inf", "1e400", "1_0", "86401", "1, 2"])
async def test_a_time_that_is_none_is_refused_where_ray_takes_it_for_no_limit(
    client: httpx.AsyncClient, wrong: str
) -> None:
    refused = await client.get("/", headers={TIMEOUT_HEADER: wrong})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{TIMEOUT_HEADER} must be seconds, above 0")
    for right in ("0.5", "30", "86400"):
        assert (await client.get("/", headers={TIMEOUT_HEADER: right})).text == "served"


async def test_no_client_can_have_ray_not_look_whether_it_has_left(client: httpx.AsyncClient) -> None:
    assert (await client.get("/", headers={"X-Request-Disconnect-Disabled": "?1"})).text == "served"


async def test_headers_beyond_the_limit_get_400_with_their_size(client: httpx.AsyncClient) -> None:
    refused = await client.get("/", headers={"Cookie": "x" * MAX_HEADER_BYTES})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "BadRequest")
    assert str(MAX_HEADER_BYTES) in refused.json()["error"]["message"]
    assert (await client.get("/", headers={"Cookie": "x" * (MAX_HEADER_BYTES - 1000)})).text == "served"


def test_haproxy_passes_on_what_routers_refuse_in_words() -> None:
    assert int(serve_env()["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]) >= 2 * MAX_HEADER_BYTES
