"""The state that routers and replicas share: tickets, bins, credit.

A ticket stands for one request from the moment it is queued until the replica that ran it frees its slot. Every move is
atomic. Two stores keep it: `RedisStateStore` serves, and `MemoryStateStore` while Redis is away. What they decide is
`policies.router.dispatcher`; one contract test runs both over the same random histories.
"""

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from policies.router.admission import NO_LIMITS, Foreseen, Limits, Quota, Refusal, Settlement
from policies.router.sessions import Turn
from policies.router.tickets import Assignment, Notice, Reading, ReplicaTerms, Ticket
from predictor.learned import Scored

MOST_SERVED_SHOWN = 50  # API keys in a snapshot


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a replica and what runs there.

    Attributes:
        max_model_len: most tokens of prompt and answer together; an engine may lower the configured value to fit.
        max_batch_tokens: most tokens of one engine step.
        classes, gang_max_wait_s, gang_patience_s, rolling_size: as in `ReplicaTerms`.
        silence_s: without a heartbeat for so long it counts as dead.
        start_s: seconds that its start took.
        kv_layout: what replicas that hand KV caches over must have in common; "" where none does.
        encrypted: it is spoken to over TLS.
        secret: of the wire's handshake. Made by the replica; whatever may read the shared state may connect.
    """

    replica_id: str
    host: str
    port: int
    max_model_len: int
    max_batch_tokens: int = 8192
    classes: tuple[str, ...] = ()
    gang_max_wait_s: float | None = None
    gang_patience_s: float = 0.0
    rolling_size: int = 1
    silence_s: float = 10.0
    start_s: float = 0.0
    kv_layout: str = ""
    encrypted: bool = False
    secret: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def terms(self) -> ReplicaTerms:
        return ReplicaTerms(
            classes=self.classes,
            gang_max_wait_s=self.gang_max_wait_s,
            gang_patience_s=self.gang_patience_s,
            rolling_size=self.rolling_size,
        )

    def takes(self, slo_class: str) -> bool:
        return self.terms.takes(slo_class)


class LaneEdges(NamedTuple):
    """Between lanes, ascending.

    Attributes:
        version: grows by one at every swap.
        bins: of predicted output tokens.
        buckets: of prompt tokens; none where prompts are not told apart.
    """

    version: int
    bins: tuple[float, ...]
    buckets: tuple[float, ...] = ()


class FinishedLength(NamedTuple):
    """A finished request's length, and what a learned predictor's curves take from it, if it was scored; the turn that
    it was, if it has a session."""

    slo_class: str
    output_tokens: int
    scored: Scored | None = None
    turn: Turn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica holds.

    Attributes:
        slowness: its own seconds for one predicted second of work.
        gang: it takes whole batches, when all its slots are free.
        unread_tokens: prompt tokens that it was given, and has not read as far as is known.
        max_unread_tokens: at this many it takes no more; None sets no bound.
        prompt_token_s: seconds per prompt token, by its own word; None without.
    """

    slots: int
    running: int
    outstanding_s: float
    slowness: float = 1.0
    gang: bool = False
    unread_tokens: int = 0
    max_unread_tokens: int | None = None
    prompt_token_s: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether its unread prompts are at their bound: it may have slots, and takes nothing."""
        return self.max_unread_tokens is not None and self.unread_tokens >= self.max_unread_tokens

    @property
    def credit(self) -> int:
        return 0 if self.is_full or (self.gang and self.running) else max(0, self.slots - self.running)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The tables at one moment: waiting tickets per class and bin (of all buckets), load per replica, living routers.

    Attributes:
        waiting_s: predicted seconds of all that waits.
        recalled: ids of requests that were called back and still hold their slots.
        overtaken_s: the longest overtaking seen: how much later than a request one arrived that started before it.
        late: requests that were moved behind those in time, by class and why: `passed`, their deadline, or `reading`,
            which would have passed it.
        owed: starts that requests behind those in time were given for their patience, by class.
        batches: gang batches that went, by bin and why: `full`, or `waited` for as long as they may.
        served_s: predicted seconds of what each API key started, halved once a minute; of those that had most.
        starts: requests that started, so far.
        start_s: seconds that the last start of a replica took, with the wait for its place; 0 before one was seen.
        asked: a request came while no replica was there, and none has come since.
    """

    lanes: dict[tuple[str, int], int] = field(default_factory=dict)
    replicas: dict[str, ReplicaLoad] = field(default_factory=dict)
    routers: int = 0
    waiting_s: float = 0.0
    recalled: frozenset[str] = frozenset()
    overtaken_s: float = 0.0
    late: dict[tuple[str, str], int] = field(default_factory=dict)
    owed: dict[str, int] = field(default_factory=dict)
    batches: dict[tuple[int, str], int] = field(default_factory=dict)
    served_s: dict[str, float] = field(default_factory=dict)
    starts: int = 0
    start_s: float = 0.0
    asked: bool = False

    @property
    def waiting(self) -> int:
        return sum(self.lanes.values())

    @property
    def awaits_a_replica(self) -> bool:
        """None is there, and one was asked for; or those that are there leave, and requests wait."""
        return self.asked or (self.waiting > 0 and not any(load.slots for load in self.replicas.values()))


class Queued(NamedTuple):
    """A ticket was taken.

    Attributes:
        assignments: this router's new ones, often the ticket itself and possibly earlier ones.
        foreseen: what is predicted of it; the store does not count replicas.
    """

    assignments: list[Assignment]
    foreseen: Foreseen = Foreseen(0.0, 0.0)


