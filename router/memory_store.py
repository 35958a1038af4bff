"""`StateStore` in this process: the reference that the Lua scripts are held against, and what a router goes by while
Redis is away.

It says in plain Python what router/lua says in Lua; names and order of the moves are the same.
"""

import asyncio
import contextlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.router.admission import (
    NO_LIMITS,
    Limits,
    Queue,
    Quota,
    Refusal,
    Settlement,
    Spent,
    no_room,
    predicted_wait_s,
    settle,
    spend,
)
from policies.router.order import BAND_S, Band, is_late, is_owed_a_start
from policies.router.placement import Offer, soonest
from policies.router.recall import RecallableView, WaitingView, recalls
from policies.router.turns import HALF_LIFE_S, band_of, halved
from router.state_store import (
    MOST_SERVED_SHOWN,
    Assignment,
    FinishedLength,
    LaneEdges,
    Notice,
    Reading,
    Recall,
    ReplicaInfo,
    ReplicaLoad,
    Snapshot,
    Ticket,
)

MAX_NOTICES = 100_000
MOST_CALLED_LATE = 64  # as in Lua, for which a script with more would take long
_Lane = tuple[str, int, int]


@dataclass(slots=True)
class _Place:
    ticket: Ticket
    since_s: float
    replica_id: str = ""
    charge_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    info: ReplicaInfo
    slots: int
    slowness: float
    dead_s: float
    gang_sizes: tuple[int, ...] = ()
    on: set[str] = field(default_factory=set)
    work_s: float = 0.0
    unread: dict[str, int] = field(default_factory=dict)
    reading: Reading = Reading()

    @property
    def unread_tokens(self) -> int:
        return max(0, sum(self.unread.values()) - self.reading.known_tokens)

    @property
    def is_full_of_prompts(self) -> bool:
        most = self.reading.max_unread_tokens
        return most is not None and self.unread_tokens >= most

    @property
    def has_prompts_to_read(self) -> bool:
        """Where it says how many it may have."""
        return self.reading.max_unread_tokens is not None and self.unread_tokens > 0

    def pace_s(self, ticket: Ticket) -> float:
        """Its seconds for a token of this ticket's prompt."""
        return ticket.token_s(self.slowness, self.reading.prompt_token_s)

    def offer(self, ticket: Ticket) -> Offer:
        pace_s = self.pace_s(ticket)
        return Offer(
            ahead_s=self.unread_tokens * pace_s,
            reading_s=ticket.unread_at(self.info.replica_id) * pace_s,
            unread_prompts=len(self.unread),
            step_s=ticket.step_s * self.slowness,
            work_s=self.work_s + ticket.work_at_s(self.info.replica_id) * self.slowness,
        )

    @property
    def is_for_all(self) -> bool:
        """Whether a slot of it, given back, would serve any ticket."""
        return not self.info.classes and self.info.gang_max_wait_s is None and self.slots > 0

    @property
    def takes_singles(self) -> bool:
        return self.info.gang_max_wait_s is None and len(self.on) < self.slots and not self.is_full_of_prompts

    @property
    def takes_a_gang(self) -> bool:
        return self.info.gang_max_wait_s is not None and not self.on and self.slots > 0


