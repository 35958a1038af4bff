"""What stands between Sluice and its Redis in tests that part them, or make the way between them a bad one."""

import asyncio
import contextlib
import math
import random
import ssl
import time
from dataclasses import dataclass

from deployments.process.ports import free_port

LONGEST_STALL_S = 5.0


@dataclass(eq=False)
class _Carried:
    """One connection."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    stands_until_s: float = 0.0

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Gate:
    """A way to Redis that can be shut, and led to another one with the same password: connections that stand stay.

    Attributes:
        delay_s: for which what is sent is on its way, in each direction; any thread may set it.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        """Args:
        tls: for the way up to here; behind it goes on without.
        """
        self._tls = tls
        self._credentials = url.rpartition("@")[0]
        if tls is not None:
            self._credentials = self._credentials.replace("redis://", "rediss://", 1)
        self._path = url.rpartition("/")[2]
        self.lead_to(url)
        self._server: asyncio.Server | None = None
        self._carried: set[_Carried] = set()
        self.port, self.delay_s = free_port(), 0.0

    @property
    def url(self) -> str:
        return f"{self._credentials}@127.0.0.1:{self.port}/{self._path}"

    def lead_to(self, url: str) -> None:
        self._address = url.rpartition("@")[2].partition("/")[0]

    @property
    def is_open(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port, ssl=self._tls)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._address.partition(":")
        other_reader, other = await asyncio.open_connection(host, int(port))
        carried = _Carried((writer, other))
        self._carried.add(carried)
        await asyncio.gather(self._pass_on(reader, other, carried), self._pass_on(other_reader, writer, carried))
        self._carried.discard(carried)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carried: _Carried) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if carried.stands_until_s == math.inf:
                    continue
                delay_s = max(self.delay_s, carried.stands_until_s - time.monotonic())
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                writer.write(data)
        writer.close()

    async def lose_packets(self, share: float) -> None:
        """Until it is cancelled: every second this share of the connections, by chance, stands still for a while, as
        one does that sends again what was lost, or breaks."""
        chance = random.Random(1)
        while True:
            await asyncio.sleep(1.0)
            for carried in [each for each in self._carried if chance.random() < share]:
                if chance.random() < 0.25:
                    carried.cut()
                else:
                    carried.stands_until_s = time.monotonic() + chance.uniform(0.5, LONGEST_STALL_S)

    def fall_silent(self) -> None:
        """On every connection that stands, as when the host behind it has gone without a word; new ones may come."""
        for carried in self._carried:
            carried.stands_until_s = math.inf

    def cut(self) -> None:
        """Every connection; new ones may come."""
        for carried in self._carried:
            carried.cut()

    def shut(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._carried.clear()
