"""Frames between a router and an engine replica, and the handshake that opens a connection.

One frame, little endian:

    | total u32 | kind u8 | parts u32 | length u32 x parts | part bytes ... |

``total`` counts every byte after itself. A message of the engine's own codec may span several parts (its tensors travel
as parts of their own), so a frame carries parts rather than one blob. Nothing here is ever unpickled.

Handshake: both sides prove that they know the shared secret without sending it, and the nonces make a recorded
handshake useless. A protocol or engine version that differs is refused at once, because the parts are the engine's
own structures.

    replica -> router   HELLO    {protocol, engine_version, replica_id, nonce}
    router  -> replica  AUTH     {router_id, nonce, mac}      mac over the replica's nonce
    replica -> router   WELCOME  {mac}                        mac over the router's nonce
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import msgspec

from policies.errors import ProtocolError

PROTOCOL = 5
MAX_FRAME_BYTES = 256 << 20  # a multimodal prompt's tensors travel in one frame
STREAM_LIMIT_BYTES = 16 << 20  # that either end reads ahead
MAX_HANDSHAKE_BYTES = 4096
HANDSHAKE_TIMEOUT_S = 10.0
PEER_TIMEOUT_S = 10  # whole seconds, as the kernel takes them
PING_S = 4.0  # with it a silent peer is noticed within 15 s, whatever is under way

_TOTAL = struct.Struct("<I")
_HEAD = struct.Struct("<BI")

T = TypeVar("T", bound=msgspec.Struct)
Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame carries."""

    HELLO = 0
    AUTH = 1
    WELCOME = 2
    ADD = 3
    """router -> replica: start a request; parts of the engine's codec."""
    ABORT = 4
    """router -> replica: stop requests; one part, a msgpack list of request ids."""
    OUTPUTS = 5
    """replica -> router: what one engine step produced for this router; parts of the engine's codec."""
    CALL = 6
    """router -> replica: what to call, a msgpack `Call`; and back: its `Reply`."""
    BLOCKS = 7
    """replica -> router: what its prefix cache holds, at first all of it; one part, a msgpack
    `router.cached_blocks.BlockChanges`. router -> replica, without parts: tell all of it again."""
    PING = 8
    """either way, without parts: nothing, but the kernel of the peer's machine has to acknowledge it."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of the connection, as it was read.

    Attributes:
        kind: what it carries.
        parts: the payload; views into the bytes that were read.
    """

    kind: Kind
    parts: Sequence[Buffer]


class Hello(msgspec.Struct):
    """A replica opens a connection.

    Attributes:
        protocol: PROTOCOL of the replica; another one is refused.
        engine_version: version of the engine whose codec the parts are in; another one is refused.
        replica_id: which replica it is.
        nonce: random bytes that the router signs.
    """

    protocol: int
    engine_version: str
    replica_id: str
    nonce: bytes


class Auth(msgspec.Struct):
    """A router proves that it knows the secret.

    Attributes:
        router_id: which router it is.
        nonce: random bytes that the replica signs.
        mac: HMAC-SHA256 over the replica's nonce.
    """

    router_id: str
    nonce: bytes
    mac: bytes


class Welcome(msgspec.Struct):
    """The replica proves that it knows the secret; the connection is open.

    Attributes:
        mac: HMAC-SHA256 over the router's nonce.
    """

    mac: bytes


class Call(msgspec.Struct):
    """A router calls a method of a replica.

    Attributes:
        number: repeated in the reply.
        method: `recall` stops requests like ABORT, but leaves it to the router to free their slots, and no output of
            theirs follows the reply. `status` asks what the engine says of itself.
        argument: of `recall` a msgpack list of request ids.
    """

    number: int
    method: str
    argument: bytes = b""


class Reply(msgspec.Struct):
    """The answer to a call.

    Attributes:
        number: that of the call.
        result: JSON.
        error: why the engine refused; empty where it did not.
    """

    number: int
    result: bytes = b""
    error: str = ""


def pack(kind: Kind, parts: Sequence[Buffer]) -> list[Buffer]:
    """The buffers to write for one frame; parts are not copied.

    Raises:
        ProtocolError: the frame exceeds MAX_FRAME_BYTES.
    """
    lengths = [part.nbytes if isinstance(part, memoryview) else len(part) for part in parts]
    total = _HEAD.size + 4 * len(parts) + sum(lengths)
    if total > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {total} bytes exceeds {MAX_FRAME_BYTES}")
    head = _TOTAL.pack(total) + _HEAD.pack(kind, len(parts)) + struct.pack(f"<{len(parts)}I", *lengths)
    return [head, *parts]


def unpack(body: memoryview) -> Frame:
    """A frame from its bytes after ``total``; the parts are views into ``body``.

    Raises:
        ProtocolError: the lengths do not add up or the kind is unknown.
    """
    try:
        kind, count = _HEAD.unpack_from(body)
        lengths = struct.unpack_from(f"<{count}I", body, _HEAD.size)
        frame_kind = Kind(kind)
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"malformed frame of {len(body)} bytes: {error}") from error
    offset = _HEAD.size + 4 * count
    if offset + sum(lengths) != len(body):
        raise ProtocolError(f"frame parts add up to {offset + sum(lengths)} bytes, the frame has {len(body)}")
    parts = []
    for length in lengths:
        parts.append(body[offset : offset + length])
        offset += length
    return Frame(frame_kind, parts)


