"""Errors of whatever origin, as clients of each API get them."""

from collections.abc import AsyncIterator

import anthropic
import httpx
import httpx2
import pytest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp

from deployments.http.error_forms import MAX_ERROR_BYTES
from deployments.http.errors import error_response
from deployments.http.headers import HeaderCheck
from tests.deployments.bodies import asking

OPENAI, ANTHROPIC = "/llm/v1/files/none/nothing", "/llm/v1/messages"


async def answered(app: ASGIApp, path: str, method: str = "GET") -> httpx.Response:
    async with asking(HeaderCheck(app)) as client:
        return await client.request(method, path)


@pytest.mark.parametrize(
    ("made", "status", "message"),
    [
        (PlainTextResponse("Not Found", 404), 404, f"Not Found: GET {OPENAI}"),
        (JSONResponse({"detail": "Not Found"}, 404), 404, f"Not Found: GET {OPENAI}"),
        (JSONResponse({"detail": [{"loc": ["query"]}]}, 422), 422, '[{"loc": ["query"]}]'),
        (PlainTextResponse("Request dropped due to backpressure", 503), 503, "Request dropped due to backpressure"),
        (JSONResponse({"error": "Unauthorized by another"}, 401), 401, "Unauthorized by another"),
        (HTMLResponse("<h1>no</h1>", 500), 500, f"Internal Server Error: GET {OPENAI}"),
        (Response(status_code=503), 503, f"Service Unavailable: GET {OPENAI}"),
    ],
)
async def test_what_is_text_or_another_form_is_told_in_openais(made: Response, status: int, message: str) -> None:
    made.headers["retry-after"] = "7"
    answer = await answered(made, OPENAI)
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "7")
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == error_response(status, message).body


async def test_a_time_that_is_over_is_told_by_what_sets_it() -> None:
    said = PlainTextResponse("Request abc timed out after Nones.", 408)  # as Ray Serve does
    assert "X-Request-Timeout-Seconds" in (await answered(said, OPENAI)).json()["error"]["message"]


async def test_an_error_in_openais_form_passes_as_it_is() -> None:
    made = error_response(400, "wrong", "its own type", "a field")
    assert (await answered(made, OPENAI)).content == made.body


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "timeout_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
async def test_at_anthropics_routes_every_error_has_anthropics_form(status: int, kind: str) -> None:
    own = JSONResponse({"type": "error", "error": {"type": "BadRequestError", "message": "wrong"}}, status)
    for made in (error_response(status, "wrong"), own, PlainTextResponse("wrong", status)):
        for path in (ANTHROPIC, f"{ANTHROPIC}/count_tokens"):
            answer = await answered(made, path)
            assert answer.status_code == status
            assert answer.json() == {"type": "error", "error": {"type": kind, "message": "wrong"}}


async def test_anthropics_client_raises_what_it_has_for_it() -> None:
    refused = error_response(429, "the rate is spent")
    transport = httpx2.ASGITransport(HeaderCheck(refused))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = anthropic.AsyncAnthropic(auth_token="a", base_url="http://sluice/llm", http_client=http, max_retries=0)
        with pytest.raises(anthropic.RateLimitError, match="the rate is spent"):
            await client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "a"}])


async def pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(2):
        yield b"a" * (size // 2)


@pytest.mark.parametrize("size", [MAX_ERROR_BYTES, MAX_ERROR_BYTES + 2])
async def test_an_error_that_comes_in_pieces_is_put_together_as_far_as_one_may_be_long(size: int) -> None:
    answer = await answered(StreamingResponse(pieces(size), 500, media_type="text/plain"), OPENAI)
    assert (len(answer.content) == size) == (size > MAX_ERROR_BYTES)
    assert answer.status_code == 500


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("HEAD", 404), ("GET", 499)])
async def test_what_is_no_error_for_a_client_and_what_has_no_body_passes(method: str, status: int) -> None:
    answer = await answered(StreamingResponse(pieces(8), status, media_type="text/event-stream"), OPENAI, method)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
