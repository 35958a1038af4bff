"""The tokens of all requests on their way from the replicas' connections to the front end."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

from router.cached_blocks import BlockChanges
from router.clock import Clock
from router.codec import EngineCodec, Output
from router.connection import ReplicaConnection
from router.connections import Connections
from router.endings import Endings
from router.ledger import Entry, Ledger
from router.prompt_caches import PromptCaches
from router.recovery import Recovery
from router.wire import Buffer

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")


class Outputs(Generic[RequestT, OutputsT]):
    """Reads every connection; what comes in one frame is one batch of `outputs`."""

    def __init__(
        self,
        *,
        codec: EngineCodec[RequestT, OutputsT],
        outputs: "asyncio.Queue[OutputsT]",
        clock: Clock,
        ledger: Ledger[RequestT],
        caches: PromptCaches[RequestT],
        connections: Connections,
        recovery: Recovery[RequestT],
        endings: Endings[RequestT, OutputsT],
    ) -> None:
        self._codec, self._outputs, self._clock, self._ledger = codec, outputs, clock, ledger
        self._caches, self._connections, self._recovery, self._endings = caches, connections, recovery, endings

    async def read(self, connection: ReplicaConnection) -> None:
        """Until it ends; its requests go on elsewhere then."""
        try:
            await connection.run(self._on_outputs, self._on_blocks)
        except Exception:  # of any kind: its requests must go on elsewhere
            logger.exception("closing the connection to replica %s", connection.info.replica_id)
        await self._recovery.lost(connection, has_ended=True)

    async def _on_outputs(self, connection: ReplicaConnection, parts: Sequence[Buffer]) -> None:
        batch = self._codec.decode_outputs(parts)
        outputs = self._codec.outputs(batch)
        now_s = self._clock.now()
        instead = [self._noted_or_failed(connection, output, now_s) for output in outputs]
        passed = instead.count(None)
        if passed < len(outputs):
            pairs = zip(outputs, instead, strict=True)
            kept = [each for output, others in pairs for each in ((output,) if others is None else others)]
            batch, passed = self._codec.keep(batch, kept), len(kept)
        if passed:
            await self._outputs.put(batch)

    def _noted_or_failed(self, connection: ReplicaConnection, output: Output, now_s: float) -> Sequence[Output] | None:
        """As `_noted`. What fails for one is no matter of the others: they count as sent, and must be passed on."""
        entry = self._ledger.get(output.request_id)
        if entry is None or entry.connection is not connection:
            return ()
        try:
            return self._noted(entry, output, now_s)
        except Exception as error:  # of any kind
            logger.exception("noting an output of request %s failed", output.request_id)
            if entry.has_ended:  # with this output, which its client has to get
                return entry.held_back
            self._endings.fail(entry, repr(error))
            return ()

    def _noted(self, entry: Entry[RequestT], output: Output, now_s: float) -> Sequence[Output] | None:
        """Note what an output brings. None passes it on; else these are passed on instead, if any."""
        if entry.preparation is not None:
            entry.preparation.answered(output)
            entry.preparation = None
        if entry.stay is not None:
            entry.stay.first_s, entry.stay = now_s, None
        if entry.predicted_hit_tokens is not None:
            self._caches.found(entry, output)
        if entry.repeats and not self._recovery.take_repeats(entry, output):
            return ()
        if output.new_token_ids:
            entry.came(output.new_token_ids, now_s)
        if entry.held_back is not None:
            entry.held_back.append(output)
        if output.finish_reason is not None:
            self._endings.end(entry, str(output.finish_reason))
            return entry.held_back
        return None if entry.held_back is None else ()

    def _on_blocks(self, connection: ReplicaConnection, changes: BlockChanges) -> None:
        replica_id = connection.info.replica_id
        is_current = self._connections.get(replica_id) is connection
        if is_current and not self._caches.told(replica_id, changes):
            connection.ask_for_blocks()
