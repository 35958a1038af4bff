"""Frames and the handshake, over real sockets."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ProtocolError
from router import wire
from router.wire import Kind, accept_router, greet_replica, pack, read_frame, unpack

pytestmark = pytest.mark.timeout(120)

SECRET = b"s" * 32
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def joined(kind: Kind, parts: list[wire.Buffer]) -> bytes:
    return b"".join(bytes(buffer) for buffer in pack(kind, parts))


@given(kind=st.sampled_from(Kind), parts=st.lists(st.binary(max_size=300), max_size=300))
def test_a_frame_comes_back_as_it_was_packed(kind: Kind, parts: list[wire.Buffer]) -> None:
    data = joined(kind, parts)
    assert struct.unpack_from("<I", data)[0] == len(data) - 4
    frame = unpack(memoryview(data)[4:])
    assert (frame.kind, [bytes(part) for part in frame.parts]) == (kind, parts)


def test_a_view_of_wide_items_counts_its_bytes() -> None:
    numbers = memoryview(struct.pack("<4q", 1, 2, 3, 4)).cast("q")
    frame = unpack(memoryview(joined(Kind.ADD, [numbers, b"x"]))[4:])
    assert [bytes(part) for part in frame.parts] == [numbers.tobytes(), b"x"]


@given(body=st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_refused(body: bytes) -> None:
    try:
        frame = unpack(memoryview(body))
    except ProtocolError:
        return
    assert joined(frame.kind, list(frame.parts))[4:] == body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x03",
        struct.pack("<BI", 200, 0),
        struct.pack("<BI", 3, 1),
        struct.pack("<BII", 3, 1, 5) + b"four",
        struct.pack("<BII", 3, 1, 3) + b"four",
        struct.pack("<BI", 3, 0xFFFFFFFF),
    ],
    ids=["empty", "cut in its head", "unknown kind", "cut in its lengths", "part too short", "left over", "endless"],
)
def test_a_malformed_frame_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(memoryview(body))


def test_a_frame_beyond_the_limit_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError, match="exceeds 100"):
        pack(Kind.ADD, [b"x" * 100])


async def test_a_frame_beyond_the_limit_is_not_read() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(ProtocolError, match="limit"):
        await read_frame(reader)


async def test_a_frame_arrives_however_it_is_cut() -> None:
    reader = asyncio.StreamReader()
    for byte in joined(Kind.ABORT, [b"one", b"", b"two"]):
        reader.feed_data(bytes([byte]))
    frame = await read_frame(reader)
    assert (frame.kind, [bytes(part) for part in frame.parts]) == (Kind.ABORT, [b"one", b"", b"two"])


async def test_a_frame_that_breaks_off_is_no_frame() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(joined(Kind.ABORT, [b"one"])[:-1])
    reader.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await read_frame(reader)


# The handshake


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Pair, Pair]]:
    """The two ends of a TCP connection: the replica's and the router's."""
    accepted: asyncio.Queue[Pair] = asyncio.Queue()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accepted.put((reader, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    router = await asyncio.open_connection(*server.sockets[0].getsockname())
    replica = await accepted.get()
    yield replica, router
    for _, writer in (replica, router):
        writer.close()
    server.close()


def accept(end: Pair, secret: bytes = SECRET, replica_id: str = "r", version: str = "v1") -> Coroutine[Any, Any, str]:
    return accept_router(*end, secret=secret, replica_id=replica_id, engine_version=version)


def greet(end: Pair, secret: bytes = SECRET, replica_id: str = "r", version: str = "v1") -> Awaitable[None]:
    return greet_replica(*end, secret=secret, router_id="a", replica_id=replica_id, engine_version=version)


async def shake(ends: tuple[Pair, Pair], accepting: Awaitable[Any], greeting: Awaitable[Any]) -> list[Any]:
    """Both sides to their ends; a side that fails hangs up, as its owner does."""

    async def side(work: Awaitable[Any], writer: asyncio.StreamWriter) -> Any:
        try:
            return await work
        except (ProtocolError, OSError, asyncio.IncompleteReadError) as error:
            writer.close()
            return error

    return list(await asyncio.gather(side(accepting, ends[0][1]), side(greeting, ends[1][1])))


async def test_a_peer_whose_machine_is_gone_is_found_out(ends: tuple[Pair, Pair]) -> None:
    for _, writer in ends:
        wire.set_options(writer)
        sock = writer.get_extra_info("socket")
        idle_s, interval_s, probes, unacknowledged_ms = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle_s + probes * interval_s == unacknowledged_ms / 1000 == wire.PEER_TIMEOUT_S


async def test_both_sides_agree(ends: tuple[Pair, Pair]) -> None:
    assert await shake(ends, accept(ends[0]), greet(ends[1])) == ["a", None]


async def test_a_router_with_another_secret_is_refused(ends: tuple[Pair, Pair]) -> None:
    refused, _ = await shake(ends, accept(ends[0]), greet(ends[1], secret=b"other"))
    assert isinstance(refused, ProtocolError)
    assert "secret" in str(refused)


async def test_a_replica_that_does_not_know_the_secret_is_refused(ends: tuple[Pair, Pair]) -> None:
    """It lets every client in, and so learns a router's proof; its own it cannot give."""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = wire.Hello(wire.PROTOCOL, "v1", "r", b"n" * 32)
        wire.write_frame(writer, Kind.HELLO, [msgspec.msgpack.encode(hello)])
        auth = msgspec.msgpack.decode((await read_frame(reader)).parts[0], type=wire.Auth)
        wire.write_frame(writer, Kind.WELCOME, [msgspec.msgpack.encode(wire.Welcome(auth.mac))])

    _, refused = await shake(ends, impostor(*ends[0]), greet(ends[1]))
    assert isinstance(refused, ProtocolError)
    assert "authenticate" in str(refused)


