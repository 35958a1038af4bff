"""How requests go on that cannot stay where they are: a replica was lost, a more urgent request wants the slot, or
nothing comes.

When a replica is lost, each request on it is queued again under the same id: from the start when nothing was sent yet;
resumed from prompt plus tokens sent when that continues the same answer; else replayed, with the tokens that were
already sent taken out of the new stream and compared. No request ends because a replica did.
"""

import logging
from collections import deque
from itertools import islice
from typing import Any, Generic, TypeVar

import msgspec

from policies.errors import SluiceError
from policies.live import Live
from router.background import BackgroundTasks
from router.clock import Clock
from router.codec import EngineCodec, Output
from router.connection import ReplicaConnection
from router.connections import Connections
from router.endings import Endings
from router.ledger import Entry, Ledger, State
from router.metrics import RouterMetrics
from router.prompt_caches import PromptCaches
from router.queueing import Queueing
from router.terms import RouterTerms

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
RECALL_TIMEOUT_S = 10.0


class Recovery(Generic[RequestT]):
    def __init__(
        self,
        *,
        codec: EngineCodec[RequestT, Any],
        clock: Clock,
        terms: Live[RouterTerms],
        metrics: RouterMetrics,
        ledger: Ledger[RequestT],
        caches: PromptCaches[RequestT],
        connections: Connections,
        queueing: Queueing[RequestT],
        endings: Endings[RequestT, Any],
        background: BackgroundTasks,
    ) -> None:
        self._codec, self._clock, self._terms, self._metrics, self._ledger = codec, clock, terms, metrics, ledger
        self._caches, self._connections, self._queueing = caches, connections, queueing
        self._endings, self._background = endings, background

    async def lost(self, connection: ReplicaConnection, *, has_ended: bool = False) -> None:
        """A replica is lost: all its requests are queued again. Or it has left, if its connection has ended."""
        if not self._connections.forget(connection):
            return  # done already
        replica_id, stranded = connection.info.replica_id, self._ledger.on(connection)
        self._caches.forget(replica_id)
        if stranded or not has_ended or not await self._queueing.has_left(replica_id):
            self._metrics.replicas_lost.inc()
            logger.warning("replica %s lost with %d requests on board", replica_id, len(stranded))
        movable = [entry for entry in stranded if self._take_back(entry)]
        if connection.fell_silent and not self._queueing.is_alone:
            self._connections.fell_silent(replica_id)
        else:
            await self._queueing.drop(replica_id)
        for entry in movable:
            self._background.spawn(self._queueing.queue_again(entry), "requeue")

    def _take_back(self, entry: Entry[RequestT]) -> bool:
        """Off a lost replica; False when it has been moved too often, and fails."""
        entry.take_back("lost", self._clock.now())
        entry.moves += 1
        if entry.moves > self._terms.now.config.max_moves:
            self._endings.fail(entry, f"it lost {entry.moves} replicas")
            return False
        self._metrics.recovered.labels(self._continue(entry)).inc()
        return True

    def recall(self, request_id: str) -> None:
        """Its slot goes to a more urgent request; it waits again under its old key, to be continued where it stands."""
        entry = self._ledger.get(request_id)
        if entry is None or entry.state not in (State.ASSIGNED, State.RUNNING) or self._queueing.is_alone:
            return
        connection = entry.connection
        entry.take_back("recalled", self._clock.now())
        entry.recalls += 1
        self._metrics.recalled.labels(entry.slo_class).inc()
        self._continue(entry)
        self._background.spawn(self._recall(entry, connection), "recall")

    def restart(self, request_id: str) -> bool:
        """Take a request back from where it was sent, before another token of it can come, and queue it again.

        No loss that would count against it. False where it was sent nowhere.
        """
        entry = self._ledger.get(request_id)
        if entry is None or entry.state is not State.RUNNING:
            return False
        connection = entry.connection
        entry.take_back("stalled", self._clock.now())
        self._background.spawn(self._recall(entry, connection), "restart")
        return True

    async def _recall(self, entry: Entry[RequestT], connection: ReplicaConnection | None) -> None:
        """Queued again only when nothing of it can come any more over a connection that it may be sent over again."""
        if connection is not None:
            try:
                packed = msgspec.msgpack.encode([entry.request_id])
                await connection.call("recall", packed, timeout_s=RECALL_TIMEOUT_S)
            except SluiceError as error:
                logger.warning("%s", error)
                connection.close()
        await self._queueing.queue_again(entry)

    def _continue(self, entry: Entry[RequestT]) -> str:
        """What to send to the next replica; returns the name of the way."""
        way = self._found_way(entry)
        if entry.trail is not None:
            entry.trail.goes_on(way)
        return way

    def _found_way(self, entry: Entry[RequestT]) -> str:
        if entry.held_back:  # the client has nothing of it
            entry.held_back, entry.sent, entry.timing.output_tokens = [], [], 0
        if not entry.sent:
            return "requeued"
        entry.continuations += 1
        recovery = self._codec.recover(entry.request, entry.sent)
        entry.request, entry.repeats = recovery.request, deque(recovery.repeats)
        if recovery.repeats:
            return "replayed"
        entry.sent = []
        return "resumed"

    def take_repeats(self, entry: Entry[RequestT], output: Output) -> bool:
        """Take the tokens that the client has already out of a replayed stream; False when nothing new is left."""
        expected = list(islice(entry.repeats, len(output.new_token_ids)))
        too_short = output.finish_reason is not None and len(expected) < len(entry.repeats)
        if too_short or output.new_token_ids[: len(expected)] != expected:
            self._endings.fail(entry, "its replay on another replica differs from what was sent already")
            return False
        for _ in expected:
            entry.repeats.popleft()
        self._codec.drop_first(output, len(expected))
        return bool(output.new_token_ids) or output.finish_reason is not None
