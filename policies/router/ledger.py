"""The books of a dispatcher: where each ticket is, what each replica may still be given, and what has been seen."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from policies.router.placement import Offer
from policies.router.tickets import Reading, ReplicaTerms, Ticket


@dataclass(slots=True)
class Place:
    """Where a ticket is: in its lane or on a replica.

    Attributes:
        since_s: since when it is there.
        replica_id: "" while it waits.
        charge_s: predicted seconds that it adds to its replica's work.
    """

    ticket: Ticket
    since_s: float
    replica_id: str = ""
    charge_s: float = 0.0


@dataclass(slots=True)
class Replica:
    """One replica's account.

    Attributes:
        slowness: its own seconds for one predicted second of work.
        gang_sizes: most requests of its batches by bin; bins beyond are bound by its slots.
        on: the tickets that it holds, by id.
        work_s: predicted seconds of all of them.
        unread: prompt tokens of those whose prompts it has not read, by id; those that were cached do not count.
        given_tokens: the sum of ``unread``.
        reading: what it said last of its prompts.
        is_refilled: all its slots were taken since as many were free as a rolling batch has.
    """

    replica_id: str
    terms: ReplicaTerms
    slots: int
    slowness: float = 1.0
    gang_sizes: tuple[int, ...] = ()
    on: dict[str, Place] = field(default_factory=dict)
    work_s: float = 0.0
    unread: dict[str, int] = field(default_factory=dict)
    given_tokens: int = 0
    reading: Reading = Reading()
    is_refilled: bool = False

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.on)

    def note_slots(self) -> None:
        """As many are taken, or there are as many, as were not before."""
        if self.terms.rolling_size == 1 or self.terms.gang_max_wait_s is not None:
            self.is_refilled = False
        elif self.free_slots <= 0:
            self.is_refilled = True
        elif self.free_slots >= min(self.terms.rolling_size, self.slots):
            self.is_refilled = False

    @property
    def unread_tokens(self) -> int:
        return max(0, self.given_tokens - self.reading.known_tokens)

    @property
    def is_full_of_prompts(self) -> bool:
        most = self.reading.max_unread_tokens
        return most is not None and self.unread_tokens >= most

    @property
    def has_prompts_to_read(self) -> bool:
        """Only of a replica that says how many it may have."""
        return self.reading.max_unread_tokens is not None and self.unread_tokens > 0

    @property
    def is_for_all(self) -> bool:
        """Whether a slot of it, given back, would serve any ticket."""
        return not self.terms.classes and self.terms.gang_max_wait_s is None and self.slots > 0

    @property
    def has_room(self) -> bool:
        """It takes single requests, now or once it has read."""
        return self.terms.gang_max_wait_s is None and not self.is_refilled and self.free_slots > 0

    @property
    def takes_singles(self) -> bool:
        return self.has_room and not self.is_full_of_prompts

    @property
    def takes_a_gang(self) -> bool:
        return self.terms.gang_max_wait_s is not None and not self.on and self.slots > 0

    def reading_s(self, ticket: Ticket) -> float:
        """Seconds in which it reads what it has not cached of this ticket's prompt."""
        return ticket.unread_at(self.replica_id) * self.pace_s(ticket)

    def pace_s(self, ticket: Ticket) -> float:
        """Its seconds for a token of this ticket's prompt."""
        return ticket.token_s(self.slowness, self.reading.prompt_token_s)

    def offer(self, ticket: Ticket) -> Offer:
        pace_s = self.pace_s(ticket)
        return Offer(
            ahead_s=self.unread_tokens * pace_s,
            reading_s=ticket.unread_at(self.replica_id) * pace_s,
            unread_prompts=len(self.unread),
            step_s=ticket.step_s * self.slowness,
            work_s=self.work_s + ticket.work_at_s(self.replica_id) * self.slowness,
            free_slots=self.free_slots,
            return_chance=self.reading.return_chance,
        )

    def note_reading(self, reading: Reading) -> None:
        self.reading = replace(reading, read=()) if reading.read else reading
        for request_id in reading.read:
            self.note_read(request_id)

    def note_read(self, request_id: str) -> None:
        self.given_tokens -= self.unread.pop(request_id, 0)


