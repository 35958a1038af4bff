"""The load generator against a real HTTP server in the same process."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web

from bench.chat_client import Answer
from bench.load import LoadReport, error_lines, measure, summarise
from bench.workload import LoadConfig

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chunk(*, content: str | None = None, role: str | None = None, usage: int | None = None) -> bytes:
    delta = {key: value for key, value in (("role", role), ("content", content)) if value is not None}
    choices = [{"index": 0, "delta": delta}] if delta else []
    answer: dict[str, Any] = {"id": "x", "object": "chat.completion.chunk", "choices": choices}
    if usage is not None:
        answer["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
OPENING = chunk(role="assistant", content="")


def whole_stream(tokens: int) -> bytes:
    words = b"".join(chunk(content="" if number == 1 else f"wörd{number} ") for number in range(tokens))
    return OPENING + words + chunk(usage=tokens) + DONE


def answering(stream: bytes, piece_bytes: int) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await write_in_pieces(request, stream, piece_bytes)

    return handler


async def write_in_pieces(request: web.Request, stream: bytes, piece_bytes: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for start in range(0, len(stream), piece_bytes):
        await response.write(stream[start : start + piece_bytes])
        await asyncio.sleep(0)
    return response


@asynccontextmanager
async def serving(handler: Handler, path: str = "/v1/chat/completions") -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def load(handler: Handler, *, requests: int = 6, concurrency: int = 2, timeout_s: float = 20.0) -> LoadReport:
    async def run() -> LoadReport:
        async with serving(handler) as url:
            return await measure(
                LoadConfig(url=url, model="m", requests=requests, concurrency=concurrency, timeout_s=timeout_s)
            )

    return uvloop.run(run())


@pytest.mark.parametrize("piece_bytes", [1, 7, 61, 100_000])
def test_a_stream_is_read_wherever_its_bytes_are_cut(piece_bytes: int) -> None:
    report = load(answering(whole_stream(5), piece_bytes), requests=4)
    assert (report.answered, report.errors, report.output_tokens) == (4, {}, 20)


def test_output_tokens_are_those_of_the_usage_and_not_the_chunks() -> None:
    stream = OPENING + chunk(content="two tokens") + chunk(content="three more tokens") + chunk(usage=5) + DONE
    assert load(answering(stream, 50), requests=3).output_tokens == 15


def test_the_loop_is_closed_and_connections_are_kept() -> None:
    in_flight, most, connections = 0, 0, set()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, most
        connections.add(request.transport)
        in_flight += 1
        most = max(most, in_flight)
        response = await write_in_pieces(request, whole_stream(3), 40)
        in_flight -= 1
        return response

    report = load(handler, requests=30, concurrency=3)
    assert report.answered == 30
    assert most == 3
    assert len(connections) == 3


def test_a_closed_connection_is_opened_again_for_the_next_request() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        connections.add(request.transport)
        return web.Response(body=whole_stream(2), headers={"Connection": "close"})

    connections: set[object] = set()
    report = load(handler, requests=5, concurrency=1)
    assert (report.answered, report.errors, len(connections)) == (5, {}, 5)


def test_an_error_status_is_counted_with_its_text_and_the_run_goes_on() -> None:
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen % 2:
            return web.json_response({"error": {"message": "queue is full"}}, status=429)
        return await write_in_pieces(request, whole_stream(4), 30)

    report = load(handler, requests=6, concurrency=1)
    assert report.answered == 3
    assert report.failed == 3
    assert [reason for reason in report.errors if "HTTP 429" in reason and "queue is full" in reason]


def test_a_stream_cut_in_the_middle_is_an_error_and_enters_no_figure() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(OPENING + chunk(content="a") + chunk(content="b"))
        assert request.transport is not None
        request.transport.close()
        return response

    report = load(handler, requests=3)
    assert report.errors == {"connection closed after 2 chunks with tokens": 3}
    assert (report.answered, report.output_tokens, report.ttft_p50_s, report.itl_p99_s) == (0, 0, None, None)


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (OPENING + chunk(content="a") + chunk(usage=1), "the stream ended without [DONE]"),
        (OPENING + chunk(content="a") + DONE, "the stream held no usage"),
        (OPENING + chunk(usage=0) + DONE, "the stream held no token"),
        (OPENING + b'data: {"error": {"message": "engine died"}}\n\n' + DONE, "engine died"),
        (b"data: {broken\n\n" + DONE, "unreadable chunk"),
    ],
)
def test_a_stream_that_lacks_something_is_an_error(stream: bytes, reason: str) -> None:
    report = load(answering(stream, 25), requests=2)
    assert (report.answered, report.failed) == (0, 2)
    assert all(reason in error for error in report.errors)


def test_an_answer_that_does_not_come_in_time_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    assert load(handler, requests=2, timeout_s=0.1).errors == {"no whole answer within 0.1 s": 2}


def test_a_server_that_is_not_there_is_an_error_for_each_request() -> None:
    async def run() -> LoadReport:
        async with serving(answering(whole_stream(1), 9)) as url:
            pass
        return await measure(LoadConfig(url=url, model="m", requests=3, concurrency=2))

    report = uvloop.run(run())
    assert report.failed == 3
    assert all(reason.startswith("cannot connect to 127.0.0.1:") for reason in report.errors)


def test_rates_are_over_the_run_and_latencies_over_all_answers() -> None:
    fast = Answer(ttft_s=1.0, itl_s=(0.1, 0.3), output_tokens=3)
    slow = Answer(ttft_s=3.0, itl_s=(0.5,), output_tokens=2)
    report = summarise(2, [fast, slow], {"HTTP 503: busy": 1}, duration_s=4.0, client_cpu_s=0.1)
    assert (report.requests_per_s, report.output_tokens_per_s) == (0.5, 1.25)
    assert (report.ttft_p50_s, report.itl_p50_s) == (2.0, 0.3)
    assert (report.answered, report.failed) == (2, 1)


def test_the_99th_percentile_of_few_requests_is_left_out() -> None:
    answer = Answer(ttft_s=1.0, itl_s=(0.1, 0.3), output_tokens=3)
    few, many = (summarise(2, count * [answer], {}, duration_s=4.0, client_cpu_s=0.1) for count in (99, 100))
    assert (few.ttft_p99_s, many.ttft_p99_s) == (None, 1.0)
    assert few.itl_p99_s == pytest.approx(0.3)


def test_tokens_that_were_put_into_one_chunk_show() -> None:
    merged = Answer(ttft_s=1.0, itl_s=(0.1,), output_tokens=8)
    report = summarise(1, [merged], {}, duration_s=4.0, client_cpu_s=0.1)
    assert report.chunks_per_token == 0.25


def test_rare_errors_are_summed_when_there_are_many_kinds() -> None:
    errors = {f"kind {number}": number for number in range(1, 9)}
    assert error_lines(errors)[0] == "error ×8: kind 8"
    assert error_lines(errors)[-1] == "error ×6: of 3 further kinds"
