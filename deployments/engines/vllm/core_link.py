"""The relay's side of an engine process: starts it, and speaks vLLM's messages with it. Imports nothing of vLLM.

As vLLM's own client does: requests go out over one ZeroMQ socket, batches of outputs and the answers to calls come in
over another one, and a third one is there until the engine has loaded. The loop watches the descriptor itself:
through `zmq.asyncio` a message costs the relay nearly twice as much.
"""

import asyncio
import itertools
import logging
import multiprocessing
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from multiprocessing import connection
from typing import Any, Protocol

import msgspec
import ray
import zmq

from deployments.engines.vllm import core_process
from deployments.engines.vllm.core_process import RayPlace, Told
from deployments.engines.vllm.frames import FrameCodec, RelayedBatch
from policies.errors import ConfigError, EngineCallError, ReplicaLostError
from router.wire import Buffer

logger = logging.getLogger(__name__)

_ADD, _ABORT, _START_WAVE, _CALL = b"\x00", b"\x01", b"\x02", b"\x03"  # vLLM's EngineCoreRequestType
_ALL = -1  # a rank that there is not, where one may be left out
_DEAD = b"ENGINE_CORE_DEAD"
_END_S = 5.0  # before a process that was told to end is killed


class Ready(msgspec.Struct):
    """What this process reads of vLLM's EngineCoreReadyResponse: how the engine has loaded."""

    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Rank(msgspec.Struct, frozen=True):
    """Which one it is of a data-parallel engine, from 0; an engine alone is the only one of its own.

    Attributes:
        ports: of this host, free, by which the ranks find each other.
    """

    index: int = 0
    ports: tuple[int, ...] = ()

    @property
    def name(self) -> bytes:
        """In vLLM's messages."""
        return self.index.to_bytes(2, "little")

    def parallel_config(self) -> dict[str, Any]:
        """What vLLM's is told at the handshake."""
        if not self.ports:
            return {}
        first, *others = self.ports
        return {
            "data_parallel_master_ip": "127.0.0.1",
            "data_parallel_master_port": first,
            "_data_parallel_master_port_list": others,
        }


ALONE = Rank()


class Group(Protocol):
    """Of the ranks of one replica; see `deployments.engines.vllm.ranks`."""

    def added(self, link: "CoreLink") -> None: ...

    def rest(self, wave: int) -> None: ...

    def died(self) -> None: ...


