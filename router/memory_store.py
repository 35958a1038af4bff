"""`StateStore` in this process: the reference that the Lua scripts are held against, and the simulator's store.

It says in plain Python what router/lua says in Lua; names and order of the moves are the same.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from router.state_store import Assignment, ReplicaInfo, ReplicaLoad, Snapshot, Ticket

MAX_NOTICES = 100_000


@dataclass(slots=True)
class _Place:
    ticket: Ticket
    replica_id: str = ""
    assigned_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    info: ReplicaInfo
    slots: int
    beat_s: float
    on: set[str] = field(default_factory=set)
    work_s: float = 0.0


class MemoryStateStore:
    """`now` gives seconds; notices wait in bounded queues, one for each router that listens."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._places: dict[str, _Place] = {}
        self._replicas: dict[str, _Replica] = {}
        self._routers: dict[str, float] = {}
        self._notices: dict[str, asyncio.Queue[list[Assignment]]] = {}
        self._lengths: list[tuple[str, int]] = []
        self._lengths_total = 0
        self._metrics: dict[str, tuple[float, bytes]] = {}

    def _waiting(self) -> list[_Place]:
        return [place for place in self._places.values() if not place.replica_id]

    def _free(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if len(replica.on) < replica.slots]

    def _forget(self, request_id: str) -> None:
        place = self._places.pop(request_id, None)
        if place is None or not place.replica_id:
            return
        replica = self._replicas[place.replica_id]
        replica.on.discard(request_id)
        replica.work_s = replica.work_s - place.ticket.work_s if replica.on else 0.0

    def _put_on(self, place: _Place, replica: _Replica) -> None:
        place.replica_id, place.assigned_s = replica.info.replica_id, self._now()
        replica.on.add(place.ticket.request_id)
        replica.work_s += place.ticket.work_s

    def _dispatch(self, router_id: str) -> list[Assignment]:
        mine: list[Assignment] = []
        while (free := self._free()) and (waiting := self._waiting()):
            place = min(waiting, key=lambda p: (p.ticket.deadline_key, p.ticket.bin_index, p.ticket.request_id))
            replica = min(free, key=lambda r: (r.work_s, r.info.replica_id))
            self._put_on(place, replica)
            assignment = Assignment(place.ticket.request_id, replica.info.replica_id)
            if place.ticket.router_id == router_id:
                mine.append(assignment)
            else:
                self._tell(place.ticket.router_id, [assignment])
        return mine

    def _tell(self, router_id: str, notice: list[Assignment]) -> None:
        if router_id in self._notices:
            with contextlib.suppress(asyncio.QueueFull):  # Redis drops the notices of a slow listener as well
                self._notices[router_id].put_nowait(notice)

    async def enqueue(self, ticket: Ticket, *, max_waiting: int) -> list[Assignment] | None:
        self._forget(ticket.request_id)
        if not self._free() and len(self._waiting()) >= max_waiting:
            return None
        self._places[ticket.request_id] = _Place(ticket)
        return self._dispatch(ticket.router_id)

    async def release(self, replica_id: str, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            place = self._places.get(request_id)
            if place and place.replica_id == replica_id:
                self._forget(request_id)
        self._dispatch("")

    async def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self._dispatch("")

    async def locate(self, request_ids: Sequence[str]) -> list[str | None]:
        places = [self._places.get(request_id) for request_id in request_ids]
        return [None if place is None else place.replica_id for place in places]

    async def register_replica(self, info: ReplicaInfo, slots: int, running: Sequence[str]) -> None:
        replica = self._replicas.setdefault(info.replica_id, _Replica(info, slots, self._now()))
        replica.info, replica.slots, replica.beat_s = info, slots, self._now()
        for request_id in running:
            if request_id not in self._places:
                ticket = Ticket(request_id=request_id, bin_index=0, deadline_key=0.0, work_s=0.0, router_id="")
                self._places[request_id] = _Place(ticket)
                self._put_on(self._places[request_id], replica)
        self._dispatch("")

    async def beat_replica(self, replica_id: str, slots: int, lease_s: float) -> list[str] | None:
        replica = self._replicas.get(replica_id)
        if replica is None:
            return None
        replica.slots, replica.beat_s = slots, self._now()
        self._dispatch("")
        oldest = self._now() - lease_s
        return [request_id for request_id in replica.on if self._places[request_id].assigned_s <= oldest]

    async def drop_replica(self, replica_id: str) -> None:
        replica = self._replicas.pop(replica_id, None)
        for request_id in replica.on if replica else ():
            self._places.pop(request_id)

    async def replica_info(self, replica_id: str) -> ReplicaInfo | None:
        replica = self._replicas.get(replica_id)
        return replica.info if replica else None

    async def replica_infos(self) -> list[ReplicaInfo]:
        return [replica.info for replica in self._replicas.values()]

    async def beat_router(self, router_id: str, timeout_s: float) -> tuple[list[str], list[str]]:
        self._routers[router_id] = self._now()
        oldest = self._now() - timeout_s
        replicas = [key for key, replica in self._replicas.items() if replica.beat_s <= oldest]
        for replica_id in replicas:
            await self.drop_replica(replica_id)
        routers = [key for key, beat_s in self._routers.items() if beat_s <= oldest]
        for router in routers:
            await self.remove_router(router)
        return replicas, routers

    async def time_s(self) -> float:
        return self._now()

    async def remove_router(self, router_id: str) -> None:
        self._routers.pop(router_id, None)
        self._metrics.pop(router_id, None)
        for place in self._waiting():
            if place.ticket.router_id == router_id:
                self._forget(place.ticket.request_id)

    async def exchange_lengths(
        self, seen: int, new: Iterable[tuple[str, int]], keep: int
    ) -> tuple[int, list[tuple[str, int]]]:
        added = list(new)
        self._lengths = [*self._lengths, *added][-keep:]
        self._lengths_total += len(added)
        known = seen if seen <= self._lengths_total else 0  # more than there are: of another store's life
        unseen = min(self._lengths_total - known, len(self._lengths))
        return self._lengths_total, self._lengths[len(self._lengths) - unseen :]

    async def publish_metrics(self, router_id: str, exposition: bytes, ttl_s: float) -> None:
        self._metrics[router_id] = (self._now() + ttl_s, exposition)

    async def all_metrics(self) -> dict[str, bytes]:
        now_s = self._now()
        return {key: text for key, (until_s, text) in self._metrics.items() if until_s > now_s and key in self._routers}

    async def snapshot(self) -> Snapshot:
        bins: dict[int, int] = {}
        for place in self._waiting():
            bins[place.ticket.bin_index] = bins.get(place.ticket.bin_index, 0) + 1
        loads = {
            key: ReplicaLoad(slots=replica.slots, running=len(replica.on), outstanding_s=replica.work_s)
            for key, replica in self._replicas.items()
        }
        return Snapshot(bins=bins, replicas=loads, routers=len(self._routers))

    async def notices(self, router_id: str) -> AsyncGenerator[list[Assignment], None]:
        queue = self._notices[router_id] = asyncio.Queue(MAX_NOTICES)
        yield []
        while True:
            yield await queue.get()

    async def close(self) -> None:
        self._notices.clear()
