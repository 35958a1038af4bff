"""The state that routers and replicas share: tickets, bins, credit.

A ticket stands for one request from the moment it is queued until the replica that ran it frees its slot. Every move is
atomic. Two stores keep it: `RedisStateStore` for service, `MemoryStateStore` as its reference twin; one contract test
runs both over the same random histories.
"""

import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import msgspec

from policies.router.admission import NO_LIMITS, Limits, Quota, Refusal, Settlement
from predictor.learned import Scored

MOST_SERVED_SHOWN = 50  # API keys in a snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One queued request.

    Attributes:
        request_id: unique among all routers.
        bin_index: its bin of predicted output length.
        deadline_key: by which its lane is sorted; the least goes first. It never changes.
        work_s: predicted seconds of engine time, on a replica of slowness 1 that has most of its prompt cached.
        router_id: the router that queued it, and is told of its assignment.
        slo_class: its service class; replicas may be reserved for some classes.
        arrival_s: on the store's clock, for the overtaking that is reported; None when it does not count, as after a
            lost replica.
        deadline_s: when its first token is due, on the store's clock; None when none was promised.
        tpot_s: promised seconds per token after the first; None when none were promised.
        late_key: its sort key once its first token cannot be in time; None where its order knows no late requests.
        unread_tokens: prompt tokens that a replica with an empty cache would read.
        prefixes: how many of them each replica has cached, as (replica id, tokens); only replicas with some.
        prompt_token_s: predicted seconds in which a replica of slowness 1 reads a prompt token; a replica's own word
            goes before it.
        step_s: predicted seconds of an engine step. Replicas whose first token would come within one step of each other
            count as equal.
        predicted_output_tokens: by which it moves to another bin when the edges of bins change; None never moves.
        fills_idle: its class takes only slots that no other class wants.
        recallable: whether its slot may be taken back for another class while it runs, on a replica that serves all.
        bucket: its bucket of prompt length; class, bin and bucket make its lane. 0 where there are no buckets.
        prompt_tokens: by which it moves to another bucket when the edges of buckets change; None never moves.
        api_key: name of its API key, for the turns of keys (policies.router.turns); "" without a key.
    """

    request_id: str
    bin_index: int
    deadline_key: float
    work_s: float
    router_id: str
    slo_class: str = "standard"
    arrival_s: float | None = None
    deadline_s: float | None = None
    tpot_s: float | None = None
    late_key: float | None = None
    unread_tokens: int = 0
    prefixes: tuple[tuple[str, int], ...] = ()
    prompt_token_s: float = 0.0
    step_s: float = 0.0
    predicted_output_tokens: float | None = None
    fills_idle: bool = False
    recallable: bool = False
    bucket: int = 0
    prompt_tokens: int | None = None
    api_key: str = ""

    def unread_at(self, replica_id: str) -> int:
        """Prompt tokens that this replica has to read."""
        return max(0, self.unread_tokens - dict(self.prefixes).get(replica_id, 0))

    @property
    def least_unread_tokens(self) -> int:
        """Prompt tokens to read on the replica that has most of the prompt cached."""
        return max(0, self.unread_tokens - max((tokens for _, tokens in self.prefixes), default=0))

    def token_s(self, slowness: float, said_s: float | None) -> float:
        """Seconds in which a replica of this slowness reads a prompt token; ``said_s`` is the replica's own word."""
        return self.prompt_token_s * slowness if said_s is None else said_s

    def of_prompt(self, prompt_tokens: int, prefixes: tuple[tuple[str, int], ...]) -> "Ticket":
        """The ticket with another prompt, or with what replicas have cached by now."""
        new = replace(self, unread_tokens=prompt_tokens, prefixes=prefixes)
        more_s = self.prompt_token_s * (new.least_unread_tokens - self.least_unread_tokens)
        return replace(new, work_s=max(0.0, self.work_s + more_s))

    def work_at_s(self, replica_id: str) -> float:
        """As `work_s`, on this replica if its slowness is 1."""
        return self.work_s + self.prompt_token_s * (self.unread_at(replica_id) - self.least_unread_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a replica says of the prompts that it holds.

    Attributes:
        read: ids of requests whose prompt it has read, since it said so last.
        known_tokens: of the unread tokens of all others, those that it has read, or had in its cache; below 0 by those
            that it has to read though they were taken for cached.
        max_unread_tokens: with so many it takes no more; None sets no bound.
        prompt_token_s: its seconds per prompt token, decodes in between included; None while it cannot tell.
    """

    read: tuple[str, ...] = ()
    known_tokens: int = 0
    max_unread_tokens: int | None = None
    prompt_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """A ticket was given a slot of a replica."""

    request_id: str
    replica_id: str


@dataclass(frozen=True, slots=True)
class Recall:
    """A running request is to give its slot back and be queued again: a more urgent one waits."""

    request_id: str


Notice = Assignment | Recall


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach a replica and what runs there.

    Attributes:
        max_model_len: most tokens of prompt and answer together; an engine may lower the configured value to fit.
        max_batch_tokens: most tokens of one engine step.
        classes: service classes for which it is reserved; none serves all.
        gang_max_wait_s: None takes single requests. Else it takes batches of one class and bin, up to all its slots and
            only when all are free; one that is not full goes when a request has waited so long (policies.gang.batches).
        gang_patience_s: for which batches of shorter answers go before one; 0 is first formed, first served.
        silence_s: without a heartbeat for so long it counts as dead.
        kv_layout: what replicas that hand KV caches over must have in common; "" where none does.
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
    silence_s: float = 10.0
    kv_layout: str = ""
    secret: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(32))

    def takes(self, slo_class: str) -> bool:
        return not self.classes or slo_class in self.classes


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
    """A finished request's length, and what a learned predictor's curves take from it, if it was scored."""

    slo_class: str
    output_tokens: int
    scored: Scored | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What a replica holds.

    Attributes:
        slowness: its own seconds for one predicted second of work.
        gang: it takes whole batches, when all its slots are free.
        unread_tokens: prompt tokens that it was given, and has not read as far as is known.
        max_unread_tokens: with so many it takes no more; None sets no bound.
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
        """Of prompts: it may have slots, and takes nothing."""
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

    @property
    def waiting(self) -> int:
        return sum(self.lanes.values())


class StateStore(Protocol):
    """Every method raises StateStoreError when the store cannot be reached within its time limit."""

    async def enqueue(self, ticket: Ticket, limits: Limits = NO_LIMITS) -> list[Assignment] | Refusal:
        """Queue a ticket (again) if the limits allow it, and assign what can be assigned.

        One that its router has queued before was taken then, and has paid: it meets no limits. So a call may be
        repeated whose reply was lost.

        Returns this router's new assignments, often the ticket itself and possibly earlier ones; a Refusal when the
        ticket was not taken: then nothing was spent, and an older ticket of this id is gone.
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
        waits is moved whoever queued it.

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
        """Keep settings, by name, for whoever was configured in this way."""

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
