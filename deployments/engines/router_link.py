"""A relay's end of its connections to routers: frames out, and what the engine's prefix cache holds."""

import asyncio
import logging
from collections.abc import Iterable, Sequence

import msgspec

from deployments.engines.base import Engine
from policies.errors import ProtocolError
from router import wire
from router.cached_blocks import BlockSet
from router.wire import Buffer

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 64 << 20  # a router that reads nothing while this much waits for it is taken for dead
MAX_UNSENT_BEFORE_BLOCKS = 1 << 20


class RouterLink:
    """One router's connection.

    Attributes:
        request_ids: the requests in the engine that came over it.
        knows_blocks: it was told all that the prefix cache was reported to hold.
    """

    def __init__(self, router_id: str, writer: asyncio.StreamWriter) -> None:
        self.router_id = router_id
        self.writer = writer
        self.request_ids: set[str] = set()
        self.knows_blocks = False

    @property
    def lags(self) -> bool:
        """More waits to be sent than what can be told later should come on top of."""
        return self.writer.transport.get_write_buffer_size() > MAX_UNSENT_BEFORE_BLOCKS

    def send(self, kind: wire.Kind, parts: Sequence[Buffer]) -> None:
        """A router that cannot be sent to is hung up on: one bad frame or reader must not stop the others' tokens."""
        try:
            if self.writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                raise ProtocolError(f"it left {MAX_UNSENT_BYTES} bytes unread")
            wire.write_frame(self.writer, kind, parts)
        except ProtocolError as error:
            logger.error("hanging up on router %s: %s", self.router_id, error)
            self.writer.transport.abort()


class BlockReports:
    """Tells routers what the engine's prefix cache holds.

    Attributes:
        due: set when the cache may have changed, or a router lacks something.
    """

    def __init__(self, engine: Engine) -> None:
        self.due = asyncio.Event()
        self._engine, self._blocks = engine, BlockSet()

    @property
    def sequence(self) -> int | None:
        """Number of the last change that was reported; None before the first."""
        return self._blocks.sequence

    async def report(self, links: Iterable[RouterLink]) -> None:
        """To every router what has changed; all of it to those that lack something, except while they lag."""
        self.due.clear()
        changes = await self._engine.cached_blocks(self._blocks.sequence)
        if changes is None:
            return
        is_news = changes.is_news or changes.tiers != self._blocks.tiers
        self._blocks.apply(changes)
        for link in links:
            link.knows_blocks &= changes.since is not None and not link.lags
            if link.lags:
                self.due.set()
                continue
            for piece in [changes] if link.knows_blocks else self._blocks.whole():
                if piece.is_news or is_news:
                    link.send(wire.Kind.BLOCKS, [msgspec.msgpack.encode(piece)])
            link.knows_blocks = True
