"""Streams that go past vLLM's generators equal those that go through them, byte for byte; ids and times apart."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI
from starlette.types import ASGIApp, Message
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from deployments import app
from deployments.config.model import DEMO_ARGS, DEMO_MODEL
from deployments.engines.vllm.args import parse_vllm_args
from deployments.engines.vllm.direct_outputs import write_past_generators
from deployments.engines.vllm.front_end import RoutedAsyncLLM
from deployments.http import middleware
from deployments.http.direct_streams import STREAM_KINDS, DirectStream
from deployments.http.promises import Promises
from policies.router.promise import NO_PROMISE
from tests.deployments.bodies import behind_middleware
from tests.deployments.engines.vllm.routed import ROOM, Routed

# Importing vLLM takes seconds, and making its application a good part of one.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EOS = 0
LENGTH = FinishReason.LENGTH
CHAT, TEXT, MESSAGES, RESPONSES = STREAM_KINDS
WORDS = 'The café 🙂 said: "no\\yes"\n\tworld\u2028 wide\x7f web'
Frame = tuple[Sequence[int], FinishReason | None]
_CHANGING = re.compile(rb'(?<=")(chatcmpl|cmpl|resp|msg|message)[-_][0-9a-f-]+|(?<="created":)\d+|(?<=_at":)[\d.]+')


class Scripted(Routed):
    """Answers each request with the same frames, each once the front end has done all it does with the one before."""

    frames: Sequence[Frame] = ()

    async def submit(self, request: Any, **_: Any) -> None:
        self.asked.append(request)
        self.running.add(request.request_id)
        self.feeding = asyncio.ensure_future(self.feed(request.request_id))

    async def feed(self, request_id: str) -> None:
        stats: Any = PrefillStats(num_prompt_tokens=1)
        for tokens, finish in self.frames:
            if request_id not in self.running:
                return
            output = EngineCoreOutput(request_id, list(tokens), finish_reason=finish, prefill_stats=stats)
            stats = None
            if finish is not None:
                self._end([request_id], str(finish))
            await self._outputs.put(EngineCoreOutputs(outputs=[output]))
            await settled()


async def settled() -> None:
    """Everything that a frame brings about has happened."""
    for _ in range(60):
        await a_turn()


async def a_turn() -> None:
    await asyncio.sleep(0)


async def past(written: list[str], least: int) -> None:
    """So many texts have gone past the generators."""
    while len(written) < least:
        await a_turn()


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[(), ("--disable-log-stats",)], ids=["stats", "none"]
)
async def vllms(request: pytest.FixtureRequest) -> AsyncIterator[FastAPI]:
    """vLLM's application over a client that answers as it is told: `state.routed`."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in app.router_env().items():
            patched.setenv(name, value)
        args = parse_vllm_args(["--model", str(DEMO_MODEL), *DEMO_ARGS, *request.param])
        routed = Scripted()
        llm = RoutedAsyncLLM(args, routed)  # type: ignore[arg-type]
        made = build_app(args, ("generate",), llm.model_config)
        await init_app_state(llm, made.state, args, ("generate",))
        write_past_generators(llm.output_processor, made.state)
        made.state.server = SimpleNamespace()
        made.state.llm, made.state.routed = llm, routed
        yield made
        llm.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def routed(vllms: FastAPI) -> AsyncIterator[Scripted]:
    found: Scripted = vllms.state.routed
    found.asked.clear()
    yield found
    await settled()
    assert not vllms.state.llm.output_processor.request_states


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that went past the generators."""
    texts: list[str] = []
    write = DirectStream.write

    def noted(self: DirectStream, text: str) -> None:
        texts.append(text)
        write(self, text)

    monkeypatch.setattr(DirectStream, "write", noted)
    return texts


class Connection:
    """Takes what it is sent, at once unless it lags."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.status = 0
        self.takes = asyncio.Event()
        self.takes.set()
        self.fails_after: int | None = None
        self.left = asyncio.Event()

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.fails_after is not None and len(self.pieces) >= self.fails_after:
            raise OSError("the connection is broken")
        if message.get("body"):
            self.pieces.append(message["body"])

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