async def test_another_engine_version_is_refused_before_anything_is_proved(ends: tuple[Pair, Pair]) -> None:
    gone, refused = await shake(ends, accept(ends[0], version="v2"), greet(ends[1]))
    assert isinstance(refused, ProtocolError)
    assert "v2" in str(refused) and "v1" in str(refused)
    assert isinstance(gone, (asyncio.IncompleteReadError, OSError))


async def test_another_replica_at_the_address_is_refused(ends: tuple[Pair, Pair]) -> None:
    _, refused = await shake(ends, accept(ends[0], replica_id="q"), greet(ends[1]))
    assert isinstance(refused, ProtocolError)
    assert "q answers at the address of r" in str(refused)


async def test_a_recorded_handshake_opens_nothing(ends: tuple[Pair, Pair]) -> None:
    replica, (reader, writer) = ends
    first = asyncio.create_task(accept(replica))
    hello = msgspec.msgpack.decode((await read_frame(reader)).parts[0], type=wire.Hello)
    mac = wire._mac(SECRET, b"router", hello.nonce, b"n" * 32, b"a")
    recorded = joined(Kind.AUTH, [msgspec.msgpack.encode(wire.Auth("a", b"n" * 32, mac))])
    writer.write(recorded)
    assert await first == "a"
    await read_frame(reader)
    second = asyncio.create_task(accept(replica))
    await read_frame(reader)
    writer.write(recorded)
    with pytest.raises(ProtocolError, match="secret"):
        await second


async def test_a_proof_for_one_router_does_not_serve_another(ends: tuple[Pair, Pair]) -> None:
    replica, (reader, writer) = ends
    accepting = asyncio.create_task(accept(replica))
    hello = msgspec.msgpack.decode((await read_frame(reader)).parts[0], type=wire.Hello)
    mac = wire._mac(SECRET, b"router", hello.nonce, b"n" * 32, b"a")
    wire.write_frame(writer, Kind.AUTH, [msgspec.msgpack.encode(wire.Auth("b", b"n" * 32, mac))])
    with pytest.raises(ProtocolError, match="secret"):
        await accepting


@pytest.mark.parametrize("side", [accept, greet], ids=["the router", "the replica"])
async def test_silence_ends_the_handshake(
    ends: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch, side: Callable[[Pair], Awaitable[object]]
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_TIMEOUT_S", 0.05)
    with pytest.raises(ProtocolError, match="within"):
        await side(ends[side is greet])


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Kind.ADD, [b""]),
        (Kind.AUTH, []),
        (Kind.AUTH, [b"", b""]),
        (Kind.AUTH, [b"not msgpack"]),
        (Kind.AUTH, [msgspec.msgpack.encode({"router_id": "a"})]),
        (Kind.AUTH, [b"x" * wire.MAX_HANDSHAKE_BYTES]),
    ],
    ids=["another kind", "no part", "two parts", "not msgpack", "a field missing", "too long"],
)
async def test_anything_but_a_proof_is_refused(ends: tuple[Pair, Pair], kind: Kind, parts: list[wire.Buffer]) -> None:
    replica, (_, writer) = ends
    wire.write_frame(writer, kind, parts)
    with pytest.raises(ProtocolError):
        await accept(replica)