class MemoryStateStore:
    """`now` gives seconds; notices wait in bounded queues, one for each router that listens."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[str, _Place] = {}
        self._replicas: dict[str, _Replica] = {}
        self._routers: dict[str, float] = {}
        self._notices: dict[str, asyncio.Queue[list[Notice]]] = {}
        self._recallable: set[str] = set()
        self._recalled: set[str] = set()
        self._edges: dict[str, LaneEdges] = {}  # by shape
        self._spent: dict[str, Spent] = {}
        self._settled: dict[str, int] = {}  # the number of the last settlements, by router
        self._started_s, self._overtaken_s = -math.inf, 0.0
        self._starts, self._late, self._owed = 0, Counter[tuple[str, str]](), Counter[str]()
        self._batches = Counter[tuple[int, str]]()
        self._served_s: dict[str, float] = {}  # by API key
        self._halve_at_s = -math.inf
        self._lengths: list[FinishedLength] = []
        self._lengths_total = 0
        self._settings: dict[str, dict[str, bytes]] = {}
        self._pages: dict[str, tuple[float, Mapping[str, bytes]]] = {}  # by router

    def _waiting(self) -> list[_Place]:
        return [place for place in self._places.values() if not place.replica_id]

    def _waiting_of(self, slo_class: str) -> list[_Place]:
        return [place for place in self._waiting() if place.ticket.slo_class == slo_class]

    def _forget(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is None or not place.replica_id:
            return
        replica = self._replicas[place.replica_id]
        replica.on.discard(request_id)
        replica.unread.pop(request_id, None)
        self._no_longer_recallable(request_id)
        replica.work_s = replica.work_s - place.charge_s if replica.on else 0.0

    def _put_on(self, place: _Place, replica: _Replica) -> None:
        place.replica_id, place.since_s = replica.info.replica_id, self._now()
        place.charge_s = place.ticket.work_at_s(place.replica_id) * replica.slowness
        replica.on.add(place.ticket.request_id)
        if unread_tokens := place.ticket.unread_at(place.replica_id):
            replica.unread[place.ticket.request_id] = unread_tokens
        replica.work_s += place.charge_s
        if place.ticket.recallable and replica.is_for_all:
            self._recallable.add(place.ticket.request_id)

    def _no_longer_recallable(self, request_id: str) -> None:
        self._recallable.discard(request_id)
        self._recalled.discard(request_id)

    def _set_slots(self, replica: _Replica, slots: int) -> None:
        """A replica that drains has no slots to give: nothing is called back from it."""
        replica.slots = slots
        if slots == 0:
            self._recallable -= replica.on

    def _choose(self, ticket: Ticket, *, owed: bool = False) -> _Replica | None:
        """A late ticket goes where nothing is to be read, unless a start is owed to it."""
        late = not owed and ticket.late_key is not None and ticket.deadline_key // BAND_S == Band.LATE
        offers = {
            replica_id: replica.offer(ticket)
            for replica_id, replica in self._replicas.items()
            if replica.takes_singles
            and replica.info.takes(ticket.slo_class)
            and not (late and replica.has_prompts_to_read)
        }
        chosen = soonest(offers)
        return None if chosen is None else self._replicas[chosen]

    def _lanes(self) -> dict[_Lane, list[_Place]]:
        lanes: dict[_Lane, list[_Place]] = {}
        for place in sorted(self._waiting(), key=lambda p: (p.ticket.deadline_key, p.ticket.request_id)):
            lane = place.ticket.slo_class, place.ticket.bin_index, place.ticket.bucket
            lanes.setdefault(lane, []).append(place)
        return lanes

    def _next_start(self) -> tuple[_Place, _Replica] | None:
        """The most urgent ticket that a replica with credit may take. Tickets of one lane may go to the same replicas,
        so that only heads matter."""
        if not any(replica.takes_singles for replica in self._replicas.values()):
            return None  # the usual case under load, told without a look at the queue
        if (owed := self._next_owed()) is not None:
            self._owed[owed[0].ticket.slo_class] += 1
            return owed
        heads = [lane[0] for lane in self._lanes().values()]
        for place in sorted(heads, key=lambda head: _urgency(head.ticket)):
            if (replica := self._choose(place.ticket)) is not None:
                return self._in_turn(place, replica)
        return None

    def _next_owed(self) -> tuple[_Place, _Replica] | None:
        """Of those behind, one of each lane, whose patience ended first."""
        owed: list[tuple[float, str]] = []
        for lane in self._lanes().values():
            behind = [place.ticket for place in lane if place.ticket.deadline_key >= Band.NO_TARGET * BAND_S]
            if behind and is_owed_a_start(self._starts, behind[0].deadline_key, self._now()):
                owed.append((behind[0].deadline_key % BAND_S, behind[0].request_id))
        if not owed:
            return None
        place = self._places[min(owed)[1]]
        if place.ticket.late_key != place.ticket.deadline_key:
            return None  # of an order without bands
        replica = self._choose(place.ticket, owed=True)
        return None if replica is None else self._in_turn(place, replica, owed=True)

    def _in_turn(self, place: _Place, replica: _Replica, *, owed: bool = False) -> tuple[_Place, _Replica]:
        """Whose turn it is where the order has this one go to this replica."""
        band, slo_class = _band_of(place.ticket), place.ticket.slo_class
        late = [other for other in self._waiting() if _band_of(other.ticket) is Band.LATE]
        if band is None or all(other.ticket.slo_class != slo_class for other in late):
            return place, replica
        in_time = [other for other in self._waiting_of(slo_class) if _band_of(other.ticket) is Band.IN_TIME]
        turns = sorted(late if band is Band.LATE else in_time, key=self._turn)
        found = ((other, self._choose(other.ticket, owed=owed)) for other in turns)
        return next((other, its_replica) for other, its_replica in found if its_replica is not None)

    def _turn(self, place: _Place) -> tuple[float, str, str, float, str]:
        ticket = place.ticket
        served_s = self._served_s.get(ticket.api_key, 0.0)
        return served_s, ticket.slo_class, ticket.api_key, ticket.deadline_key, ticket.request_id

    def _is_late(self, ticket: Ticket, replica: _Replica) -> bool:
        """It was not called that before."""
        if ticket.late_key in (None, ticket.deadline_key) or ticket.deadline_s is None:
            return False
        reading_s = ticket.unread_at(replica.info.replica_id) * replica.pace_s(ticket)
        return is_late(ticket.deadline_s, reading_s, self._now())

    def _call_late(self, place: _Place) -> None:
        ticket = place.ticket
        assert ticket.late_key is not None and ticket.deadline_s is not None
        self._late[ticket.slo_class, "passed" if self._now() > ticket.deadline_s else "reading"] += 1
        place.ticket = replace(ticket, deadline_key=ticket.late_key)

    def _dispatch(self, router_id: str) -> list[Assignment]:
        started: list[_Place] = []
        called = 0
        while (found := self._next_start()) is not None:
            if called < MOST_CALLED_LATE and self._is_late(found[0].ticket, found[1]):
                called += 1
                self._call_late(found[0])
            else:
                started.append(self._start(*found))
        for replica in sorted(self._replicas.values(), key=lambda r: (r.slowness, r.info.replica_id)):
            if replica.takes_a_gang:
                started += [self._start(place, replica) for place in self._next_gang(replica)]
        mine = self._tell_owners(started, router_id)
        self._recall()
        return mine

    def _tell_owners(self, started: Iterable[_Place], router_id: str) -> list[Assignment]:
        mine: list[Assignment] = []
        for place in started:
            assignment = Assignment(place.ticket.request_id, place.replica_id)
            if place.ticket.router_id == router_id:
                mine.append(assignment)
            else:
                self._tell(place.ticket.router_id, [assignment])
        return mine

    def _recall(self) -> None:
        slots_wait = any(len(r.on) < r.slots and r.is_full_of_prompts for r in self._replicas.values())
        if not self._recallable or slots_wait:  # what waits gets one of those soon
            return
        tickets = sorted((place.ticket for place in self._waiting()), key=_urgency)
        waiting = [WaitingView(key=t.deadline_key, fills_idle=t.fills_idle) for t in tickets]
        keys = {i: self._places[i].ticket.deadline_key for i in self._recallable}
        running = [RecallableView(key=key, request_id=i) for i, key in keys.items()]
        for request_id in recalls(waiting, running, len(self._recalled)):
            self._recallable.remove(request_id)
            self._recalled.add(request_id)
            self._tell(self._places[request_id].ticket.router_id, [Recall(request_id)])

    def _next_gang(self, replica: _Replica) -> list[_Place]:
        assert replica.info.gang_max_wait_s is not None
        config = GangConfig(
            batch_size=replica.slots,
            max_wait_s=replica.info.gang_max_wait_s,
            bin_sizes=replica.gang_sizes,
            patience_s=replica.info.gang_patience_s,
        )
        batches = {
            name: places[: config.size_of(name[1])]
            for name, places in self._lanes().items()
            if replica.info.takes(name[0])
        }
        chosen = next_batch((self._lane_view(*name, batch) for name, batch in batches.items()), config)
        if chosen is None:
            return []
        is_full = len(chosen.keys) == config.size_of(chosen.bin_index)
        self._batches[chosen.bin_index, "full" if is_full else "waited"] += 1
        return batches[chosen.slo_class, chosen.bin_index, chosen.bucket]

    def _lane_view(self, slo_class: str, bin_index: int, bucket: int, batch: list[_Place]) -> LaneView:
        return LaneView(
            slo_class=slo_class,
            bin_index=bin_index,
            bucket=bucket,
            keys=[place.ticket.deadline_key for place in batch],
            waited_s=self._now() - min(place.since_s for place in batch),
        )

    def _start(self, place: _Place, replica: _Replica) -> _Place:
        self._put_on(place, replica)
        self._starts += 1
        if key := place.ticket.api_key:
            self._served_s[key] = self._served_s.get(key, 0.0) + place.ticket.work_s
        self._note_start(place.ticket.arrival_s)
        return place

    def _note_start(self, arrival_s: float | None) -> None:
        if arrival_s is not None:
            self._overtaken_s = max(self._overtaken_s, self._started_s - arrival_s)
            self._started_s = max(self._started_s, arrival_s)

    def _tell(self, router_id: str, notice: list[Notice]) -> None:
        if router_id in self._notices:
            with contextlib.suppress(asyncio.QueueFull):  # Redis drops the notices of a slow listener as well
                self._notices[router_id].put_nowait(notice)

    async def enqueue(self, ticket: Ticket, limits: Limits = NO_LIMITS) -> list[Assignment] | Refusal:
        had = self._places.get(ticket.request_id)
        self._forget(ticket.request_id)
        if had is not None and had.ticket.router_id == ticket.router_id:
            limits = NO_LIMITS
        if (refusal := self._refusal(ticket, limits)) is not None:
            if had is not None:  # a place, which is another's now
                self._dispatch("")
            return refusal
        self._places[ticket.request_id] = _Place(ticket, self._now())
        return self._dispatch(ticket.router_id)

    async def admit(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        return self._refusal(ticket, limits)

    def _refusal(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        """None spends the quotas."""
        spent = self._allowed(limits.quotas)
        if isinstance(spent, Refusal):
            return spent
        if (refusal := self._no_room(ticket, limits)) is None:
            self._spent.update(spent)
        return refusal

    def _rested(self, name: str) -> Spent:
        return self._spent.get(name, Spent()).rested(self._now())

    def _allowed(self, quotas: Iterable[Quota]) -> dict[str, Spent] | Refusal:
        """What each owes once it is spent; of one that does not allow it, the refusal."""
        spent: dict[str, Spent] = {}
        for quota in quotas:
            rested = self._rested(quota.name)
            spent[quota.name], late_s = spend(quota, rested)
            if late_s > 0.0:
                self._spent[quota.name] = rested
                return Refusal(quota.name, late_s)
        return spent

    async def charge(self, quotas: Sequence[Quota]) -> Refusal | None:
        spent = self._allowed(quotas)
        if isinstance(spent, Refusal):
            return spent
        self._spent.update(spent)
        return None

    async def settle(self, router_id: str, number: int, settlements: Sequence[Settlement]) -> None:
        if number <= self._settled.get(router_id, 0):
            return
        self._settled[router_id] = number
        for settlement in settlements:
            self._spent[settlement.name] = settle(settlement, self._rested(settlement.name))

    def _no_room(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        if limits == NO_LIMITS or self._choose(ticket) is not None:
            return None
        waiting = self._waiting_of(ticket.slo_class)
        of_key = sum(ticket.api_key == place.ticket.api_key != "" for place in waiting)
        pace = [replica.slowness for replica in self._serving(ticket)]
        of_key_s = of_key and predicted_wait_s(of_key * _mean_work_s(waiting), pace)
        wait_s = self._predicted_wait_s(ticket)
        return no_room(limits, Queue(waiting=len(waiting), wait_s=wait_s, of_key=of_key, of_key_s=of_key_s))

    def _serving(self, ticket: Ticket) -> list[_Replica]:
        return [r for _, r in sorted(self._replicas.items()) if r.info.takes(ticket.slo_class)]

    def _predicted_wait_s(self, ticket: Ticket) -> float:
        """Every waiting ticket counts as the mean of its class."""
        earlier = Counter(p.ticket.slo_class for p in self._waiting() if p.ticket.deadline_key <= ticket.deadline_key)
        ahead_s: dict[str, float] = {}
        for slo_class, count in sorted(earlier.items()):
            ahead_s[slo_class] = count * _mean_work_s(self._waiting_of(slo_class))
        serving = self._serving(ticket)
        own = [r.slowness for r in serving if r.info.classes == (ticket.slo_class,)]
        return predicted_wait_s(
            sum(ahead_s.values()), [r.slowness for r in serving], ahead_s.get(ticket.slo_class, 0.0), own
        )

    def _note_reading(self, replica: _Replica, reading: Reading | None) -> None:
        if reading is not None:
            replica.reading = replace(reading, read=())
            for request_id in reading.read:
                replica.unread.pop(request_id, None)

    async def release(
        self,
        replica_id: str,
        request_ids: Sequence[str],
        lease_s: float | None = None,
        reading: Reading | None = None,
    ) -> None:
        latest_s = math.inf if lease_s is None else self._now() - lease_s
        for request_id in request_ids:
            place = self._places.get(request_id)
            if place and place.replica_id == replica_id and place.since_s <= latest_s:
                self._forget(request_id)
        if (replica := self._replicas.get(replica_id)) is not None:
            self._note_reading(replica, reading)
        self._dispatch("")

    async def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self._dispatch("")

    async def forget(self, request_id: str, router_id: str) -> list[Assignment]:
        """As `cancel`, for one, with the assignments of this router that follow from it."""
        self._forget(request_id)
        return self._dispatch(router_id)

    async def dispatch(self, router_id: str = "") -> list[Assignment]:
        return self._dispatch(router_id)

    async def locate(self, request_ids: Sequence[str]) -> list[str | None]:
        places = [self._places.get(request_id) for request_id in request_ids]
        return [None if place is None else place.replica_id for place in places]

    async def register_replica(
        self, info: ReplicaInfo, slots: int, running: Sequence[str] = (), slowness: float = 1.0
    ) -> None:
        dead_s = self._now() + info.silence_s
        replica = self._replicas.setdefault(info.replica_id, _Replica(info, slots, slowness, dead_s))
        replica.info, replica.slowness, replica.dead_s = info, slowness, dead_s
        self._set_slots(replica, slots)
        for request_id in running:
            if request_id not in self._places:
                ticket = Ticket(
                    request_id=request_id, bin_index=0, deadline_key=0.0, work_s=0.0, router_id="", slo_class=""
                )
                self._places[request_id] = _Place(ticket, self._now())
            if not self._places[request_id].replica_id:
                self._put_on(self._places[request_id], replica)
        self._dispatch("")

    async def beat_replica(
        self,
        replica_id: str,
        slots: int,
        lease_s: float,
        slowness: float = 1.0,
        gang_sizes: Sequence[int] = (),
        reading: Reading | None = None,
    ) -> list[str] | None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        replica.slowness, replica.dead_s = slowness, self._now() + replica.info.silence_s
        replica.gang_sizes = tuple(gang_sizes)
        self._set_slots(replica, slots)
        self._note_reading(replica, reading)
        self._dispatch("")
        oldest = self._now() - lease_s
        return [request_id for request_id in replica.on if self._places[request_id].since_s <= oldest]

    async def drop_replica(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        for request_id in replica.on if replica else ():
            self._places.pop(request_id)
            self._no_longer_recallable(request_id)

    async def replica_info(self, replica_id: str) -> ReplicaInfo | None:
        replica = self._replicas.get(replica_id)
        return replica.info if replica else None

    async def replica_infos(self) -> list[ReplicaInfo]:
        return [replica.info for replica in self._replicas.values()]

    async def beat_router(self, router_id: str, silence_s: float) -> tuple[list[str], list[str]]:
        self._routers[router_id] = self._now() + silence_s
        if self._now() >= self._halve_at_s:
            self._served_s, self._halve_at_s = halved(self._served_s), self._now() + HALF_LIFE_S
        replicas = [key for key, replica in self._replicas.items() if replica.dead_s <= self._now()]
        for replica_id in replicas:
            await self.drop_replica(replica_id)
        routers = [key for key, dead_s in self._routers.items() if dead_s <= self._now()]
        for router in routers:
            await self.remove_router(router)
        return replicas, routers

    async def time_s(self) -> float:
        return self._now()

    async def remove_router(self, router_id: str) -> None:
        self._routers.pop(router_id, None)
        self._pages.pop(router_id, None)
        for place in self._waiting():
            if place.ticket.router_id == router_id:
                self._forget(place.ticket.request_id)

    async def swap_edges(
        self, shape: str, version: int, bins: Sequence[float] = (), buckets: Sequence[float] = ()
    ) -> LaneEdges | None:
        in_force = self._edges.get(shape)
        if bins and version == (in_force.version if in_force else 0):
            self._edges[shape] = LaneEdges(version + 1, tuple(bins), tuple(buckets))
            for place in self._waiting():
                predicted, prompt = place.ticket.predicted_output_tokens, place.ticket.prompt_tokens
                if predicted is not None:
                    place.ticket = replace(place.ticket, bin_index=bisect_right(bins[1:-1], predicted))
                if prompt is not None:
                    place.ticket = replace(place.ticket, bucket=bisect_right(buckets[1:-1], prompt))
            self._dispatch("")
        return self._edges.get(shape)

    async def exchange_lengths(
        self, seen: int, new: Iterable[FinishedLength], keep: int
    ) -> tuple[int, list[FinishedLength]]:
        added = list(new)
        self._lengths = [*self._lengths, *added][-keep:]
        self._lengths_total += len(added)
        known = seen if seen <= self._lengths_total else 0  # more than there are: of another store's life
        unseen = min(self._lengths_total - known, len(self._lengths))
        return self._lengths_total, self._lengths[len(self._lengths) - unseen :]

    async def change_settings(self, configured: str, changes: Mapping[str, bytes]) -> None:
        self._settings.setdefault(configured, {}).update(changes)

    async def restore_settings(self, configured: str, settings: Mapping[str, bytes]) -> None:
        self._settings[configured] = {**settings, **self._settings.get(configured, {})}

    async def changed_settings(self, configured: str) -> dict[str, bytes]:
        return dict(self._settings.get(configured, {}))

    async def publish(self, router_id: str, pages: Mapping[str, bytes], ttl_s: float) -> None:
        self._pages[router_id] = (self._now() + ttl_s, pages)

    async def published(self, what: str) -> dict[str, bytes]:
        now_s = self._now()
        living = {key: pages for key, (until_s, pages) in self._pages.items() if until_s > now_s}
        return {key: pages[what] for key, pages in living.items() if key in self._routers and what in pages}

    async def snapshot(self) -> Snapshot:
        waiting = [place.ticket for place in self._waiting()]
        loads = {
            key: ReplicaLoad(
                slots=replica.slots,
                running=len(replica.on),
                outstanding_s=replica.work_s,
                slowness=replica.slowness,
                gang=replica.info.gang_max_wait_s is not None,
                unread_tokens=replica.unread_tokens,
                max_unread_tokens=replica.reading.max_unread_tokens,
                prompt_token_s=replica.reading.prompt_token_s,
            )
            for key, replica in self._replicas.items()
        }
        return Snapshot(
            lanes=dict(Counter((ticket.slo_class, ticket.bin_index) for ticket in waiting)),
            replicas=loads,
            routers=len(self._routers),
            waiting_s=sum(ticket.work_s for ticket in waiting),
            recalled=frozenset(self._recalled),
            overtaken_s=self._overtaken_s,
            late=dict(self._late),
            owed=dict(self._owed),
            batches=dict(self._batches),
            served_s=dict(Counter(self._served_s).most_common(MOST_SERVED_SHOWN)),
        )

    async def notices(self, router_id: str) -> AsyncGenerator[list[Notice], None]:
        queue = self._notices[router_id] = asyncio.Queue(MAX_NOTICES)
        yield []
        while True:
            yield await queue.get()

    async def close(self) -> None:
        self._notices.clear()


def _mean_work_s(places: Sequence[_Place]) -> float:
    return sum(place.ticket.work_s for place in places) / len(places)


def _band_of(ticket: Ticket) -> Band | None:
    return band_of(ticket.deadline_key, ticket.late_key) if ticket.api_key else None


def _urgency(ticket: Ticket) -> tuple[float, int, int, str, str]:
    return ticket.deadline_key, ticket.bin_index, ticket.bucket, ticket.slo_class, ticket.request_id