async def ask(asgi: ASGIApp, path: str, body: dict[str, Any], connection: Connection) -> None:
    sent = json.dumps({"stream": True, **body}).encode()
    begun = False

    async def receive() -> Message:
        nonlocal begun
        if begun:
            await connection.left.wait()
            return {"type": "http.disconnect"}
        begun = True
        return {"type": "http.request", "body": sent, "more_body": False}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(sent)), (b"host", b"sluice")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "root_path": "", "client": None}
    await asyncio.wait_for(asgi(scope, receive, connection.send), 30)


def masked(body: bytes) -> list[bytes]:
    return _CHANGING.sub(b"#", body).split(b"\n\n")


def asked(path: str, **more: Any) -> dict[str, Any]:
    of_path: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
        TEXT: {"prompt": "a", "max_tokens": 400},
        MESSAGES: {"model": str(DEMO_MODEL), "messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
        RESPONSES: {"input": "a", "max_output_tokens": 400},
    }
    return {**of_path[path], **more}


def tokens_of(vllms: FastAPI, text: str) -> list[int]:
    return list(vllms.state.llm.renderer.tokenizer.encode(text, add_special_tokens=False))


def one_each(tokens: Sequence[int], end: FinishReason = LENGTH) -> list[Frame]:
    return [*(([token], None) for token in tokens[:-1]), ([tokens[-1]], end)]


def behind(vllms: FastAPI) -> ASGIApp:
    tiers = {"priority": "standard"}
    promises = Promises(dict.fromkeys(ROOM, NO_PROMISE), "standard", tiers)
    return behind_middleware(vllms, ROOM, promises=promises)


async def both_ways(
    vllms: FastAPI, routed: Scripted, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> tuple[list[bytes], list[bytes]]:
    """The events past the generators, and those through them."""
    found = []
    for is_direct in (True, False):
        with monkeypatch.context() as patched:
            if not is_direct:
                patched.setattr(middleware, "stream_kind", lambda path, fields: None)
            connection = Connection()
            try:
                await ask(behind(vllms), path, body, connection)
            except RuntimeError as error:  # what vLLM 0.32 makes of an engine's error in a stream of a response
                connection.pieces.append(repr(error).encode())
            assert connection.status == 200, connection.body
            found.append(masked(connection.body))
    return found[0], found[1]


SCRIPTS: dict[str, Callable[[list[int]], list[Frame]]] = {
    "a token at a time": one_each,
    "drafts": lambda tokens: [
        (tokens[:1], None),
        *((tokens[at : at + 3], None) for at in range(1, len(tokens), 3)),
        ([], LENGTH),
    ],
    "its end token": lambda tokens: [*one_each(tokens)[:-1], (tokens[-1:], None), ([EOS], FinishReason.STOP)],
    "one token": lambda tokens: [(tokens[:1], LENGTH)],
    "two tokens": lambda tokens: one_each(tokens[:2]),
    "an error": lambda tokens: [*one_each(tokens)[:-1], ([], FinishReason.ERROR)],
    "special tokens": lambda tokens: one_each([*tokens[:3], EOS, EOS, *tokens[3:]]),
}


@pytest.mark.parametrize("path", list(STREAM_KINDS))
@pytest.mark.parametrize("script", list(SCRIPTS))
async def test_streams_equal_those_of_vllms_generators(
    vllms: FastAPI, routed: Scripted, monkeypatch: pytest.MonkeyPatch, written: list[str], path: str, script: str
) -> None:
    routed.frames = SCRIPTS[script](tokens_of(vllms, WORDS))
    direct, through = await both_ways(vllms, routed, monkeypatch, path, asked(path))
    assert direct == through
    if len(routed.frames) > 3:
        assert len(written) > 1


@pytest.mark.parametrize(
    "more",
    [
        {"stream_options": {"include_usage": True}},
        {"stop": ["wor"]},
        {"stop": ["wor", "zzzzzzzzzzzz"], "include_stop_str_in_output": True},
        {"stop": 'said: "no\\y'},
        {"skip_special_tokens": False},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
        {"service_tier": "priority"},
        {"min_tokens": 5, "stop": ["ca", " wide"]},
        {"logprobs": None, "echo": False, "n": 1},
        {"user": '"delta":{"content":"no"}'},
        {"session_id": "build-4711"},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_a_request_may_ask_for_changes_nothing_of_that(
    vllms: FastAPI,
    routed: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    written: list[str],
    path: str,
    more: dict[str, Any],
) -> None:
    tokens = tokens_of(vllms, WORDS)
    routed.frames = one_each([*tokens[:6], EOS, *tokens[6:]])
    direct, through = await both_ways(vllms, routed, monkeypatch, path, asked(path, **more))
    assert direct == through
    assert written


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"logprobs": True}),
        (CHAT, {"return_token_ids": True}),
        (CHAT, {"echo": True}),
        (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "none"}),
        (TEXT, {"prompt": ["a", "b"]}),
        (TEXT, {"echo": True}),
        (TEXT, {"return_token_ids": True}),
        (TEXT, {"stream_interval": 3}),
        (TEXT, {"a_field_of_tomorrow": 1}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}),
    ],
    ids=str,
)
async def test_other_requests_go_through_the_generators(
    vllms: FastAPI, routed: Scripted, written: list[str], path: str, more: dict[str, Any]
) -> None:
    routed.frames = one_each(tokens_of(vllms, "a b c d"))
    await ask(behind(vllms), path, asked(path, **more), Connection())
    assert not written


