"""One request on its way through an application: what that receives, what its client gets, and the line in the log.

`Server-Timing` splits a response's time so far, in milliseconds: `queue` is the wait for a replica's slot, `engine` the
time from slot to the latest token, network included, `framework` the rest: parsing, tokenizing, formatting. A streamed
response carries the times up to its first chunk. A turn of a task says besides what that had left as it arrived, and
which part of it the turn got.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.bodies import ClientLeftError
from deployments.http.direct_streams import DirectStream, StreamKind
from deployments.http.errors import error_response, status_of
from policies.errors import AdmissionError, ReplicaLostError, SluiceError, StateStoreError
from router.timing import HttpContext

logger = logging.getLogger(__name__)

# In which a client takes nothing of its answer, once the system and HAProxy hold some megabytes for it: it has stopped
# reading, or reads a few bytes a second. A place among the router's requests is kept for it, a download its open file.
MOST_UNREAD_S = 600.0
LOOK_EVERY_S = 30.0
TASK_LEFT_HEADER = "X-Sluice-Task-Left-Ms"
MODEL_HEADER = "X-Sluice-Model"  # which of several versions answers
LEAVE_S = 5.0  # an application's time to notice that its client has left, before it is cancelled
HELD_PIECES = 8  # of a stream's body: vLLM sends two before it asks the engine
CLIENTS_WAIT_S = 120  # OpenAI's client tries again by Retry-After up to this, and never where it says more
LATER_S = 5  # of 503s that know nothing better: what is away is so for seconds
CLIENT_LEFT = 499  # what proxies log for a client that hung up before the response began
AWAY = (ReplicaLostError, StateStoreError)  # wherever an application met them: what it asked for may be there later
_CHUNK = b'data: {"'  # how one of a stream begins
_NO_TIER = b'"service_tier":null'  # what vLLM has in a whole answer


class _Incoming:
    """What an application receives: once the exchange is over, that its client has left, even if it waits already."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._waits, self._is_over = receive, set[asyncio.Timeout](), False

    async def receive(self) -> Message:
        if not self._is_over:
            try:
                async with asyncio.timeout(None) as wait:
                    self._waits.add(wait)
                    try:
                        return await self._receive()
                    finally:
                        self._waits.discard(wait)
            except TimeoutError:
                if not self._is_over:  # not ours
                    raise
        return {"type": "http.disconnect"}

    def end(self) -> None:
        self._is_over = True
        for wait in self._waits:
            wait.reschedule(-math.inf)


