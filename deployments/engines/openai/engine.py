"""An OpenAI-compatible server, whatever it is and wherever it runs, as the engine behind a relay.

A request is sent on as its client wrote it, once its turn has come. A server that does not answer is a dead engine: its
requests go on elsewhere, and the replica that Ray Serve starts in its place waits until the server is back.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from deployments.config.engine import OpenAiSection
from deployments.engines.features import Cause, switched_off
from deployments.engines.openai.events import MOST_BYTES, Events, Told
from deployments.engines.openai.messages import ENGINE_VERSION, OpenAiCodec, Outputs, ServerOutput, ServerRequest
from policies.errors import ConfigError, EngineStartError, ProtocolError, ReplicaLostError
from router.background import BackgroundTasks

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
SILENCE_S = 60  # without a word from the kernel of a server's host, or with nothing taken of a body, ends a connection
LOOK_EVERY_S, LOOK_S = 1.0, 5.0
MISSES = 3  # looks in a row at which nothing answers, before the server counts as away
GATHER_S = 0.002  # in which all streams of one step of the server come
UNREAD_OUTPUTS = 4096  # that the relay may fall behind before servers are not read any more
BUSY = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
# Of what its client asked for, and would be of any server: no failure of this service.
OF_THE_CLIENT = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
BUSY_PAUSE_S, BUSY_PAUSES = 0.25, 6  # twice as long each time, before a client is told
SHOWN_ERROR_BYTES = 64 << 10
DEFAULT_CONTEXT_TOKENS = 1 << 17  # of a server that does not say what its model has
CLOSE_S = 5.0
_AWAY = (aiohttp.ClientError, OSError)  # and what answers, but not in HTTP


class OpenAiEngine:
    """`deployments.engines.relay.Engine`; made by `connected`, of the event loop that it lives in."""

    engine_version = ENGINE_VERSION
    kv_layout = ""
    gang_sizes: Sequence[int] = ()

    def __init__(self, url: str, slots: int, session: aiohttp.ClientSession, context_tokens: int) -> None:
        self.codec = OpenAiCodec()
        self.slots, self.max_model_len, self.max_batch_tokens = slots, context_tokens, context_tokens
        self._url, self._session, self._loop = url, session, asyncio.get_running_loop()
        self._outputs: asyncio.Queue[ServerOutput | ReplicaLostError] = asyncio.Queue(UNREAD_OUTPUTS)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, int] = {}
        self._background = BackgroundTasks(self._count_failure)
        self._away: str | None = None
        self._heard_s = time.monotonic()
        self._background.spawn(self._look_after(), "look at the server")

    @classmethod
    async def connected(
        cls, section: OpenAiSection, model: str, key: str | None, tell: Callable[[str], object]
    ) -> "OpenAiEngine":
        """Once the server answers; the caller's deadline is for one that never does.

        Args:
            section: of one server.
            model: as the server calls it.
            key: the server's; None where it asks for none.
            tell: is called with what is waited for.

        Raises:
            EngineStartError: the server refuses the key, or has no such model.
        """
        (url,) = section.urls
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_socket)
        session = aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector)
        try:
            context_tokens = await _context_tokens(session, url, model, tell)
        except BaseException:
            await session.close()
            raise
        return cls(url, section.slots, session, section.max_model_len or context_tokens or DEFAULT_CONTEXT_TOKENS)

    # For the relay

    @property
    def dead(self) -> bool:
        return self._away is not None

    async def add(self, request: ServerRequest) -> None:
        task = self._background.spawn(self._answer(request), "answer")
        self._running[request.request_id] = task
        task.add_done_callback(lambda _: self._running.pop(request.request_id, None))

    async def abort(self, request_ids: list[str]) -> None:
        """Their connections end, by which a server knows."""
        for request_id in request_ids:
            if (task := self._running.pop(request_id, None)) is not None:
                task.cancel()

    async def next_outputs(self) -> Outputs:
        """Raises ReplicaLostError: the server is away."""
        found = [_or_raised(await self._outputs.get())]
        await asyncio.sleep(GATHER_S)
        while not self._outputs.empty():
            found.append(_or_raised(self._outputs.get_nowait()))
        return found

    async def cached_blocks(self, since: int | None) -> None:
        """A server tells nothing of its cache."""

    async def status(self) -> dict[str, Any]:
        return {
            "running": len(self._running),
            "waiting": 0,
            "mode": "openai",
            "server": self._url,
            "off": switched_off({Cause.OPENAI}),
            "pass_s": round(max(time.monotonic() - self._heard_s - LOOK_EVERY_S - LOOK_S, 0.0), 3),
            "background_failures": self._failures,
        }

    async def load_adapters(self) -> None:
        """The server has its own."""

    async def control(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Raises ConfigError: there is no scheduler to be told."""
        raise ConfigError(f"engine.kind openai has no scheduler to change: {sorted(changes)}")

    def shutdown(self) -> None:
        """From any other thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(CLOSE_S)

    async def _close(self) -> None:
        await self._background.close()
        await self._session.close()

    def _count_failure(self, task: str) -> None:
        self._failures[task] = self._failures.get(task, 0) + 1

    # One request

    async def _answer(self, request: ServerRequest) -> None:
        try:
            await self._answer_or_refuse(request)
        except Exception as error:  # of any kind: its client must hear of it
            await self._put(_error(request, HTTPStatus.BAD_GATEWAY, f"{self._url}: {error!r}"))
            raise

    async def _answer_or_refuse(self, request: ServerRequest) -> None:
        """A server that is busy, or hangs up before its answer, is asked again: its last word is what a client gets."""
        for pause_s in (*(BUSY_PAUSE_S * 2**number for number in range(BUSY_PAUSES)), None):
            told = Told(request)
            try:
                refusal = await self._ask(request, told)
            except ProtocolError as error:
                refusal = _error(request, HTTPStatus.BAD_GATEWAY, f"{self._url}: {error}")
            except _AWAY as error:
                if not await self._is_there():
                    await self._gone(repr(error))
                    return
                refusal = _error(request, HTTPStatus.BAD_GATEWAY, f"the server broke off: {error!r}")
            if refusal is None:
                return
            if refusal.status not in BUSY or told.has_begun or pause_s is None:
                await self._put(refusal)
                return
            await asyncio.sleep(pause_s)

    async def _ask(self, request: ServerRequest, told: Told) -> ServerOutput | None:
        """Raises an error of _AWAY or ProtocolError. Returns what the server says in the place of an answer."""
        headers = {"Content-Type": "application/json", **(request.trace or {})}
        async with self._session.post(self._url + request.path, data=request.body, headers=headers) as response:
            if response.status >= HTTPStatus.BAD_REQUEST:
                said = await _shown(response.content)
                return _refused(request, response.status, response.content_type, said)
            if not request.streams:
                await self._put(told.whole(await _bounded(response.content)))
                return None
            events = Events()
            async for chunk in response.content.iter_any():
                for data in events.feed(chunk):
                    if (output := told.event(data)) is not None:
                        await self._put(output)
                    if told.is_done:
                        return None
        if told.finish is None:
            raise aiohttp.ClientPayloadError("the stream ended before its answer")
        await self._put(told.end())  # a server that says why it ends, and not that it has
        return None

    async def _put(self, output: ServerOutput) -> None:
        await self._outputs.put(output)

    # The server

    async def _look_after(self) -> None:
        """Until it is away."""
        misses = 0
        while misses < MISSES:
            await asyncio.sleep(LOOK_EVERY_S)
            misses = 0 if await self._is_there() else misses + 1
        await self._gone("it does not answer")

    async def _is_there(self) -> bool:
        """One that is only late is: for how long, its status says (`pass_s`)."""
        try:
            async with asyncio.timeout(LOOK_S), self._session.get(f"{self._url}/v1/models") as response:
                self._heard_s = time.monotonic()
                return response.status < HTTPStatus.INTERNAL_SERVER_ERROR
        except TimeoutError:
            return True
        except _AWAY:
            return False

    async def _gone(self, why: str) -> None:
        if self._away is None:
            self._away = why
            logger.error("the server %s is away: %s", self._url, why)
            await self._outputs.put(ReplicaLostError(f"the server {self._url} is away: {why}"))


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """By which a host that has vanished is noticed also while an answer is waited for."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, SILENCE_S // 3),
        (socket.TCP_KEEPINTVL, SILENCE_S // 6),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S),
    ):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