def _ray_place() -> RayPlace | None:
    """Where this replica runs; None outside of Ray."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return None
    placed = context.runtime_env, ray.util.get_current_placement_group()
    return RayPlace(context.gcs_address, pickle.dumps(placed))


def _end(process: Any) -> None:
    process.terminate()
    process.join(_END_S)
    process.kill()
    process.join()


class CoreLink:
    """An engine process and what is said to it.

    Attributes:
        group: of the other ranks of its replica; None where it is alone.
    """

    def __init__(self, argv: Sequence[str], rank: Rank = ALONE) -> None:
        """Starts it and blocks until it has loaded: run it in a thread.

        Raises:
            ConfigError: the arguments are wrong, or the model does not generate text.
            RuntimeError: it ended; its last words stand in this process's log.
        """
        self.codec = FrameCodec()
        self.dead = False
        self.group: Group | None = None
        self._rank = rank
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._batches = asyncio.Queue[RelayedBatch | None]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-engine-")
        self._context = zmq.Context()
        self._input = self._bound(zmq.ROUTER, "input")
        self._output = self._bound(zmq.PULL, "output")
        self._output_fd = int(self._output.get(zmq.FD))
        hears, tells = multiprocessing.Pipe(duplex=False)
        handshake = f"ipc://{self._folder.name}/handshake"
        self._process = multiprocessing.get_context("spawn").Process(
            target=core_process.run, args=(list(argv), handshake, tells, _ray_place(), rank.index), name="EngineCore"
        )
        try:
            with zmq.Socket(self._context, zmq.ROUTER) as socket, hears:
                socket.bind(handshake)
                self._process.start()
                tells.close()
                self._end = weakref.finalize(self, _end, self._process)
                self.told = self._heard(hears)
                self.ready = self._shaken_hands(socket)
        except BaseException:
            self.shutdown()
            raise

    def _bound(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)  # slots bound what waits; a full one would drop requests without a word
        socket.bind(f"ipc://{self._folder.name}/{name}")
        return socket

    # Until it has loaded

    def _heard(self, hears: connection.Connection) -> Told:
        """Raises as the constructor."""
        try:
            told = msgspec.msgpack.decode(hears.recv_bytes(), type=Told)
        except EOFError as error:
            raise RuntimeError("the engine process has ended, see above") from error
        if told.refused is not None:
            raise ConfigError(told.refused)
        return told

    def _shaken_hands(self, handshake: zmq.Socket[bytes]) -> Ready:
        """It says hello and is told where to listen; when it is ready, it says how it has loaded."""
        addresses = {"inputs": [f"ipc://{self._folder.name}/input"], "outputs": [f"ipc://{self._folder.name}/output"]}
        engine, _ = self._received(handshake)
        told = {"addresses": addresses, "parallel_config": self._rank.parallel_config()}
        handshake.send_multipart([engine, msgspec.msgpack.encode(told)])
        _, ready = self._received(self._input)
        self._received(handshake)
        return msgspec.msgpack.decode(ready, type=Ready)

    def _received(self, socket: zmq.Socket[bytes]) -> list[bytes]:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._process.sentinel, zmq.POLLIN)
        if socket not in dict(poller.poll()):
            raise RuntimeError("the engine process has ended, see above")
        return socket.recv_multipart()

    # Once it has loaded

    def add(self, parts: Sequence[Buffer]) -> None:
        """Raises ReplicaLostError when it has died."""
        self._send(_ADD, parts)
        if self.group is not None:
            self.group.added(self)

    def start_wave(self, wave: int) -> None:
        """Other ranks have requests: it joins their steps."""
        if not self.dead:
            self._send(_START_WAVE, [msgspec.msgpack.encode((wave, _ALL))])

    def abort(self, request_ids: Sequence[str]) -> None:
        if not self.dead:
            self._send(_ABORT, [msgspec.msgpack.encode(request_ids)])

    async def call(self, method: str, *arguments: Any) -> Any:
        """A method of the engine core between two steps.

        Raises:
            EngineCallError: with the engine's words.
            ReplicaLostError: it has died.
        """
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_CALL, [msgspec.msgpack.encode((0, number, method, arguments))])
            return await answer
        finally:
            del self._calls[number]

    async def next_batch(self) -> RelayedBatch:
        """Raises ReplicaLostError when it has died."""
        self._listen()
        batch = await self._batches.get()
        if batch is None:
            self._batches.put_nowait(None)
            raise ReplicaLostError("the engine core has died")
        return batch

    def _send(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        self._listen()
        if self.dead:
            raise ReplicaLostError("the engine core has died")
        self._input.send_multipart([self._rank.name, kind, *parts], copy=False)

    def _listen(self) -> None:
        if self._loop is None and not self.dead:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._process.sentinel, self.died)
            self._loop.add_reader(self._output_fd, self._read)
            self._read()

    def _read(self) -> None:
        """All that is there: the descriptor tells only that something has come since it was last read."""
        try:
            while not self.dead:
                frames = self._output.recv_multipart(zmq.NOBLOCK)
                if frames[0] == _DEAD:
                    self.died()
                else:
                    self._take(self.codec.decode_batch(frames))
        except zmq.Again:
            return
        except Exception:  # of any kind: a message that this relay can't read is an engine that it can't serve
            logger.exception("reading what the engine core sent failed")
            self.died()

    def _take(self, batch: RelayedBatch) -> None:
        if batch.outputs:
            self._batches.put_nowait(batch)
        if batch.fields.wave_complete is not None and self.group is not None:
            self.group.rest(batch.fields.wave_complete)
        answer = batch.fields.utility_output
        if answer is None or (waits := self._calls.get(answer.call_id)) is None or waits.done():
            return
        if answer.failure_message is not None:
            waits.set_exception(EngineCallError(answer.failure_message))
        else:
            waits.set_result(None if answer.result is None else answer.result[1])

    def died(self) -> None:
        """The process has ended, or its engine has, or that of another rank."""
        if self.dead:
            return
        self.dead = True
        if self._loop is not None:
            self._loop.remove_reader(self._process.sentinel)
            self._loop.remove_reader(self._output_fd)
        if self.group is not None:
            self.group.died()
        self._batches.put_nowait(None)
        for waits in self._calls.values():
            if not waits.done():
                waits.set_exception(ReplicaLostError("the engine core has died"))

    def shutdown(self) -> None:
        """Blocks until its process has ended."""
        if self._process.pid is not None:
            self._end()
        if self._loop is None or self._loop.is_closed():
            self._close()
        else:
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        if self._loop is None or not self._loop.is_closed():
            self.died()
        self._context.destroy(linger=0)
        self._folder.cleanup()
