"""Responses in the Redis that all routers share: JSON, for some time, within a bound of bytes, each with an owner."""

import hashlib
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import redis.asyncio as redis
from prometheus_client import Counter

from deployments.batches.files import NOBODY, owner_of
from deployments.config.services import ResponsesSection
from policies.errors import SluiceError, StateStoreError
from router.clock import Clock
from router.redis_store import guarded, scripts_in

LEASE_S = 20.0  # of a background response: its router may miss some signs of life, each a call's time
CALL_TIMEOUT_S = 2.0  # a client waits for its answer meanwhile
RECORD_BYTES = 1024  # the most that Redis needs for a response besides its JSON
ID = re.compile(r"resp_[A-Za-z0-9_-]{1,96}", re.ASCII)

_LUA = Path(__file__).with_name("lua")


def shown_id(response_id: str) -> str:
    """What status, logs and traces call a response. Without API keys its id opens it, and nothing leads from this one
    to that."""
    return f"response-{hashlib.sha256(response_id.encode()).hexdigest()[:24]}"


class NoRoomError(SluiceError):
    """A response does not fit into what may be stored."""


class TakenError(SluiceError):
    """There is a response by this id."""


class Place(NamedTuple):
    """The owner of a response, in letters and digits, and its id."""

    owner: str
    response_id: str

    @classmethod
    def of_key(cls, key: str | None, response_id: str) -> "Place":
        """The place of a response of this API key, by its name; None without one."""
        return cls(owner_of(key), response_id)

    @property
    def may_be(self) -> bool:
        """Whether its id looks like that of a response."""
        return ID.fullmatch(self.response_id) is not None

    @property
    def shown(self) -> str:
        """For logs."""
        return shown_id(self.response_id)

    @property
    def member(self) -> str:
        return f"{self.owner}:{self.response_id}"


class Lease(NamedTuple):
    """On a response that is being made in the background.

    Attributes:
        maker: tells it from one that is begun under the same id once this is deleted.
    """

    place: Place
    maker: str

    @classmethod
    def of(cls, place: Place) -> "Lease":
        return cls(place, secrets.token_hex(8))


class Encoded(NamedTuple):
    """JSON of a response as a client gets it, and of its conversation, with which another may go on."""

    response: bytes
    messages: bytes = b""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + RECORD_BYTES


class Stored(NamedTuple):
    """A response as the store has it.

    Attributes:
        status: ended, if `response` is as it was answered; else its present status.
        error: why it failed.
        messages: b"" unless they were asked for.
    """

    status: str
    response: bytes
    error: str
    is_background: bool
    messages: bytes = b""


class Usage(NamedTuple):
    responses: int
    stored_bytes: int


