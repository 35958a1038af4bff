"""How requests end: with their last output, because they are cancelled, or because they fail."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Generic, TypeVar

from router.accounting import Accounting
from router.background import BackgroundTasks
from router.classifier import TicketWriter
from router.codec import WHOLE, EngineCodec
from router.connection import ReplicaConnection
from router.ledger import Entry, Ledger
from router.queueing import Queueing

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")
OutputsT = TypeVar("OutputsT")


class Endings(Generic[RequestT, OutputsT]):
    def __init__(
        self,
        *,
        codec: EngineCodec[RequestT, OutputsT],
        outputs: "asyncio.Queue[OutputsT]",
        ledger: Ledger[RequestT],
        accounting: Accounting,
        classifier: TicketWriter,
        queueing: Queueing[RequestT],
        background: BackgroundTasks,
    ) -> None:
        """Args:
        outputs: gets the error of a request that fails.
        """
        self._codec, self._outputs, self._ledger, self._accounting = codec, outputs, ledger, accounting
        self._classifier, self._queueing, self._background = classifier, queueing, background

    def end(self, entry: Entry[RequestT], outcome: str) -> None:
        """Its place or slot goes to the next, it is noted, and its length is learned from."""
        self._ledger.end(entry)
        self._queueing.ended(entry.request_id)
        self._accounting.ended(entry, outcome)
        if outcome in WHOLE:
            tokens, is_cut = entry.timing.output_tokens, outcome == "length"
            turn = entry.timing.turn(entry.prompt_tokens)
            self._classifier.observe(entry.slo_class, tokens, entry.foresight, is_cut=is_cut, turn=turn)

    def cancel(self, entries: Iterable[Entry[RequestT]], outcome: str) -> None:
        """Stop requests wherever they are; `outcome` is how they are counted. Those that have ended are ignored."""
        unsent: list[str] = []
        running: defaultdict[ReplicaConnection, list[str]] = defaultdict(list)
        for entry in entries:
            if entry.has_ended:
                continue
            self.end(entry, outcome)
            (unsent if entry.connection is None else running[entry.connection]).append(entry.request_id)
            if entry.preparing is not None:
                entry.preparing.cancel()
            if entry.preparation is not None:
                entry.preparation.ended(entry.request)
        for connection, ids in running.items():
            connection.abort(ids)
        self._queueing.cancel(unsent)

    def fail(self, entry: Entry[RequestT], why: str) -> None:
        """Its client gets an error."""
        logger.error("request %s failed: %s", entry.request_id, why)
        self.cancel([entry], "error")
        self._background.spawn(self._outputs.put(self._codec.failed(entry.request_id)), "fail")
