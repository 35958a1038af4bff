"""One kept-open TCP connection from this router to one replica."""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from policies.errors import EngineCallError, ProtocolError, ReplicaLostError
from router import wire
from router.cached_blocks import BlockChanges
from router.state_store import ReplicaInfo

CONNECT_TIMEOUT_S = 5.0

OnOutputs = Callable[["ReplicaConnection", Sequence[wire.Buffer]], Awaitable[None]]
OnBlocks = Callable[["ReplicaConnection", BlockChanges], object]


class ReplicaConnection:
    """Sends requests, hands on what the replica sends in order; `run` ends when the connection does."""

    def __init__(self, info: ReplicaInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.info = info
        self._reader, self._writer = reader, writer
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self.missed_looks = 0  # in a row, by those who look for its replica in the shared state
        self.fell_silent = False  # nothing was acknowledged for too long: its replica may serve others

    @classmethod
    async def open(
        cls, info: ReplicaInfo, *, router_id: str, engine_version: str, tls: ssl.SSLContext | None = None
    ) -> "ReplicaConnection":
        """Connect and authenticate both ways.

        Raises:
            ReplicaLostError: nothing answers there within CONNECT_TIMEOUT_S, or it hangs up.
            ProtocolError: what answers is not this replica, or not of our version; or one of both sides is encrypted.
        """
        if info.encrypted != (tls is not None):
            ours, theirs = ("with", "without") if tls is not None else ("without", "with")
            raise ProtocolError(
                f"replica {info.replica_id} was started {theirs} RAY_USE_TLS, and this router {ours} it: set it alike "
                "on all nodes"
            )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    info.host, info.port, limit=wire.STREAM_LIMIT_BYTES, ssl=tls
                )
        except OSError as error:
            raise ReplicaLostError(f"replica {info.replica_id} at {info.host}:{info.port}: {error!r}") from error
        connection = cls(info, reader, writer)
        try:
            await connection._greet(router_id, engine_version)
        except (OSError, asyncio.IncompleteReadError) as error:
            connection.close()
            raise ReplicaLostError(f"replica {info.replica_id} hung up in the handshake") from error
        except BaseException:
            connection.close()
            raise
        return connection

    async def _greet(self, router_id: str, engine_version: str) -> None:
        wire.set_options(self._writer)
        await wire.greet_replica(
            self._reader,
            self._writer,
            secret=self.info.secret,
            router_id=router_id,
            replica_id=self.info.replica_id,
            engine_version=engine_version,
        )

    async def run(self, on_outputs: OnOutputs, on_blocks: OnBlocks) -> None:
        """Read until the replica goes away. Returns on a clean or broken end alike; both mean that it is lost.

        Raises:
            ProtocolError, msgspec.MsgspecError: the replica sent something malformed.
        """
        try:
            while True:
                frame = await wire.read_frame(self._reader)
                if frame.kind is wire.Kind.OUTPUTS:
                    await on_outputs(self, frame.parts)
                elif frame.kind is wire.Kind.CALL:
                    self._answer(frame)
                elif frame.kind is wire.Kind.BLOCKS:
                    on_blocks(self, msgspec.msgpack.decode(frame.parts[0], type=BlockChanges))
                elif frame.kind is not wire.Kind.PING:
                    raise ProtocolError(f"replica {self.info.replica_id} sent {frame.kind.name}")
        except (OSError, asyncio.IncompleteReadError) as error:
            self.fell_silent = isinstance(error, TimeoutError)
            return
        finally:
            self.close()

    def add(self, parts: Sequence[wire.Buffer]) -> None:
        wire.write_frame(self._writer, wire.Kind.ADD, parts)

    def abort(self, request_ids: Sequence[str]) -> None:
        wire.write_frame(self._writer, wire.Kind.ABORT, [msgspec.msgpack.encode(list(request_ids))])

    def ask_for_blocks(self) -> None:
        """All that its prefix cache holds."""
        wire.write_frame(self._writer, wire.Kind.BLOCKS, [])

    def ping(self) -> None:
        """As `wire.ping`."""
        wire.ping(self._writer)

    @property
    def is_closing(self) -> bool:
        """It has ended, or will within a moment."""
        return self._writer.transport.is_closing()

    async def call(self, method: str, argument: bytes = b"", *, timeout_s: float) -> Any:
        """Ask the replica, or its engine.

        Raises:
            EngineCallError: it refused; the message is its own.
            ReplicaLostError: no answer in time, or the connection ends.
        """
        if self.is_closing:  # no one may be left to read an answer, or its end
            raise ReplicaLostError(f"replica {self.info.replica_id} is gone, and cannot be asked {method}")
        self._asked += 1
        number = self._asked
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            wire.write_frame(
                self._writer, wire.Kind.CALL, [msgspec.msgpack.encode(wire.Call(number, method, argument))]
            )
            async with asyncio.timeout(timeout_s):
                return await answer
        except OSError as error:
            raise ReplicaLostError(f"replica {self.info.replica_id} does not answer {method}: {error!r}") from error
        finally:
            del self._questions[number]

    def _answer(self, frame: wire.Frame) -> None:
        reply = msgspec.msgpack.decode(frame.parts[0], type=wire.Reply)
        question = self._questions.get(reply.number)
        if question is None or question.done():
            return
        if reply.error:
            question.set_exception(EngineCallError(f"replica {self.info.replica_id}: {reply.error}"))
        else:
            question.set_result(msgspec.json.decode(reply.result))

    def close(self) -> None:
        """At once: a replica that hangs would never take what is still to be sent."""
        for question in self._questions.values():
            if not question.done():
                question.set_exception(ConnectionError("the connection ended"))
        with contextlib.suppress(RuntimeError):  # the loop may be closing under us
            self._writer.transport.abort()
