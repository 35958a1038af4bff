"""The requests of one router: each is in one state from when it is submitted until it has ended.

            +-> preparing --+
            |               v
    submitted ---------> queueing --> waiting --> assigned --> running --> ended
                            ^                         |            |
                            +-------- recalled <------+------------+

Any state may end. A request may be assigned while its ticket is still on the way: the notice of it can be faster than
the reply to the call. It may be queued again while it waits, when the shared state has lost its ticket or is away.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from policies.errors import IllegalMoveError, InputError
from policies.router.admission import Foreseen
from policies.router.tickets import Ticket
from policies.router.tiers import NOTHING, Load
from predictor.learned import Foresight
from router.cached_blocks import BlockHashes
from router.codec import Output
from router.connection import ReplicaConnection
from router.metrics import ClassMetrics
from router.settlements import Bill
from router.timing import RequestTiming
from router.trail import Stay, Trail
from router.wire import Buffer

RequestT = TypeVar("RequestT")


class State(StrEnum):
    QUEUEING = "queueing"
    """Its ticket is on the way into a store, or it is asked whether the limits allow it."""
    PREPARING = "preparing"
    """It was admitted, and what comes before its ticket goes on elsewhere."""
    WAITING = "waiting"
    """Its ticket is in a bin, as far as this router knows."""
    ASSIGNED = "assigned"
    """It has a slot of a replica, and the connection to that is being opened."""
    RUNNING = "running"
    """It was sent to its replica."""
    RECALLED = "recalled"
    """It was taken off a replica that is lost, stalled, or has called it back, and is not queued again yet."""
    ENDED = "ended"


MOVES: Mapping[State, frozenset[State]] = {
    State.QUEUEING: frozenset({State.PREPARING, State.WAITING, State.ASSIGNED, State.ENDED}),
    State.PREPARING: frozenset({State.QUEUEING, State.ENDED}),
    State.WAITING: frozenset({State.QUEUEING, State.ASSIGNED, State.ENDED}),
    State.ASSIGNED: frozenset({State.RUNNING, State.RECALLED, State.ENDED}),
    State.RUNNING: frozenset({State.RECALLED, State.ENDED}),
    State.RECALLED: frozenset({State.QUEUEING, State.ENDED}),
    State.ENDED: frozenset(),
}
"""Where each state may lead. A request that is submitted begins as QUEUEING."""


class Preparation(Protocol[RequestT]):
    """What is done elsewhere for a request before it is queued. Its result goes along when that is first sent."""

    async def prepare(self) -> bool:
        """Ends in bounded time, with a result or without: the request is queued then.

        Returns whether its replica need not read the prompt.
        """

    def first_sending(self, request: RequestT) -> RequestT | None:
        """The request with what was prepared, before it is sent; None to send it as it is, as after the first time."""

    def answered(self, output: Output) -> None:
        """The first output came, and may be changed before it is passed on."""

    def ended(self, request: RequestT) -> None:
        """The request is over without an output: what was prepared is not wanted any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Generic[RequestT]):
    """One request.

    Attributes:
        request: in the engine's structure, as the next replica will get it.
        waiting_since_s: when it was submitted, or taken off the last replica that it ran on.
        prompt_tokens: of the client's own prompt; that of a request that was moved holds a part of its answer too.
        replica_id: of the replica that it is assigned to or runs on, else None. Kept when it has ended.
        connection: the one over which it was sent; None unless it runs. Kept when it has ended.
        sent: tokens of its answer that have come since it was last resumed.
        repeats: tokens that a replayed stream is still to repeat.
        moves, recalls: how often it lost its replica, and how often its slot.
        continuations: how often it went on with a part of its answer sent.
        has_arrived: a store has answered for it.
        foreseen: what was predicted of it as it was queued first; None before, and where nothing is.
        planned_key: its deadline key by the policies, where requests are served in another order.
        foresight: what the learned predictor said of it, None where there is none.
        predicted_hit_tokens: of its prompt, what its replica was taken to have cached when it was sent; None once its
            engine has said what it had.
        encoded: as it would be sent at once; None where it has changed since.
        blocks: of its prompt, until it is sent; none where no replica tells what it has cached.
        loads: of its prompt, by replica, until it is sent.
        load: what its replica was taken to load when it was sent.
        bill: of its key's tokens, None where those have no limit.
        held_back: outputs of an answer in one piece that could not be resumed, until its end; None passes them on.
        preparation: None without one, and once its first output has come.
        preparing: the task of its preparation, while it is PREPARING.
        stay: of one that is traced, until the first output of the replica that it is on.
    """

    request: RequestT
    ticket: Ticket
    metrics: ClassMetrics
    timing: RequestTiming
    waiting_since_s: float
    prompt_tokens: int
    state: State = State.QUEUEING
    replica_id: str | None = None
    connection: ReplicaConnection | None = None
    sent: list[int] = field(default_factory=list)
    repeats: deque[int] = field(default_factory=deque)
    moves: int = 0
    recalls: int = 0
    continuations: int = 0
    has_arrived: bool = False
    foreseen: Foreseen | None = None
    planned_key: float | None = None
    foresight: Foresight | None = None
    predicted_hit_tokens: int | None = None
    encoded: Sequence[Buffer] | None = None
    blocks: BlockHashes = ()
    loads: Mapping[str, Load] = field(default_factory=dict)
    load: Load = NOTHING
    bill: Bill | None = None
    held_back: list[Output] | None = None
    preparation: Preparation[RequestT] | None = None
    preparing: "asyncio.Task[None] | None" = None
    stay: Stay | None = None

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def slo_class(self) -> str:
        return self.ticket.slo_class

    @property
    def trail(self) -> Trail | None:
        return self.timing.trail

    @property
    def may_queue_again(self) -> bool:
        return self.state in (State.WAITING, State.RECALLED)

    @property
    def has_ended(self) -> bool:
        return self.state is State.ENDED

    def move(self, state: State) -> None:
        """Raises IllegalMoveError: the present state does not lead there."""
        if state not in MOVES[self.state]:
            raise IllegalMoveError(f"request {self.request_id} is {self.state}, and cannot become {state}")
        self.state = state

    def assign(self, replica_id: str) -> None:
        self.move(State.ASSIGNED)
        self.replica_id = replica_id

    def run(self, connection: ReplicaConnection, now_s: float) -> None:
        """It has been sent."""
        self.move(State.RUNNING)
        self.connection = connection
        if self.trail is not None:
            self.stay = self.trail.sent(connection.info.replica_id, self.timing.output_tokens, now_s)

    def take_back(self, because: str, now_s: float) -> None:
        """Off the replica that it is on, or on the way to. Outputs that still come from there count no more."""
        if self.state is State.RUNNING:  # else it has waited all along
            self.waiting_since_s = now_s
            if self.trail is not None:
                self.trail.left(now_s, because)
        self.move(State.RECALLED)
        self.connection = self.replica_id = self.encoded = self.stay = None

    def came(self, token_ids: Sequence[int], now_s: float) -> None:
        """New tokens of its answer."""
        self.sent.extend(token_ids)
        timing = self.timing
        if timing.last_token_s is None:
            timing.first_token_s = now_s
            self.metrics.ttft_s.observe(now_s - timing.received_s)
        else:
            self.metrics.itl_s.observe(now_s - timing.last_token_s)
        timing.last_token_s = now_s
        timing.output_tokens += len(token_ids)


