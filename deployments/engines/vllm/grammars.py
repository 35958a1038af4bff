"""Schemas, regular expressions and grammars compile here first, out of the way: an engine gets only what compiled
within the limit, so no client's grammar holds up another's, and none that cannot be used is queued.

The process that compiles (`grammar_child`) starts with the first grammar: it needs the memory of a router.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import pickle
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from policies.errors import InputError, ReplicaLostError, SluiceError
from policies.live import Live
from router.background import BackgroundTasks
from router.timing import current

logger = logging.getLogger(__name__)

CHILD = "deployments.engines.vllm.grammar_child"  # what the process runs
LENGTH = struct.Struct("<I")  # before every frame
MAX_AT_ONCE = 4  # compilations: each may take a core and gigabytes of the router's machine
MAX_OF_A_KEY = 3  # of those, so that one API key's slow grammars leave room for others'
MAX_KNOWN = 1024  # grammars that are not compiled again
START_TIMEOUT_S = 120.0  # importing vLLM and reading the tokenizer takes seconds, on a busy machine a minute
CLOCK_PER_CPU = 4  # on a busy machine a compilation has less than a core: it is killed after its limit times this
MARGIN_S = 5.0  # for the process to answer that it has killed one


class Asked(msgspec.Struct):
    """`fields` are those of vLLM's StructuredOutputsParams."""

    number: int
    fields: dict[str, Any]
    timeout_s: float


class Compiled(msgspec.Struct):
    """What vLLM's checks made of the fields, or why they refuse them; is_ours says that no grammar would do."""

    number: int = 0
    error: str | None = None
    is_ours: bool = False
    backend: str | None = None
    was_auto: bool = False
    choice: list[str] | None = None
    grammar: str | None = None


class Grammars:
    """Compiles the grammars of one model's front end."""

    def __init__(self, config: Any, timeout_s: Live[float], background: BackgroundTasks) -> None:
        """Args:
        config: vLLM's, for its tokenizer and the backend that is set.
        timeout_s: the longest that one may take, in seconds of a core.
        """
        self._config, self._timeout_s, self._background = config, timeout_s, background
        self._known: OrderedDict[bytes, Compiled] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[Compiled]] = {}
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._of_keys: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._process: asyncio.Task[_Process] | None = None

    async def compiled(self, fields: Mapping[str, Any]) -> Compiled:
        """Raises:
        InputError: it does not compile, not within the time, or vLLM refuses it.
        ReplicaLostError: the process that compiles has ended, or the others' grammars leave it no time.
        SluiceError: the backend that is set is not installed as it must be.
        """
        key = hashlib.sha256(msgspec.msgpack.encode(fields)).digest()
        found = self._known.get(key) or await self._made(key, fields)
        if found.error is not None and found.is_ours:
            raise SluiceError(f"no structured output: {found.error}")
        if found.error is not None:
            raise InputError(f"structured output: {found.error}")
        return found

    async def _made(self, key: bytes, fields: Mapping[str, Any]) -> Compiled:
        """Requests for the same grammar wait for the same compilation."""
        making = self._compiling.get(key)
        if making is None:
            making = self._compiling[key] = asyncio.create_task(self._make(key, fields))
            making.add_done_callback(lambda made: self._note_made(key, made))
        return await asyncio.shield(making)

    def _note_made(self, key: bytes, made: "asyncio.Task[Compiled]") -> None:
        """What it raised is told to those who wait for it, and there may be nobody left."""
        del self._compiling[key]
        if not made.cancelled():
            made.exception()

    async def _make(self, key: bytes, fields: Mapping[str, Any]) -> Compiled:
        process, timeout_s = await self._started(), self._timeout_s.now
        patience_s = 2 * CLOCK_PER_CPU * timeout_s + MARGIN_S
        try:
            async with asyncio.timeout(patience_s), self._turn_of_key(), self._room:
                made = await process.compile(fields, timeout_s)
        except TimeoutError as error:
            raise ReplicaLostError(f"other grammars compile for {patience_s:g} s already: try again later") from error
        if made.error is None:  # else the machine may have been too busy
            self._known[key] = made
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return made

    def _turn_of_key(self) -> AbstractAsyncContextManager[object]:
        """Of the API key for whose request this is made."""
        context = current.get()
        if context is None or context.tenant is None:
            return contextlib.nullcontext()
        name = context.tenant.name
        turns = self._of_keys.get(name) or asyncio.Semaphore(MAX_OF_A_KEY)
        self._of_keys[name] = turns
        return turns

    async def _started(self) -> "_Process":
        """The process; another one where it has ended."""
        if self._process is None or (self._process.done() and self._has_ended(self._process)):
            self._process = asyncio.create_task(_Process.start(self._config, self._background))
        return await asyncio.shield(self._process)

    @staticmethod
    def _has_ended(starting: "asyncio.Task[_Process]") -> bool:
        return starting.cancelled() or starting.exception() is not None or starting.result().has_ended

    async def close(self) -> None:
        tasks = [*self._compiling.values(), *([self._process] if self._process else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None and not self._has_ended(self._process):
            await self._process.result().close()


class _Process:
    """The child, over a socket of its own."""

    def __init__(
        self, child: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._child, self._reader, self._writer = child, reader, writer
        self._waiting: dict[int, asyncio.Future[Compiled]] = {}
        self._number = 0
        self.has_ended = False

    @classmethod
    async def start(cls, config: Any, background: BackgroundTasks) -> "_Process":
        """Raises ReplicaLostError when it does not come up."""
        ours, its = socket.socketpair()
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with its:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                CHILD,
                str(its.fileno()),
                pass_fds=[its.fileno()],
                env=env,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        process = cls(child, reader, writer)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                process._send(await asyncio.to_thread(pickle.dumps, config))
                await process._receive()  # that it is ready
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            await process.close()
            raise ReplicaLostError(f"the process that compiles grammars did not start: {error!r}") from error
        except BaseException:
            await process.close()
            raise
        background.spawn(process._read(), "grammars")
        return process

    async def compile(self, fields: Mapping[str, Any], timeout_s: float) -> Compiled:
        """Raises ReplicaLostError when the process ends."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(msgspec.msgpack.encode(Asked(number, dict(fields), timeout_s)))
            async with asyncio.timeout(CLOCK_PER_CPU * timeout_s + MARGIN_S):
                return await answer
        finally:
            self._waiting.pop(number, None)

    def _send(self, frame: bytes) -> None:
        self._writer.write(LENGTH.pack(len(frame)) + frame)

    async def _receive(self) -> bytes:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    async def _read(self) -> None:
        try:
            while True:
                compiled = msgspec.msgpack.decode(await self._receive(), type=Compiled)
                if (answer := self._waiting.get(compiled.number)) is not None and not answer.done():
                    answer.set_result(compiled)
        except (OSError, asyncio.IncompleteReadError):
            if not self.has_ended:
                logger.error("the process that compiles grammars has ended; the next grammar starts another")
        finally:
            await self.close()

    async def close(self) -> None:
        self.has_ended = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ReplicaLostError("the process that compiles grammars has ended: try again"))
        self._writer.close()
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
        await self._child.wait()