class ResponseStore:
    """Every call raises StateStoreError if Redis is away."""

    def __init__(
        self, client: "redis.Redis", application: str, section: ResponsesSection, clock: Clock, unstored: Counter
    ) -> None:
        """Args:
        unstored: counts what could not be stored, by why.
        """
        self._redis, self._clock, self._away_until_s, self._unstored = client, clock, 0.0, unstored
        self._prefix = f"{{sluice:{application}}}:responses:1"  # of these tables, which other versions do not read
        self._keep_ms = int(section.keep_s * 1000)
        self._most, self._of_key = section.max_stored_bytes, section.max_key_share
        self._scripts = scripts_in(client, _LUA)

    def max_bytes(self, owner: str) -> int:
        """The bytes that one owner may fill: all without a key, as nothing tells one client from another."""
        return self._most if owner == NOBODY else int(self._most * self._of_key)

    async def check(self) -> None:
        """Ask Redis before an answer is made in vain."""
        await self._guarded(self._redis.ping)

    def no_room(self, why: str) -> NoRoomError:
        """An error to be raised, which is counted."""
        self._unstored.labels("room").inc()
        return NoRoomError(why)

    async def keep(self, place: Place, encoded: Encoded, *, tries: bool = True) -> None:
        """A response that has ended. Raises NoRoomError.

        Args:
            tries: also where Redis did not answer a moment ago.
        """
        try:
            if not tries and self._clock.now() < self._away_until_s:
                raise StateStoreError("Redis did not answer a moment ago")
            kept = await self._run("keep", place.member, *self._sized(encoded), *self._bounds(place))
        except StateStoreError:
            self._unstored.labels("redis").inc()
            raise
        if not kept:
            raise self.no_room(f"a response of {encoded.size} bytes does not fit (responses.max_stored_bytes)")

    async def begin(self, lease: Lease, queued: Encoded) -> None:
        """A response that this router makes in the background. The lease is for LEASE_S from each `beat`.

        Raises:
            TakenError: there is one by this id.
            NoRoomError: it would not fit.
        """
        lease_ms = int(LEASE_S * 1000)
        sized = queued.size, queued.response, lease_ms
        told = await self._run("begin", lease.place.member, lease.maker, *sized, *self._bounds(lease.place))
        if told == b"exists":
            raise TakenError(f"there is a response {lease.place.response_id} already")
        if told == b"room":
            raise self.no_room("there is no room to store another response (responses.max_stored_bytes)")

    async def beat(self, statuses: Mapping[Lease, str]) -> set[Lease]:
        """A sign of life for these, with their statuses. Returns those that are not to be made any longer."""
        told = [each for lease, status in statuses.items() for each in (lease.place.member, lease.maker, status)]
        unwanted = {maker.decode() for maker in await self._run("beat", int(LEASE_S * 1000), *told)}
        return {lease for lease in statuses if lease.maker in unwanted}

    async def complete(self, lease: Lease, encoded: Encoded) -> None:
        """One that was begun, unless it is not wanted any more. Raises NoRoomError: its client has been told."""
        sized = self._sized(encoded)
        told = await self._run("complete", lease.place.member, lease.maker, *sized, *self._bounds(lease.place))
        if told == b"room":
            raise self.no_room(f"a response of {encoded.size} bytes does not fit (responses.max_stored_bytes)")

    async def fail(self, lease: Lease, why: str) -> None:
        """One that was begun, unless it is not wanted any more."""
        await self._run("fail", lease.place.member, lease.maker, why)

    async def withdraw(self, lease: Lease) -> None:
        """One that was begun, and of which its client has not heard."""
        await self._run("withdraw", lease.place.member, lease.maker)

    async def get(self, place: Place, *, with_messages: bool = False) -> Stored | None:
        """None if the owner has no response with this id."""
        return _stored(await self._run("get", place.member, int(with_messages))) if place.may_be else None

    async def cancel(self, place: Place) -> Stored | None:
        """As `get` afterwards. Only a response that is being made in the background is cancelled, at its router's next
        beat."""
        return _stored(await self._run("cancel", place.member)) if place.may_be else None

    async def delete(self, place: Place) -> bool:
        """Whether there was one."""
        return place.may_be and bool(await self._run("delete", place.member))

    async def usage(self) -> Usage:
        return Usage(*await self._run("usage"))

    def _sized(self, encoded: Encoded) -> tuple[int, bytes, bytes]:
        return encoded.size, encoded.response, encoded.messages

    def _bounds(self, place: Place) -> tuple[int, int]:
        return self._most, self.max_bytes(place.owner)

    async def _run(self, script: str, *args: str | bytes | int) -> Any:
        call = self._scripts[script]
        return await self._guarded(lambda: call(keys=[self._prefix], args=[self._keep_ms, *args]))

    async def _guarded(self, call: Any) -> Any:
        try:
            reply = await guarded(self._redis, call, CALL_TIMEOUT_S)
        except StateStoreError:
            self._away_until_s = self._clock.now() + 5.0  # in which nothing is stored unasked
            raise
        self._away_until_s = 0.0
        return reply


def _stored(found: list[bytes | None]) -> Stored | None:
    """The reply of get.lua."""
    status, response, error, background, *messages = found
    if status is None or response is None:
        return None
    return Stored(
        status.decode(),
        response,
        (error or b"").decode(),
        background is not None,
        (messages[0] or b"") if messages else b"",
    )
