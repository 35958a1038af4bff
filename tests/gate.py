"""What stands between Sluice and its Redis in tests that part them."""

import asyncio
import contextlib

from deployments.process.ports import free_port


class Gate:
    """A way to Redis that can be shut, and led to another one with the same password: connections that stand stay."""

    def __init__(self, url: str) -> None:
        self._credentials = url.rpartition("@")[0]
        self._path = url.rpartition("/")[2]
        self.lead_to(url)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"{self._credentials}@127.0.0.1:{self.port}/{self._path}"

    def lead_to(self, url: str) -> None:
        self._address = url.rpartition("@")[2].partition("/")[0]

    @property
    def is_open(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._address.partition(":")
        other_reader, other = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, other}
        await asyncio.gather(self._pass_on(reader, other), self._pass_on(other_reader, writer))

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    def shut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
