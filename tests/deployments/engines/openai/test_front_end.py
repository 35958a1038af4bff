"""A router's application before servers of others, with a routed client that plays the servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.engines.openai import front_end as under_test
from deployments.engines.openai.front_end import ServersFrontEnd
from deployments.engines.openai.messages import Outputs, ServerOutput, ServerRequest
from policies.errors import AdmissionError, StateStoreError
from predictor.learned import Question
from router.background import BackgroundTasks
from router.timing import HttpContext
from tests.waiting import until

SSE = "text/event-stream"
CHAT = {"model": "ours", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}


class Servers:
    """`submit` keeps what comes; `say` brings outputs of the last request, or raises what is set to be refused."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self.asked: list[ServerRequest] = []
        self.questions: list[Question | None] = []
        self.cancelled: list[str] = []
        self.refusal: Exception | None = None
        self.snapshot = SimpleNamespace(replicas={"a server": object()})

    async def submit(self, request: ServerRequest, *, question: Question | None, **_: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(request)
        self.questions.append(question)

    async def next_outputs(self) -> Outputs:
        return await self.outputs.get()

    async def cancel(self, request_ids: list[str], outcome: str) -> None:
        self.cancelled += request_ids

    def say(self, *parts: bytes, **told: Any) -> None:
        output = ServerOutput(request_id=self.asked[-1].request_id, parts=list(parts), **told)
        self.outputs.put_nowait([output])


class Running:
    def __init__(self, servers: Servers, client: httpx.AsyncClient, reader: ServersFrontEnd) -> None:
        self.servers, self.client, self.reader = servers, client, reader

    async def asked(self, body: Any, path: str = "/v1/chat/completions") -> "asyncio.Task[httpx.Response]":
        """Once the servers have it."""
        before = len(self.servers.asked)
        posted = asyncio.create_task(self.client.post(path, json=body))
        await until(lambda: len(self.servers.asked) > before or posted.done())
        return posted

    @property
    def is_idle(self) -> bool:
        return not self.reader._answers


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    servers, background = Servers(), BackgroundTasks(lambda _: None)
    reader: Any = ServersFrontEnd(
        routed=servers,  # type: ignore[arg-type]
        model="ours",
        server_model="theirs",
        max_model_len=4096,
        isolates_keys=False,
    )
    transport = httpx.ASGITransport(reader.application(background))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        yield Running(servers, client, reader)
    await background.close()


async def test_a_whole_answer_comes_as_the_server_says_it(running: Running) -> None:
    posted = await running.asked(CHAT | {"max_tokens": 5})
    (asked,) = running.servers.asked
    assert (asked.path, asked.max_output_tokens, json.loads(asked.body)["model"]) == (
        "/v1/chat/completions",
        5,
        "theirs",
    )
    (question,) = running.servers.questions
    assert question is not None and (question.prompt, bool(question.system_prompt)) == ("Hello", True)
    running.servers.say(b'{"id": "x"}', finish_reason="stop")
    response = await posted
    assert (response.status_code, response.json()) == (200, {"id": "x"})
    assert running.is_idle and running.servers.cancelled == []


async def test_a_stream_comes_in_its_parts(running: Running) -> None:
    posted = await running.asked(CHAT | {"stream": True})
    running.servers.say(b"data: 1\n\n", content_type=SSE)
    running.servers.say(b"data: 2\n\n", content_type=SSE)
    running.servers.say(b"data: [DONE]\n\n", content_type=SSE, finish_reason="stop")
    response = await posted
    assert response.headers["content-type"].startswith(SSE)
    assert response.content == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert running.is_idle


@pytest.mark.parametrize("ends", ["error", "cancelled"])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_refusal_of_the_server_has_its_status_and_its_words(running: Running, ends: str, streams: bool) -> None:
    posted = await running.asked(CHAT | {"stream": streams})
    running.servers.say(b'{"error": {"message": "too long"}}', finish_reason=ends, status=400)
    response = await posted
    assert (response.status_code, response.json()) == (400, {"error": {"message": "too long"}})


@pytest.mark.parametrize(
    "end",
    [
        {"parts": (b"the server broke off",), "content_type": "text/plain", "status": 502},
        {"parts": (), "content_type": "application/json", "status": 503},
    ],
    ids=["told", "given up"],
)
async def test_a_stream_that_breaks_off_ends_with_an_error_and_nothing_else(
    running: Running, end: dict[str, Any]
) -> None:
    posted = await running.asked(CHAT | {"stream": True})
    running.servers.say(b"data: 1\n\n", content_type=SSE)
    await asyncio.sleep(0.01)
    running.servers.say(*end.pop("parts"), finish_reason="error", **end)
    first, error, done, rest = (await posted).content.split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500


async def test_an_error_that_the_server_tells_within_a_stream_is_the_only_one(running: Running) -> None:
    posted = await running.asked(CHAT | {"stream": True})
    running.servers.say(b"data: 1\n\n", content_type=SSE)
    running.servers.say(b'data: {"error": {}}\n\n', content_type=SSE, finish_reason="error")
    assert (await posted).content == b'data: 1\n\ndata: {"error": {}}\n\n'


async def test_what_no_server_answered_is_503(running: Running) -> None:
    posted = await running.asked(CHAT)
    running.servers.say(finish_reason="error", status=503)
    assert (await posted).status_code == 503


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(AdmissionError("no room", 1.0), 429), (StateStoreError("Redis is away"), 503)],
)
async def test_what_may_not_queue_is_told_why(running: Running, refusal: Exception, status: int) -> None:
    running.servers.refusal = refusal
    response = await (await running.asked(CHAT))
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(refusal))
    assert running.is_idle


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (CHAT | {"model": "another"}, 404, "'another' does not exist"),
        ([1], 400, "JSON object"),
        ({"model": "ours"}, 400, "messages must be"),
    ],
)
async def test_what_is_no_request_is_refused_before_it_costs_anything(
    running: Running, body: Any, status: int, why: str
) -> None:
    response = await (await running.asked(body))
    assert response.status_code == status and why in response.json()["error"]["message"]
    assert (await running.client.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert running.servers.asked == []


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": [1, 2]}, 400),
        ("/v1/chat/completions", CHAT | {"stream": "false"}, 400),
        ("/v1/chat/completions", CHAT | {"stream": [0]}, 400),
        ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": "no"}}, 400),
        ("/v1/completions", {"prompt": "Hello", "messages": [1]}, 200),
        ("/v1/completions", {"prompt": "Hello", "messages": ["x", None]}, 200),
        ("/v1/completions", {"prompt": [-1, 10**20]}, 200),
    ],
)
async def test_a_body_of_an_odd_shape_is_answered_as_the_api_says(
    running: Running, path: str, body: dict[str, Any], status: int
) -> None:
    posted = await running.asked(body, path)
    if not posted.done():
        running.servers.say(b"{}", finish_reason="stop")
    assert (await posted).status_code == status
    assert running.is_idle