class StateStore(Protocol):
    """Every method raises StateStoreError when the store cannot be reached within its time limit."""

    async def enqueue(self, ticket: Ticket, limits: Limits = NO_LIMITS) -> Queued | Refusal:
        """Queue a ticket (again) if the limits allow it, and assign what can be assigned.

        One that its router has queued before was taken then, and has paid: it meets no limits. So a call may be
        repeated whose reply was lost.

        Returns a Refusal when the ticket was not taken: then nothing was spent, and an older ticket of this id is gone.
        """

    async def admit(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        """As if it were queued now: whether the limits allow it, and what it takes out of its quotas then.

        It is not queued: that may follow, without limits.
        """

    async def charge(self, quotas: Sequence[Quota]) -> Refusal | None:
        """Take out of quotas what no request takes, if all of them allow it."""

    async def settle(self, router_id: str, number: int, settlements: Sequence[Settlement]) -> None:
        """Take, or give back, the differences between what requests were charged and what they took.

        A router's numbers grow from 1. One that came before is ignored, so a call may be repeated whose reply was lost.
        """

    async def release(
        self,
        replica_id: str,
        request_ids: Sequence[str],
        lease_s: float | None = None,
        reading: Reading | None = None,
    ) -> None:
        """Requests ended on a replica: free their slots and assign the next ones. Ids it does not hold are ignored.

        With lease_s they never came: one that was assigned again since `beat_replica` named it keeps its slot.
        """

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Forget tickets whose requests were never sent, waiting or just assigned."""

    async def dispatch(self, router_id: str = "") -> list[Assignment]:
        """Assign what time alone has made due: gang batches whose max-wait is over. Returns this router's."""

    async def locate(self, request_ids: Sequence[str]) -> list[str | None]:
        """For each id the replica it is assigned to, "" while it waits, None when the store does not know it."""

    async def register_replica(
        self, info: ReplicaInfo, slots: int, running: Sequence[str] = (), slowness: float = 1.0
    ) -> None:
        """A replica joins, or comes back; `running` is what it runs already, even if it waits as far as we know."""

    async def beat_replica(
        self,
        replica_id: str,
        slots: int,
        lease_s: float,
        slowness: float = 1.0,
        gang_sizes: Sequence[int] = (),
        reading: Reading | None = None,
    ) -> list[str] | None:
        """A replica lives and offers `slots`; if it takes gang batches, of each bin no more than its gang size.

        Returns the ids assigned to it longer than lease_s ago, None when it is not registered.
        """

    async def drop_replica(self, replica_id: str) -> None:
        """A replica left, or its connection broke: its tickets are forgotten, their routers queue them again.

        Routers are not told: each sees its own connection break, or misses the replica in the next snapshots. One that
        lives after all is told by its heartbeat, and registers again with what it runs.
        """

    async def replica_info(self, replica_id: str) -> ReplicaInfo | None:
        """Its address, None when it is not registered."""

    async def replica_infos(self) -> list[ReplicaInfo]:
        """All registered replicas."""

    async def beat_router(self, router_id: str, silence_s: float) -> tuple[list[str], list[str]]:
        """A router lives, and counts as dead when it has been silent for silence_s.

        Sweeps out replicas and routers that have been silent for as long as each of them named; returns both lists.
        A router's tickets that wait go with it. Those on a replica stay until that replica sees the connection close.
        """

    async def time_s(self) -> float:
        """The store's own clock, seconds: the one time that routers on different hosts share."""

    async def remove_router(self, router_id: str) -> None:
        """A router left in good order; its tickets that wait are forgotten."""

    async def swap_edges(
        self, shape: str, version: int, bins: Sequence[float] = (), buckets: Sequence[float] = ()
    ) -> LaneEdges | None:
        """Put edges in force that follow on `version`, and move what waits to its new lanes in the same moment.

        For all routers of one `shape`, a text that tells how they bin: those of another have edges of their own. What
        waits is moved, also tickets of other routers.

        What this makes a whole gang batch is assigned.

        Does nothing when another router was first, or without `bins`. Returns the edges in force, None before the
        first.
        """

    async def exchange_lengths(
        self, seen: int, new: Iterable[FinishedLength], keep: int
    ) -> tuple[int, list[FinishedLength]]:
        """Append observed lengths to the shared window of the newest `keep`.

        `seen` is the count that the last call returned, 0 at first. Returns the new count and the lengths observed
        since, by all routers and oldest first, as far as the window still holds them.
        """

    async def change_settings(self, configured: str, changes: Mapping[str, bytes]) -> None:
        """Keep settings, by name, for replicas with this configuration."""

    async def restore_settings(self, configured: str, settings: Mapping[str, bytes]) -> None:
        """Keep those that are not there, and leave what is there as it is."""

    async def changed_settings(self, configured: str) -> dict[str, bytes]:
        """All that were kept for those who were."""

    async def publish(self, router_id: str, pages: Mapping[str, bytes], ttl_s: float) -> None:
        """Keep this router's pages, by what they hold, for ttl_s, so that any router can answer for all."""

    async def published(self, what: str) -> dict[str, bytes]:
        """The page of this name that each living router published last."""

    async def snapshot(self) -> Snapshot: ...

    def notices(self, router_id: str) -> AsyncIterator[list[Notice]]:
        """What a router did not ask for, for ever. The first item is empty: the subscription stands.

        They may be lost; `locate` and `snapshot` tell.
        """

    async def close(self) -> None: ...
