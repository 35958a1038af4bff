"""The engine of kind openai as the relay sees it, before a server that speaks the API and misbehaves as servers do."""

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from deployments.config.engine import OpenAiSection
from deployments.engines.base import Engine
from deployments.engines.openai import engine as under_test
from deployments.engines.openai.engine import OpenAiEngine
from deployments.engines.openai.events import Events
from deployments.engines.openai.messages import ServerOutput, ServerRequest, piece_id
from policies.errors import EngineStartError, ReplicaLostError
from tests.waiting import until

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "a-key-of-the-server"


class Server:
    """On loopback; what it answers is set by a test, and what it was sent is kept."""

    def __init__(self) -> None:
        self.answer: Answering = self.streamed
        self.got: list[dict[str, Any]] = []
        self.left = 0
        self.says_done = True
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/{route:.*}", self._post)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"data": [{"id": "theirs", "max_model_len": 4096}, {"id": "another"}]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.got.append(await request.json())
        try:
            return await self.answer(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise

    async def streamed(self, request: web.Request, texts: str = "abc", pause_s: float = 0.0) -> web.StreamResponse:
        response = await self.begun(request)
        for text in texts:
            await self.say(response, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            await asyncio.sleep(pause_s)
        await self.say(response, {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        if self.says_done:
            await response.write(b"data: [DONE]\n\n")
        return response

    async def begun(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        return response

    async def say(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps({"id": "theirs"} | event).encode() + b"\n\n")


class Running:
    """An engine, and what came out of it by request, as decoded on a router's side."""

    def __init__(self, engine: OpenAiEngine) -> None:
        self.engine: Engine = engine  # the protocol holds
        self.made = engine
        self.outputs: defaultdict[str, list[ServerOutput]] = defaultdict(list)
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        codec = self.made.codec
        while True:
            batch = await self.engine.next_outputs()
            for output in codec.decode_outputs(codec.encode_outputs(batch, codec.outputs(batch))):
                self.outputs[output.request_id].append(output)

    async def end_of(self, name: str) -> ServerOutput:
        await until(lambda: bool(self.outputs[name]) and self.outputs[name][-1].finish_reason is not None)
        return self.outputs[name][-1]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def running(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr(under_test, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(under_test, "BUSY_PAUSE_S", 0.01)
    made = Running(await connected(server))
    yield made
    await asyncio.to_thread(made.made.shutdown)
    made.reader.cancel()


async def connected(server: Server, model: str = "theirs", key: str | None = KEY) -> OpenAiEngine:
    return await OpenAiEngine.connected(OpenAiSection(urls=(server.url,)), model, key, lambda _: None)


def asked(name: str, *, streams: bool = True, **body: Any) -> ServerRequest:
    return ServerRequest(
        request_id=name,
        path="/v1/completions",
        body=json.dumps({"model": "theirs", **body}).encode(),
        answer_id=f"cmpl-{name}",
        created=0,
        model="ours",
        streams=streams,
    )


async def test_a_stream_comes_token_by_token_and_says_what_the_server_got(running: Running, server: Server) -> None:
    await running.engine.add(asked("one", prompt="x"))
    assert (await running.end_of("one")).finish_reason == "stop"
    assert [len(each.new_token_ids) for each in running.outputs["one"]] == [1, 1, 1, 0]
    assert server.got == [{"model": "theirs", "prompt": "x"}]
    assert running.made.max_model_len == 4096
    status = await running.engine.status()
    assert (status["running"], status["server"], set(status["off"]["phases"])) == (0, server.url, {"openai"})


async def test_a_stream_that_says_why_it_ends_is_whole_without_a_last_word(running: Running, server: Server) -> None:
    server.says_done = False
    await running.engine.add(asked("one", prompt="x"))
    end = await running.end_of("one")
    assert (end.finish_reason, len(server.got)) == ("stop", 1)
    assert b"".join(end.parts).endswith(b"data: [DONE]\n\n")


async def test_a_whole_answer_comes_at_once(running: Running, server: Server) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(
            {"choices": [{"text": "x", "finish_reason": "length"}], "usage": {"completion_tokens": 9}}
        )

    server.answer = answer
    await running.engine.add(asked("one", streams=False))
    end = await running.end_of("one")
    assert (len(end.new_token_ids), end.finish_reason, end.status) == (9, "length", 200)


@pytest.mark.parametrize(
    ("status", "ends"), [(400, "cancelled"), (413, "cancelled"), (422, "cancelled"), (401, "error"), (500, "error")]
)
async def test_what_the_server_refuses_its_client_is_told(
    running: Running, server: Server, status: int, ends: str
) -> None:
    """What its client did wrong is no error of this service: alerts and verdicts on candidates count those."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=status)

    server.answer = answer
    await running.engine.add(asked("one"))
    end = await running.end_of("one")
    assert (end.finish_reason, end.status, json.loads(end.parts[0])) == (
        ends,
        status,
        {"error": {"message": "too long"}},
    )
    assert len(server.got) == 1


async def test_a_refusal_of_what_another_server_took_is_an_error(running: Running, server: Server) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=400)

    server.answer = answer
    begun = asked("one")
    begun.said = [piece_id(0, "a")]
    await running.engine.add(begun)
    assert (await running.end_of("one")).finish_reason == "error"


@pytest.mark.parametrize("times", [3, 99])
async def test_a_busy_server_is_asked_again_and_has_the_last_word(running: Running, server: Server, times: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if len(server.got) <= times:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        return await server.streamed(request)

    server.answer = answer
    await running.engine.add(asked("one"))
    end = await running.end_of("one")
    assert (end.finish_reason, end.status) == (("stop", 200) if times == 3 else ("error", 503))
    assert len(server.got) == (4 if times == 3 else 1 + under_test.BUSY_PAUSES)


async def test_one_that_hangs_up_before_its_answer_is_asked_again(running: Running, server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if len(server.got) == 1:
            assert request.transport is not None
            request.transport.close()
            await asyncio.sleep(10)
        return await server.streamed(request)

    server.answer = answer
    await running.engine.add(asked("one"))
    assert (await running.end_of("one")).finish_reason == "stop"


async def test_one_that_hangs_up_within_its_answer_is_not(running: Running, server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await server.begun(request)
        await server.say(response, {"choices": [{"text": "a"}]})
        assert request.transport is not None
        request.transport.close()
        await asyncio.sleep(10)
        return response

    server.answer = answer
    await running.engine.add(asked("one"))
    end = await running.end_of("one")
    assert (end.finish_reason, len(running.outputs["one"]), len(server.got)) == ("error", 2, 1)
    assert not running.engine.dead


ODD: list[dict[str, Any]] = [
    {"choices": 5},
    {"choices": {"index": 0}},
    {"choices": [{"delta": {"tool_calls": 7}, "finish_reason": []}], "usage": {"completion_tokens": [9]}},
    {"choices": [{"delta": 5, "index": {}}]},
]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("odd", ODD)
async def test_an_answer_of_an_odd_shape_ends_all_the_same(
    running: Running, server: Server, odd: dict[str, Any], streams: bool
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if not streams:
            return web.json_response(odd)
        response = await server.begun(request)
        await server.say(response, odd)
        await response.write(b"data: [DONE]\n\n")
        return response

    server.answer = answer
    await running.engine.add(asked("one", streams=streams))
    await running.end_of("one")
    assert (await running.engine.status())["background_failures"] == {}


async def test_an_answer_that_nobody_thought_of_is_an_error_of_its_client_and_counted(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Events:
        raise ZeroDivisionError("a surprise")

    monkeypatch.setattr(under_test, "Events", failing)
    await running.engine.add(asked("one"))
    end = await running.end_of("one")
    assert (end.finish_reason, end.status, b"a surprise" in end.parts[0]) == ("error", 502, True)
    await until(lambda: running.made._failures == {"answer": 1})


async def test_what_speaks_no_http_is_told_to_the_client(running: Running, server: Server) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"SMTP 220 here\r\n\r\n")
        request.transport.close()
        return web.Response()

    server.answer = answer
    await running.engine.add(asked("one"))
    end = await running.end_of("one")
    assert (end.finish_reason, end.status) == ("error", 502)


async def test_a_server_in_whose_place_something_else_listens_is_away(running: Running, server: Server) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SMTP 220 here\r\n\r\n")
        writer.close()

    await server.stop()
    async with await asyncio.start_server(other, "127.0.0.1", server.port, reuse_address=True):
        with pytest.raises(ReplicaLostError, match="is away"):
            async with asyncio.timeout(5.0):
                await running.reader


async def test_an_error_that_comes_in_pieces_is_told_whole(running: Running, server: Server) -> None:
    said = json.dumps({"error": {"message": "too long" * 100}}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=400, headers={"Content-Type": "application/json"})
        await response.prepare(request)
        for start in range(0, len(said), 400):
            await response.write(said[start : start + 400])
            await asyncio.sleep(0.02)
        return response

    server.answer = answer
    await running.engine.add(asked("one"))
    assert (await running.end_of("one")).parts == [said]


async def test_a_server_whose_host_has_vanished_is_noticed_on_each_connection(running: Running, server: Server) -> None:
    """Where a gateway has put another server in its place, looks find nothing amiss, and nothing is sent any more on
    the connection of a request that waits for its answer."""
    server.answer = lambda request: server.streamed(request, "a" * 1000, 0.05)
    await running.engine.add(asked("one"))
    await until(lambda: bool(running.outputs["one"]))
    (reading,) = [each for each in running.made._session.connector._acquired if each.transport]  # type: ignore
    sock = reading.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    silence_s = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1e3
    assert silence_s == under_test.SILENCE_S


async def test_what_is_cancelled_the_server_hears_of(running: Running, server: Server) -> None:
    server.answer = lambda request: server.streamed(request, "a" * 1000, 0.05)
    await running.engine.add(asked("one"))
    await until(lambda: len(running.outputs["one"]) > 1)
    await running.engine.abort(["one", "unknown"])
    await until(lambda: server.left == 1)
    assert (await running.engine.status())["running"] == 0


async def test_a_server_that_is_gone_is_a_lost_replica_and_one_that_is_back_a_new_one(
    running: Running, server: Server
) -> None:
    await server.stop()
    with pytest.raises(ReplicaLostError, match="is away"):
        await running.reader
    assert running.engine.dead
    starting = asyncio.create_task(connected(server))
    await asyncio.sleep(0.2)
    assert not starting.done()
    await server.start()
    await (await starting)._close()


async def test_a_server_that_stands_still_says_for_how_long(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "LOOK_S", 0.0)  # in which nothing answers
    await asyncio.sleep(0.3)
    assert not running.engine.dead
    assert (await running.engine.status())["pass_s"] > 0.1


@pytest.mark.parametrize(
    ("model", "key", "why"),
    [("theirs", "a-wrong-key", "key_file"), ("theirs", None, "key_file"), ("ours", KEY, "another, theirs")],
)
async def test_what_is_set_wrongly_is_said_at_the_start(server: Server, model: str, key: str | None, why: str) -> None:
    with pytest.raises(EngineStartError, match=why):
        await connected(server, model, key)