async def _context_tokens(
    session: aiohttp.ClientSession, url: str, model: str, tell: Callable[[str], object]
) -> int | None:
    """Of the model, once the server answers; None where it does not say. Raises EngineStartError."""
    tell(f"waiting for {url}")
    while True:
        try:
            async with asyncio.timeout(LOOK_S), session.get(f"{url}/v1/models") as response:
                if response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    return _context_in(response.status, await _bounded(response.content), url, model)
        except (TimeoutError, *_AWAY):
            pass  # not yet
        await asyncio.sleep(LOOK_EVERY_S)


def _context_in(status: int, body: bytes, url: str, model: str) -> int | None:
    """Raises EngineStartError."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise EngineStartError(f"{url} refuses the key ({status}): name a file with its key in engine.openai.key_file")
    listed = _listed(body)
    if model not in listed:
        names = ", ".join(sorted(listed)) or f"no model, and answers {status} to /v1/models"
        raise EngineStartError(f"{url} has {names}: name its model in `model`, and yours in `served_model_name`")
    told = listed[model].get("max_model_len")
    return told if isinstance(told, int) and told > 0 else None


def _listed(body: bytes) -> Mapping[str, Mapping[str, Any]]:
    """Its models by their names."""
    try:
        told = msgspec.json.decode(body)
        return {each["id"]: each for each in told["data"]}
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return {}


async def _shown(content: aiohttp.StreamReader) -> bytes:
    """Of an error, its first SHOWN_ERROR_BYTES."""
    said = bytearray()
    while len(said) < SHOWN_ERROR_BYTES and (part := await content.read(SHOWN_ERROR_BYTES - len(said))):
        said += part
    return bytes(said)


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    """All of it. Raises ProtocolError beyond MOST_BYTES."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ProtocolError(f"a body has more than {MOST_BYTES} bytes")
    return bytes(body)


def _or_raised(output: ServerOutput | ReplicaLostError) -> ServerOutput:
    if isinstance(output, ReplicaLostError):
        raise output
    return output


def _refused(request: ServerRequest, status: int, content_type: str, said: bytes) -> ServerOutput:
    is_the_clients = status in OF_THE_CLIENT and not request.said  # else another server took it
    return ServerOutput(
        request_id=request.request_id,
        finish_reason="cancelled" if is_the_clients else "error",
        status=status,
        content_type=content_type,
        parts=[said],
    )


def _error(request: ServerRequest, status: HTTPStatus, why: str) -> ServerOutput:
    logger.warning("request %s: %s", request.request_id, why)
    return _refused(request, status, "text/plain", why.encode(errors="replace"))
