"""`StateStore` in this process: what a router goes by while Redis is away, and what the Lua scripts are held against.

`policies.router.dispatcher` decides. Here are the clock, the notices to routers, and what is kept besides tickets.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence

from policies.router.admission import NO_LIMITS, Allowances, Foreseen, Limits, Quota, Refusal, Settlement
from policies.router.dispatcher import Dispatcher
from policies.router.ledger import Replica
from policies.router.tickets import Assignment, Notice, Reading, Recall, Ticket
from router.state_store import MOST_SERVED_SHOWN, FinishedLength, LaneEdges, Queued, ReplicaInfo, ReplicaLoad, Snapshot

MAX_NOTICES = 100_000


class MemoryStateStore:
    """`now` gives seconds; notices wait in bounded queues, one for each router that listens."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.dispatcher = Dispatcher()
        self._now = now
        self._allowances = Allowances()
        self._infos: dict[str, ReplicaInfo] = {}
        self._dead_s: dict[str, float] = {}  # by replica
        self._routers: dict[str, float] = {}
        self._notices: dict[str, asyncio.Queue[list[Notice]]] = {}
        self._edges: dict[str, LaneEdges] = {}  # by shape
        self._settled: dict[str, int] = {}  # the number of the last settlements, by router
        self._lengths: list[FinishedLength] = []
        self._lengths_total = 0
        self._settings: dict[str, dict[str, bytes]] = {}
        self._pages: dict[str, tuple[float, Mapping[str, bytes]]] = {}  # by router

    # Tickets

    async def enqueue(self, ticket: Ticket, limits: Limits = NO_LIMITS) -> Queued | Refusal:
        had = self.dispatcher.forget(ticket.request_id)
        if had is not None and had.router_id == ticket.router_id:
            limits = NO_LIMITS
        if isinstance(foreseen := self._admit(ticket, limits), Refusal):
            if had is not None:  # a place, which is another's now
                self._dispatch()
            return foreseen
        self.dispatcher.queue(ticket, self._now())
        return Queued(self._dispatch(ticket.router_id), foreseen)

    async def admit(self, ticket: Ticket, limits: Limits) -> Refusal | None:
        admitted = self._admit(ticket, limits)
        return admitted if isinstance(admitted, Refusal) else None

    def _admit(self, ticket: Ticket, limits: Limits) -> Foreseen | Refusal:
        """What is predicted of it; that spends the quotas."""
        spent = self._allowances.allow(limits.quotas, self._now())
        if isinstance(spent, Refusal):
            return spent
        if not isinstance(foreseen := self.dispatcher.foreseen(ticket, limits, self._now()), Refusal):
            self._allowances.spend(spent)
        return foreseen

    async def charge(self, quotas: Sequence[Quota]) -> Refusal | None:
        spent = self._allowances.allow(quotas, self._now())
        if isinstance(spent, Refusal):
            return spent
        self._allowances.spend(spent)
        return None

    async def settle(self, router_id: str, number: int, settlements: Sequence[Settlement]) -> None:
        if number > self._settled.get(router_id, 0):
            self._settled[router_id] = number
            self._allowances.settle(settlements, self._now())

    async def release(
        self,
        replica_id: str,
        request_ids: Sequence[str],
        lease_s: float | None = None,
        reading: Reading | None = None,
    ) -> None:
        latest_s = self._now() - lease_s if lease_s is not None else None
        for request_id in request_ids:
            place = self.dispatcher.places.get(request_id)
            if place and place.replica_id == replica_id and (latest_s is None or place.since_s <= latest_s):
                self.dispatcher.forget(request_id)
        replica = self._replica(replica_id)
        if replica is not None and reading is not None:
            replica.note_reading(reading)
        self._dispatch()

    async def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.dispatcher.forget(request_id)
        self._dispatch()

    async def forget(self, request_id: str, router_id: str) -> list[Assignment]:
        """As `cancel`, for one, with the assignments of this router that follow from it."""
        self.dispatcher.forget(request_id)
        return self._dispatch(router_id)

    async def dispatch(self, router_id: str = "") -> list[Assignment]:
        return self._dispatch(router_id)

    def _dispatch(self, router_id: str = "") -> list[Assignment]:
        """Those of this router are returned, the owners of all others are told."""
        started, recalled = self.dispatcher.dispatch(self._now())
        mine: list[Assignment] = []
        for place in started:
            assignment = Assignment(place.ticket.request_id, place.replica_id)
            if place.ticket.router_id == router_id:
                mine.append(assignment)
            else:
                self._tell(place.ticket.router_id, [assignment])
        for ticket in recalled:
            self._tell(ticket.router_id, [Recall(ticket.request_id)])
        return mine

    async def locate(self, request_ids: Sequence[str]) -> list[str | None]:
        places = [self.dispatcher.places.get(request_id) for request_id in request_ids]
        return [None if place is None else place.replica_id for place in places]

    async def swap_edges(
        self, shape: str, version: int, bins: Sequence[float] = (), buckets: Sequence[float] = ()
    ) -> LaneEdges | None:
        in_force = self._edges.get(shape)
        if bins and version == (in_force.version if in_force else 0):
            self._edges[shape] = LaneEdges(version + 1, tuple(bins), tuple(buckets))
            self.dispatcher.rebin(bins, buckets)
            self._dispatch()
        return self._edges.get(shape)

    # Replicas and routers

    def _replica(self, replica_id: str) -> Replica | None:
        return self.dispatcher.ledger.replicas.get(replica_id)

    async def register_replica(
        self, info: ReplicaInfo, slots: int, running: Sequence[str] = (), slowness: float = 1.0
    ) -> None:
        self._infos[info.replica_id] = info
        self._dead_s[info.replica_id] = self._now() + info.silence_s
        self.dispatcher.register(
            info.replica_id,
            info.terms,
            slots,
            self._now(),
            slowness=slowness,
            running=running,
            start_s=info.start_s,
        )
        self._dispatch()

    async def beat_replica(
        self,
        replica_id: str,
        slots: int,
        lease_s: float,
        slowness: float = 1.0,
        gang_sizes: Sequence[int] = (),
        reading: Reading | None = None,
    ) -> list[str] | None:
        replica = self._replica(replica_id)
        if replica is None:
            return None
        self._dead_s[replica_id] = self._now() + self._infos[replica_id].silence_s
        replica.slowness, replica.gang_sizes = slowness, tuple(gang_sizes)
        self.dispatcher.offer(replica_id, slots, reading)
        self._dispatch()
        oldest_s = self._now() - lease_s
        return [request_id for request_id, place in replica.on.items() if place.since_s <= oldest_s]

    async def drop_replica(self, replica_id: str) -> None:
        self._infos.pop(replica_id, None)
        self._dead_s.pop(replica_id, None)
        self.dispatcher.drop(replica_id)

    async def replica_info(self, replica_id: str) -> ReplicaInfo | None:
        return self._infos.get(replica_id)

    async def replica_infos(self) -> list[ReplicaInfo]:
        return list(self._infos.values())

    async def beat_router(self, router_id: str, silence_s: float) -> tuple[list[str], list[str]]:
        now_s = self._now()
        self._routers[router_id] = now_s + silence_s
        self.dispatcher.turns.note_time(now_s)
        replicas, routers = (
            [name for name, dead_s in beats.items() if dead_s <= now_s] for beats in (self._dead_s, self._routers)
        )
        for replica_id in replicas:
            await self.drop_replica(replica_id)
        for router in routers:
            await self.remove_router(router)
        return replicas, routers

    async def remove_router(self, router_id: str) -> None:
        self._routers.pop(router_id, None)
        self._pages.pop(router_id, None)
        self.dispatcher.forget_router(router_id)

    async def time_s(self) -> float:
        return self._now()

    # What routers tell each other

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
        lanes, ledger, tally = self.dispatcher.lanes, self.dispatcher.ledger, self.dispatcher.tally
        waiting = Counter[tuple[str, int]]()
        for name, lane in lanes.items():
            waiting[name.slo_class, name.bin_index] += len(lane)
        return Snapshot(
            lanes=dict(waiting),
            replicas={replica_id: _load(replica) for replica_id, replica in ledger.replicas.items()},
            routers=len(self._routers),
            waiting_s=sum(lanes.ahead_s.values()),
            recalled=frozenset(ledger.recalled),
            overtaken_s=tally.overtaken_s,
            late=dict(tally.late),
            owed=dict(tally.owed),
            batches=dict(tally.batches),
            served_s=dict(Counter(self.dispatcher.turns.served_s).most_common(MOST_SERVED_SHOWN)),
            starts=tally.starts,
            start_s=self.dispatcher.starts.took_s,
            asked=self.dispatcher.starts.since_s is not None,
        )

    def _tell(self, router_id: str, notice: list[Notice]) -> None:
        if router_id in self._notices:
            with contextlib.suppress(asyncio.QueueFull):  # Redis drops the notices of a slow listener as well
                self._notices[router_id].put_nowait(notice)

    async def notices(self, router_id: str) -> AsyncGenerator[list[Notice], None]:
        queue = self._notices[router_id] = asyncio.Queue(MAX_NOTICES)
        yield []
        while True:
            yield await queue.get()

    async def close(self) -> None:
        self._notices.clear()


def _load(replica: Replica) -> ReplicaLoad:
    return ReplicaLoad(
        slots=replica.slots,
        running=len(replica.on),
        outstanding_s=replica.work_s,
        slowness=replica.slowness,
        gang=replica.terms.gang_max_wait_s is not None,
        unread_tokens=replica.unread_tokens,
        max_unread_tokens=replica.reading.max_unread_tokens,
        prompt_token_s=replica.reading.prompt_token_s,
    )
