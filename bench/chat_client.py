"""One streamed completion, of a chat or a text, at a time over one kept-open connection, with each chunk's arrival.

The client shares the machine with the servers that it measures, so it is made to cost little: a bare asyncio protocol,
httptools for HTTP and msgspec for the chunks, instead of a full HTTP client.

What is timed:

    TTFT        from just before the request is sent (connecting included, where that is needed) to the first chunk
                with a token
    ITL         from one chunk with tokens to the next; a server that is behind may put several tokens into a chunk

A chunk counts as a chunk with tokens unless it only announces the role: vLLM sends one chunk a step also where the
token's text is empty (half a character, a special token).
"""

import asyncio
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from bench.sse import EventDecoder

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
SHOWN_ERROR_BYTES = 300
PATIENCE_S = 600.0  # for a whole answer, where nothing else is said


class RequestFailed(Exception):
    """The server refused, broke off, or answered with something else than a whole stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole stream; `output_tokens` is the server's own count (`usage`)."""

    ttft_s: float
    itl_s: tuple[float, ...]
    output_tokens: int


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    """`delta` of a chat, `text` of a text."""

    delta: _Delta | None = None
    text: str | None = None

    def carries_tokens(self) -> bool:
        if self.delta is None:
            return self.text is not None
        return self.delta.role is None or bool(self.delta.content)


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None

    def carries_tokens(self) -> bool:
        return any(choice.carries_tokens() for choice in self.choices)


def _shown(message: bytes) -> str:
    return message[:SHOWN_ERROR_BYTES].decode(errors="replace")


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


class StreamRecording:
    """The events of one stream and when they came."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._events = EventDecoder()
        self._token_chunks_s: list[float] = []
        self._output_tokens: int | None = None
        self._done = False
        self._error: str | None = None

    @property
    def token_chunks(self) -> int:
        return len(self._token_chunks_s)

    def receive(self, body: bytes, now_s: float) -> None:
        for data in self._events.feed(body):
            if data == b"[DONE]":
                self._done = True
            else:
                self._receive_chunk(data, now_s)

    def _receive_chunk(self, data: bytes, now_s: float) -> None:
        try:
            chunk = _CHUNK_DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self._error = f"unreadable chunk: {error}"
            return
        if chunk.error is not None:
            self._error = f"error in the stream: {_shown(msgspec.json.encode(chunk.error))}"
        if chunk.usage is not None:
            self._output_tokens = chunk.usage.completion_tokens
        if chunk.carries_tokens():
            self._token_chunks_s.append(now_s)

    def finish(self) -> Answer:
        """Raises: RequestFailed: the stream held an error, or lacks its end, its tokens or its usage."""
        times_s = self._token_chunks_s
        if self._error is not None:
            raise RequestFailed(self._error)
        if not self._done:
            raise RequestFailed("the stream ended without [DONE]")
        if not times_s or self._output_tokens is None:
            raise RequestFailed("the stream held no token" if not times_s else "the stream held no usage")
        return Answer(
            ttft_s=times_s[0] - self._started_s,
            itl_s=tuple(later - earlier for earlier, later in zip(times_s, times_s[1:], strict=False)),
            output_tokens=self._output_tokens,
        )


class ChatConnection(asyncio.Protocol):
    """A connection that carries one request at a time. httptools calls `on_body` and `on_message_complete`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes, started_s: float) -> Answer:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._recording = StreamRecording(started_s)
        self._refusal = b""
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._answer is None or self._answer.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"unreadable HTTP answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._fail(f"connection closed after {self._recording.token_chunks} chunks with tokens")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() == 200:
            self._recording.receive(body, self._now_s)
        else:
            self._refusal += body

    def on_message_complete(self) -> None:
        assert self._answer is not None
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        if status != 200:
            return self._fail(f"HTTP {status}: {_shown(self._refusal)}")
        try:
            self._answer.set_result(self._recording.finish())
        except RequestFailed as error:
            self._answer.set_exception(error)

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RequestFailed(reason))
            self.close()


class ChatClient:
    """One request at a time; reconnects when the server has closed the connection. `url` is plain http."""

    def __init__(
        self, url: str, timeout_s: float = PATIENCE_S, path: str = CHAT_PATH, slo_class: str | None = None
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "LoadConfig checks the url"
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        self._connection = ChatConnection()
        asked = "" if slo_class is None else f"X-Sluice-Class: {slo_class}\r\n"
        self._head = (
            f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{asked}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nContent-Length: "
        ).encode()

    async def ask(self, body: bytes) -> Answer:
        """Raises: RequestFailed."""
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._connection.is_open:
                    await self._connect()
                return await self._connection.ask(self._head + f"{len(body)}\r\n\r\n".encode() + body, started_s)
        except TimeoutError:
            self.close()
            raise RequestFailed(f"no whole answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise RequestFailed(f"cannot connect to {self._host}:{self._port}: {error.strerror or error}") from None

    def close(self) -> None:
        self._connection.close()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(ChatConnection, self._host, self._port)
