"""Reads the bodies of requests, whole, before the application sees anything of them: each bounded, all together, and
in a bounded time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.types import Receive

from deployments.http.errors import HttpError, bad_request
from deployments.http.limits import Judged, RequestLimits, judged
from policies.errors import SluiceError
from policies.live import Live

IN_A_THREAD_BYTES = 16 << 10  # what takes longer to judge than a thread takes to start


class ClientLeftError(SluiceError):
    """The client left before its body was whole."""


class Body(NamedTuple):
    """A whole body, and what `deployments.http.limits.judged` found in it."""

    content: bytes
    service_tier: Any
    in_one_piece: bool
    fields: frozenset[str]
    session: str | None = None


@dataclass(slots=True, eq=False)
class _Incoming:
    """A body that is not whole yet."""

    deadline: asyncio.Timeout | None = None
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    gave_way: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of bodies.

    Attributes:
        request: limits of a single request.
        max_buffered_bytes: the bytes of all bodies together, until their exchange ends. Beyond it the largest body
            that is not whole yet is given up: clients that send slowly, or much, give way.
        timeout_s: from the first byte of a body to its last.
    """

    request: RequestLimits
    max_buffered_bytes: int
    timeout_s: float


class RequestBodies:
    """All bodies of one process."""

    def __init__(self, limits: Live[BodyLimits]) -> None:
        self._limits = limits
        self._incoming: set[_Incoming] = set()
        self.buffered_bytes = 0

    @property
    def limits(self) -> RequestLimits:
        """The limits of one request, in force now."""
        return self._limits.now.request

    @property
    def too_large(self) -> HttpError:
        most = self.limits.max_body_bytes
        return HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body exceeds {most} bytes (router.max_body_bytes)")

    def is_too_large(self, declared_bytes: float) -> bool:
        return declared_bytes > self.limits.max_body_bytes

    @contextlib.asynccontextmanager
    async def reading(self, receive: Receive) -> AsyncIterator[Body]:
        """One body, counted until the end of the block.

        Raises:
            HttpError: it is too large or late, asks for too much, or there is no room for it now.
            ClientLeftError: the client has gone.
        """
        size = 0
        try:
            content = await self._read(receive)
            size = len(content)
            found = await self._judged(content)
            yield Body(content, found.service_tier, found.in_one_piece, found.fields, found.session)
        finally:
            self.buffered_bytes -= size

    async def _judged(self, content: bytes) -> Judged:
        if len(content) < IN_A_THREAD_BYTES:
            found = judged(content, self.limits)
        else:
            found = await asyncio.to_thread(judged, content, self.limits)
        if found.why_refused is not None:
            raise bad_request(found.why_refused)
        return found

    async def _read(self, receive: Receive) -> bytes:
        """The bytes of a whole body stay counted; those of any other are given back."""
        incoming = _Incoming()
        try:
            async with asyncio.timeout(self._limits.now.timeout_s) as incoming.deadline:
                return await self._whole(incoming, receive)
        except BaseException as error:
            self.buffered_bytes -= incoming.size
            if isinstance(error, TimeoutError):
                raise self._given_up(incoming) from error
            raise
        finally:
            self._incoming.discard(incoming)

    async def _whole(self, incoming: _Incoming, receive: Receive) -> bytes:
        self._incoming.add(incoming)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError("the client left before its body was whole")
            self._take(incoming, message.get("body", b""))
            if not message.get("more_body", False):
                return incoming.parts[0] if len(incoming.parts) == 1 else b"".join(incoming.parts)

    def _take(self, incoming: _Incoming, part: bytes) -> None:
        incoming.parts.append(part)
        incoming.size += len(part)
        self.buffered_bytes += len(part)
        if self.is_too_large(incoming.size):
            raise self.too_large
        if self.buffered_bytes > self._limits.now.max_buffered_bytes:
            largest = max(self._incoming, key=lambda each: each.size)
            if largest is incoming:
                raise self._no_room
            assert largest.deadline is not None, "it has one from before its first byte"
            if not largest.deadline.expired():  # else its bytes come back in a moment
                largest.gave_way = True
                largest.deadline.reschedule(0)

    def _given_up(self, incoming: _Incoming) -> HttpError:
        if incoming.gave_way:
            return self._no_room
        why = f"the body was not whole within {self._limits.now.timeout_s:g} s"
        return HttpError(HTTPStatus.REQUEST_TIMEOUT, why, {"Connection": "close"})

    @property
    def _no_room(self) -> HttpError:
        why = "no room for this body now (router.max_buffered_bytes)"
        return HttpError(HTTPStatus.SERVICE_UNAVAILABLE, why, {"Retry-After": "1"})