class Ledger:
    """All replicas, and the slots that may be called back or have been.

    Attributes:
        replicas: by id.
        recallable: ids of what runs and may be called back.
        recalled: ids of what was called back and still holds its slot.
    """

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.recallable: set[str] = set()
        self.recalled: set[str] = set()

    def serving(self, slo_class: str) -> list[Replica]:
        """By id."""
        return [replica for _, replica in sorted(self.replicas.items()) if replica.terms.takes(slo_class)]

    def put_on(self, place: Place, replica: Replica, now_s: float) -> None:
        ticket = place.ticket
        place.replica_id, place.since_s = replica.replica_id, now_s
        place.charge_s = ticket.work_at_s(place.replica_id) * replica.slowness
        replica.on[ticket.request_id] = place
        if unread_tokens := ticket.unread_at(place.replica_id):
            replica.unread[ticket.request_id] = unread_tokens
            replica.given_tokens += unread_tokens
        replica.work_s += place.charge_s
        replica.note_slots()
        if ticket.recallable and replica.is_for_all:
            self.recallable.add(ticket.request_id)

    def take_off(self, place: Place) -> None:
        request_id, replica = place.ticket.request_id, self.replicas[place.replica_id]
        del replica.on[request_id]
        replica.note_read(request_id)
        self._no_longer_recallable(request_id)
        # At zero tickets nothing is left of the sum, so that rounding never piles up.
        replica.work_s = replica.work_s - place.charge_s if replica.on else 0.0
        replica.note_slots()

    def drop(self, replica_id: str) -> Iterable[str]:
        """The ids of what it held."""
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return ()
        for request_id in replica.on:
            self._no_longer_recallable(request_id)
        return replica.on

    def set_slots(self, replica: Replica, slots: int) -> None:
        """A replica that drains has no slots to give: nothing is called back from it."""
        replica.slots = slots
        replica.note_slots()
        if slots == 0:
            self.recallable.difference_update(replica.on)

    def call_back(self, request_id: str) -> None:
        self.recallable.remove(request_id)
        self.recalled.add(request_id)

    def _no_longer_recallable(self, request_id: str) -> None:
        self.recallable.discard(request_id)
        self.recalled.discard(request_id)

    @property
    def slots_wait(self) -> bool:
        """A replica with free slots has enough to read, or waits for more of them: what waits gets one soon."""
        replicas = self.replicas.values()
        return any(each.free_slots > 0 and (each.is_full_of_prompts or each.is_refilled) for each in replicas)


@dataclass(slots=True)
class Tally:
    """What has been seen since the beginning.

    Attributes:
        starts: tickets that started.
        latest_arrival_s: of all that started.
        overtaken_s: the longest overtaking: how much later than a request one arrived that started before it.
        late: tickets that were moved behind those in time, by class and why: `passed`, their deadline, or `reading`,
            which would have passed it.
        owed: starts that tickets behind those in time were given for their patience, by class.
        batches: gang batches that went, by bin and why: `full`, or `waited` for as long as they may.
    """

    starts: int = 0
    latest_arrival_s: float = -inf
    overtaken_s: float = 0.0
    late: Counter[tuple[str, str]] = field(default_factory=Counter)
    owed: Counter[str] = field(default_factory=Counter)
    batches: Counter[tuple[int, str]] = field(default_factory=Counter)

    def started(self, arrival_s: float | None) -> None:
        self.starts += 1
        if arrival_s is not None:
            self.overtaken_s = max(self.overtaken_s, self.latest_arrival_s - arrival_s)
            self.latest_arrival_s = max(self.latest_arrival_s, arrival_s)