def texts(body: bytes) -> Iterator[str]:
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:])["choices"]:
                yield choice["text"]


async def test_a_reader_that_lags_gets_all_text_in_fewer_events(
    vllms: FastAPI, routed: Scripted, written: list[str]
) -> None:
    tokens = tokens_of(vllms, WORDS)
    routed.frames = [([tokens[0]], None), ([tokens[1]], None)]
    connection = Connection()
    asking = asyncio.ensure_future(ask(behind(vllms), TEXT, asked(TEXT), connection))
    await past(written, 1)
    await routed.feeding
    connection.takes.clear()
    (request,) = routed.asked
    routed.frames = [([token], None) for token in tokens[2:-1]]
    await routed.feed(request.request_id)
    seen = len(connection.pieces)
    connection.takes.set()
    await settled()
    assert len(connection.pieces) == seen + 2  # the one that the connection held, and all others
    routed.frames = [([tokens[-1]], LENGTH)]
    await routed.feed(request.request_id)
    await asking
    assert "".join(texts(connection.body)) == WORDS


async def test_the_end_of_a_stream_waits_for_a_reader_that_lags(
    vllms: FastAPI, routed: Scripted, written: list[str]
) -> None:
    tokens = tokens_of(vllms, WORDS)
    routed.frames = one_each(tokens)
    connection = Connection()
    asking = asyncio.ensure_future(ask(behind(vllms), TEXT, asked(TEXT), connection))
    await past(written, 3)
    connection.takes.clear()
    await routed.feeding
    await settled()
    assert not asking.done()
    connection.takes.set()
    await asking
    assert "".join(texts(connection.body)) == WORDS
    assert connection.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("lags", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    vllms: FastAPI, routed: Scripted, written: list[str], *, lags: bool
) -> None:
    tokens = tokens_of(vllms, WORDS)
    routed.frames = [([token], None) for token in tokens]
    connection = Connection()
    asking = asyncio.ensure_future(ask(behind(vllms), CHAT, asked(CHAT), connection))
    await past(written, 3)
    if lags:
        connection.takes.clear()
        await settled()
    connection.left.set()
    connection.takes.set()
    await asking
    await settled()
    assert not routed.running
    seen = len(connection.pieces)
    await settled()
    assert len(connection.pieces) == seen


async def test_a_connection_that_fails_costs_its_own_stream_alone(
    vllms: FastAPI, routed: Scripted, written: list[str]
) -> None:
    routed.frames = one_each(tokens_of(vllms, WORDS))
    broken, whole = Connection(), Connection()
    broken.fails_after = 4
    asking = [asyncio.ensure_future(ask(behind(vllms), TEXT, asked(TEXT), each)) for each in (broken, whole)]
    failed, passed = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(failed, OSError) and passed is None
    assert "".join(texts(whole.body)) == WORDS
    assert not vllms.state.llm.errored