class Exchange:
    """One request and its response. The response's start is held back until the first piece of its body, that of a
    stream until a request to an engine is queued; then it goes out with our headers.

    So a request that was refused a place in the queue is answered with that error and its status, even if vLLM has
    begun a stream for it already.
    """

    def __init__(self, send: Send, context: HttpContext) -> None:
        self._send = send
        self._start: Message | None = None
        self._held: list[Message] = []
        self._is_over = False
        self._sending_since_s: float | None = None
        self._status = 0
        self._error: str | None = None
        self._stream: DirectStream | None = None
        self.context = context

    def stream_directly(self, kind: StreamKind | None) -> None:
        """Where its response is a stream of that kind, the engine's side may send text past the front end."""
        if kind is not None:
            self.context.text_stream = self._stream = DirectStream(kind, self._send_piece)

    @property
    def status(self) -> int:
        """CLIENT_LEFT while no response has begun."""
        return self._status or CLIENT_LEFT

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Let an application answer, until it has ended.

        Ray Serve tells that a client has left by a message, and by cancelling us that the client has left or a time
        limit is over. vLLM runs its handlers in tasks of their own, which end by the message and which a cancellation
        would not reach: so we send the message too, and end what engines do for the request ourselves. Only an
        application that does not listen for LEAVE_S is cancelled.

        Raises:
            ClientLeftError: the client has taken nothing for MOST_UNREAD_S.
        """
        incoming = _Incoming(receive)
        serving = asyncio.ensure_future(app(scope, incoming.receive, self.send))
        try:
            while not (await asyncio.wait([serving], timeout=LOOK_EVERY_S))[0]:
                self._check_reader()
            await serving
        finally:
            incoming.end()
            self._is_over = True
            if self._stream is not None:
                self._stream.close()
            try:
                await self.context.end()
                if not serving.done():
                    await asyncio.wait([serving], timeout=LEAVE_S)
            finally:
                serving.cancel()

    def _check_reader(self) -> None:
        """Raises ClientLeftError."""
        since_s = self._sending_since_s
        if since_s is not None and time.monotonic() - since_s > MOST_UNREAD_S:
            self._error = f"the client read nothing for {MOST_UNREAD_S:g} s"
            raise ClientLeftError(self._error)

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self.context.service_tier is not None:
            message = self._with_tier(message, self.context.service_tier.encode())
        if self._start is not None:
            if (refusal := self.context.refusal) is not None:
                await self.refuse(refusal)
                return
            if self._may_be_refused(self._start, message):
                self._held.append(message)
                return
            await self._begin(self._start)
            self._error = _error_in(self._status, message)
        if self._stream is not None and (body := message.get("body")):
            if not (body := await self._stream.passing(body)):
                return
            message = {**message, "body": body}
        await self._send_now(message)

    async def _send_piece(self, body: bytes) -> None:
        """Of a stream that has begun, and is not over with this one."""
        if not self._is_over:
            await self._send_now({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_now(self, message: Message) -> None:
        self._sending_since_s = time.monotonic()
        await self._send(message)
        self._sending_since_s = None

    def _with_tier(self, message: Message, tier: bytes) -> Message:
        """Every chunk of a stream, and a whole answer, in which vLLM leaves the field empty. What a model says cannot
        look like either: in a JSON string each quotation mark has a backslash before it."""
        body: bytes = message.get("body", b"")
        if body.startswith(_CHUNK):
            return {**message, "body": _CHUNK[:-1] + b'"service_tier":"' + tier + b'",' + body[len(_CHUNK) - 1 :]}
        start = self._start
        if start is None or message.get("more_body", False) or _NO_TIER not in body:
            return message
        body = body.replace(_NO_TIER, b'"service_tier":"' + tier + b'"', 1)
        MutableHeaders(scope=start)["Content-Length"] = str(len(body))
        return {**message, "body": body}

    def _may_be_refused(self, start: Message, message: Message) -> bool:
        """It is a piece of a stream, not its last, and no request to an engine is queued yet."""
        if self.context.queued or len(self._held) == HELD_PIECES or not message.get("more_body", False):
            return False
        return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")

    async def _begin(self, start: Message) -> None:
        self._start, self._status = None, start["status"]
        times, headers = split_time(self.context).items(), MutableHeaders(scope=start)
        headers["Server-Timing"] = ", ".join(f"{name};dur={s * 1e3:.2f}" for name, s in times)
        if (left_s := self._task_left_s) is not None:
            headers[TASK_LEFT_HEADER] = f"{1e3 * left_s:.0f}"
        if self.context.served_by:
            headers[MODEL_HEADER] = self.context.served_by
        if self._status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.setdefault("Retry-After", str(LATER_S))
        await self._send(start)
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    @property
    def _task_left_s(self) -> float | None:
        """What its task had left when it arrived, below 0 when that was late."""
        return next((timing.session.task_left_s for timing in self.context.timings if timing.session is not None), None)

    async def broke_off(self, error: Exception) -> bool:
        """The application has failed. True when its client got a refusal for that; else it got what was held, or gets
        Ray Serve's 500."""
        refusal = self.context.refusal or (error if isinstance(error, AWAY) else None)
        if self._start is None and (self._status or refusal is None):
            self._status = self._status or HTTPStatus.INTERNAL_SERVER_ERROR
            return False
        if refusal is None:
            if self._held and self._start is not None:
                await self._begin(self._start)
            self._status = self._status or HTTPStatus.INTERNAL_SERVER_ERROR
            return False
        await self.refuse(refusal)
        return True

    async def refuse(self, refused: SluiceError) -> None:
        why, retry_after_s = str(refused), None
        if isinstance(refused, AdmissionError):
            retry_after_s = max(1, math.ceil(refused.retry_after_s))
            if retry_after_s > CLIENTS_WAIT_S:
                why += f"; try again in {retry_after_s} s, for which clients mostly do not wait by themselves"
        response = error_response(status_of(refused), why)
        if retry_after_s is None and response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            retry_after_s = LATER_S
        if retry_after_s is not None:
            response.headers["Retry-After"] = str(retry_after_s)
        if self.context.served_by:
            response.headers[MODEL_HEADER] = self.context.served_by
        self._start, self._is_over, self._status, self._error = None, True, response.status_code, why
        headers = response.raw_headers
        await self._send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self._send({"type": "http.response.body", "body": response.body})

    def log(self, scope: Scope) -> None:
        """One line. With several answers its times are those of the first."""
        context, times = self.context, split_time(self.context)
        ended = [timing.ended for timing in context.timings if timing.ended is not None]
        logger.info(
            "request",
            extra={
                "request_id": context.request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": self.status,
                "slo_class": context.slo_class,
                "tenant": context.tenant.name if context.tenant else None,
                "model": context.model or None,
                "prompt_tokens": _total(ended, "prompt_tokens"),
                "predicted_tokens": _total(ended, "predicted_tokens"),
                "output_tokens": sum(timing.output_tokens for timing in context.timings),
                "outcomes": [timing.outcome for timing in context.timings],
                "replicas": [each["replica"] for each in ended if each["replica"] is not None],
                "moves": _total(ended, "moves"),
                "resumed": _total(ended, "resumed"),
                "error": self._error,
                "unkept_because": [timing.cause for timing in context.timings if timing.cause is not None],
                "wait_s": _least(ended, "wait_s"),
                "ttft_s": _least(ended, "ttft_s"),
                "duration_s": round(sum(times.values()), 5),
                **{f"{name}_s": round(seconds, 5) for name, seconds in times.items()},
            },
        )


def _error_in(status: int, message: Message) -> str | None:
    """What the body of an error says, in OpenAI's shape or another, within 2 kB."""
    if status < HTTPStatus.BAD_REQUEST:
        return None
    text: str = message.get("body", b"")[:2048].decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):  # another shape, or longer
        return str(json.loads(text)["error"]["message"])
    return text


def split_time(context: HttpContext) -> dict[str, float]:
    """Seconds so far: queue, engine, framework; they add up to the time since the request came in."""
    total_s = time.monotonic() - context.received_s
    submitted_s = min((t.submitted_s for t in context.timings), default=None)
    assigned_s = min((t.assigned_s for t in context.timings if t.assigned_s is not None), default=None)
    last_s = max((t.last_token_s for t in context.timings if t.last_token_s is not None), default=None)
    queue_s = assigned_s - submitted_s if assigned_s is not None and submitted_s is not None else 0.0
    engine_s = last_s - assigned_s if last_s is not None and assigned_s is not None else 0.0
    return {"queue": queue_s, "engine": engine_s, "framework": total_s - queue_s - engine_s}


def _known(ended: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [each[name] for each in ended if each[name] is not None]


def _total(ended: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """None if it is known of no answer."""
    return sum(known) if (known := _known(ended, name)) else None


def _least(ended: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return min(_known(ended, name), default=None)