class Ledger(dict[str, Entry[RequestT]]):
    """The requests of one router that have not ended, by their ids. A dictionary: each output is looked up in it."""

    def add(self, entry: Entry[RequestT]) -> None:
        """Raises InputError: a request of this id is not over yet."""
        if entry.request_id in self:
            raise InputError(f"request {entry.request_id} is not over yet: its input cannot be continued")
        self[entry.request_id] = entry

    def end(self, entry: Entry[RequestT]) -> None:
        entry.move(State.ENDED)
        del self[entry.request_id]

    def in_state(self, *states: State) -> list[Entry[RequestT]]:
        return [entry for entry in self.values() if entry.state in states]

    def on(self, connection: ReplicaConnection) -> list[Entry[RequestT]]:
        """Those that run there."""
        return [entry for entry in self.values() if entry.connection is connection]

    def by_replica(self) -> dict[str, list[str]]:
        """Ids of requests by the replica that they were assigned to."""
        ids: defaultdict[str, list[str]] = defaultdict(list)
        for entry in self.values():
            if entry.replica_id is not None:
                ids[entry.replica_id].append(entry.request_id)
        return ids

    def needs(self, replica_id: str) -> bool:
        """Whether requests were assigned to it."""
        return any(entry.replica_id == replica_id for entry in self.values())