async def test_a_completion_is_predicted_by_its_own_prompt(running: Running) -> None:
    posted = await running.asked({"prompt": "Hello", "messages": CHAT["messages"]}, "/v1/completions")
    (question,) = running.servers.questions
    assert question is not None and (question.prompt, question.system_prompt) == ("Hello", "")
    posted.cancel()


async def test_a_client_that_leaves_takes_its_request_along(running: Running) -> None:
    posted = await running.asked(CHAT)
    posted.cancel()
    await until(lambda: running.servers.cancelled == [running.servers.asked[0].request_id])
    assert running.is_idle


async def test_a_stream_that_nobody_begins_to_read_leaves_nothing(running: Running) -> None:
    """Its client left between the first output and the first event."""
    asked: Any = await running.reader._asked("/v1/chat/completions", CHAT | {"stream": True}, HttpContext(0.0, "a"), 9)
    exchanged = asyncio.create_task(running.reader._exchanged(*asked, context := HttpContext(0.0, "a")))
    await until(lambda: bool(running.servers.asked))
    running.servers.say(b"data: 1\n\n", content_type=SSE)
    await exchanged
    await context.end()
    assert running.servers.cancelled == [running.servers.asked[0].request_id]
    assert running.is_idle


async def test_what_a_slow_reader_leaves_is_bounded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MOST_UNREAD_BYTES", 100)
    posted = await running.asked(CHAT)  # in one piece: nobody reads before its end
    for _ in range(3):
        running.servers.say(b"x" * 50)
    await until(lambda: bool(running.servers.cancelled))
    posted.cancel()


async def test_a_stream_that_is_given_up_says_so(running: Running) -> None:
    """Its client reads what had come; without another word it would take that for all."""
    asked: Any = await running.reader._asked("/v1/chat/completions", CHAT | {"stream": True}, HttpContext(0.0, "a"), 9)
    exchanged = asyncio.create_task(running.reader._exchanged(*asked, HttpContext(0.0, "a")))
    await until(lambda: bool(running.servers.asked))
    running.servers.say(b"data: 1\n\n", content_type=SSE)
    response: Any = await exchanged
    await running.reader.abort([running.servers.asked[0].request_id])
    first, error, done, rest = b"".join([part async for part in response.body_iterator]).split(b"\n\n")
    assert (first, done, rest) == (b"data: 1", b"data: [DONE]", b"")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500


async def test_the_model_has_its_public_name(running: Running) -> None:
    (model,) = (await running.client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("ours", 4096)


async def test_a_router_is_healthy_while_a_server_is_there(running: Running) -> None:
    assert (await running.client.get("/health")).status_code == 200
    running.servers.snapshot.replicas.clear()
    assert (await running.client.get("/health")).status_code == 503


@pytest.mark.parametrize("streams", [True, False])
async def test_once_nothing_is_read_no_request_waits_for_an_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """Their router is replaced, and may wait for them before it ends."""

    def fails(*_: object) -> None:
        raise ValueError("what came is no output")

    posted = await running.asked(CHAT | {"stream": streams})
    monkeypatch.setattr(ServersFrontEnd, "_hand_on", fails)
    running.servers.say(b"{}", finish_reason="stop")
    async with asyncio.timeout(5.0):
        assert (await posted).status_code == 503
        assert (await (await running.asked(CHAT))).status_code == 503
    assert running.is_idle and len(running.servers.asked) == 1


async def test_once_nothing_is_read_the_router_says_so() -> None:
    class Broken(Servers):
        async def next_outputs(self) -> Outputs:
            raise ValueError("what came is no output")

    background = BackgroundTasks(lambda _: None)
    reader: Any = ServersFrontEnd(
        routed=Broken(),  # type: ignore[arg-type]
        model="ours",
        server_model="theirs",
        max_model_len=1,
        isolates_keys=False,
    )
    reader.application(background)
    await until(lambda: bool(reader.errored))
    await background.close()