async def read_frame(reader: asyncio.StreamReader, limit_bytes: int = MAX_FRAME_BYTES) -> Frame:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the peer went away.
        ProtocolError: the frame is malformed or longer than limit_bytes.
    """
    (total,) = _TOTAL.unpack(await reader.readexactly(_TOTAL.size))
    if total > limit_bytes:
        raise ProtocolError(f"peer announced a frame of {total} bytes, the limit is {limit_bytes}")
    return unpack(memoryview(await reader.readexactly(total)))


def write_frame(writer: asyncio.StreamWriter, kind: Kind, parts: Sequence[Buffer]) -> None:
    """Write one frame. To a dead connection nothing is written: its reader notices soon.

    asyncio's own loop drops such a write. uvloop, on which Ray runs, would raise a RuntimeError.

    Raises:
        ProtocolError: the frame exceeds MAX_FRAME_BYTES.
    """
    buffers = pack(kind, parts)
    if not writer.transport.is_closing():
        writer.writelines(buffers)


def ping(writer: asyncio.StreamWriter) -> None:
    """To be called every PING_S: then something is under way soon after a peer has fallen silent, and what is not
    acknowledged within PEER_TIMEOUT_S ends the connection.

    Keepalive alone asks nothing while data is under way, and a write begins the kernel's count anew that follows after
    some seconds of silence. No answer is read: a process that stands still on a machine that lives is no dead peer.
    """
    if not writer.transport.get_write_buffer_size():  # else more than a ping waits to be acknowledged
        write_frame(writer, Kind.PING, [])


def set_options(writer: asyncio.StreamWriter) -> None:
    """Send every step's tokens at once, and notice a lost peer.

    Nagle's algorithm would hold tokens back until the last ones are acknowledged. A peer that has vanished, or has read
    nothing while its buffers are full, ends the connection within PEER_TIMEOUT_S of the last `ping`.
    """
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes, interval_s = 3, PEER_TIMEOUT_S // 5
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, PEER_TIMEOUT_S - probes * interval_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, 1000 * PEER_TIMEOUT_S),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _mac(secret: bytes, role: bytes, *fields: bytes) -> bytes:
    message = b"".join(len(field).to_bytes(4, "little") + field for field in (role, *fields))
    return hmac.new(secret, message, hashlib.sha256).digest()


async def _expect(reader: asyncio.StreamReader, kind: Kind, payload: type[T]) -> T:
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            frame = await read_frame(reader, MAX_HANDSHAKE_BYTES)
    except TimeoutError as error:
        raise ProtocolError(f"no {kind.name} within {HANDSHAKE_TIMEOUT_S} s of the handshake") from error
    if frame.kind != kind or len(frame.parts) != 1:
        raise ProtocolError(f"expected {kind.name} in the handshake, got {frame.kind.name}")
    try:
        return msgspec.msgpack.decode(frame.parts[0], type=payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed {kind.name}: {error}") from error


def _send(writer: asyncio.StreamWriter, kind: Kind, payload: msgspec.Struct) -> None:
    write_frame(writer, kind, [msgspec.msgpack.encode(payload)])


async def accept_router(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    secret: bytes,
    replica_id: str,
    engine_version: str,
) -> str:
    """The replica's side of the handshake; returns the router's id.

    Raises:
        ProtocolError: wrong secret, wrong message or no answer within HANDSHAKE_TIMEOUT_S.
    """
    nonce = secrets.token_bytes(32)
    _send(writer, Kind.HELLO, Hello(PROTOCOL, engine_version, replica_id, nonce))
    auth = await _expect(reader, Kind.AUTH, Auth)
    if not hmac.compare_digest(auth.mac, _mac(secret, b"router", nonce, auth.nonce, auth.router_id.encode())):
        raise ProtocolError("a router failed to authenticate: its shared secret differs")
    _send(writer, Kind.WELCOME, Welcome(_mac(secret, b"replica", auth.nonce, nonce, replica_id.encode())))
    return auth.router_id


async def greet_replica(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    secret: bytes,
    router_id: str,
    replica_id: str,
    engine_version: str,
) -> None:
    """The router's side of the handshake.

    Raises:
        ProtocolError: another replica answers there, versions differ, wrong secret, or no answer in time.
    """
    hello = await _expect(reader, Kind.HELLO, Hello)
    if (hello.protocol, hello.engine_version) != (PROTOCOL, engine_version):
        raise ProtocolError(
            f"replica {replica_id} speaks protocol {hello.protocol} of engine {hello.engine_version}, "
            f"this router {PROTOCOL} of {engine_version}: routers and replicas must run one version"
        )
    if hello.replica_id != replica_id:
        raise ProtocolError(f"replica {hello.replica_id} answers at the address of {replica_id}")
    nonce = secrets.token_bytes(32)
    _send(writer, Kind.AUTH, Auth(router_id, nonce, _mac(secret, b"router", hello.nonce, nonce, router_id.encode())))
    welcome = await _expect(reader, Kind.WELCOME, Welcome)
    if not hmac.compare_digest(welcome.mac, _mac(secret, b"replica", nonce, hello.nonce, replica_id.encode())):
        raise ProtocolError(f"replica {replica_id} failed to authenticate: its shared secret differs")
