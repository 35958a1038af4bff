"""What a router goes by while the shared state is away: the replicas it is connected to, and its share of their slots.

A store of its own with the same moves. It begins with what was known last: the requests of this router that run, and of
the slots that are free besides, as far as is known, a share for each router. When the shared state is back, what still
waits is queued there, what ended is taken out of it, and each replica tells what it runs.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

from policies.router.admission import Limits, Refusal
from policies.router.tickets import Assignment, Ticket
from router.memory_store import MemoryStateStore
from router.state_store import Queued, ReplicaInfo, Snapshot

logger = logging.getLogger(__name__)
MAX_ENDED = 100_000  # what ended longer ago is found by the leases


class LocalCapacity:
    """`begin` when the shared state fails, `end` when it answers again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._store: MemoryStateStore | None = None
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)

    @property
    def in_use(self) -> bool:
        return self._store is not None

    async def begin(
        self,
        replicas: Iterable[ReplicaInfo],
        snapshot: Snapshot,
        mine_then: Mapping[str, int],
        mine_now: Mapping[str, Sequence[str]],
    ) -> None:
        """Args:
        replicas: those that this router is connected to.
        snapshot: the last one of the shared state.
        mine_then: how many requests of this router each replica ran at that time.
        mine_now: those that it runs now.
        """
        self._store = MemoryStateStore(self._now)
        self._ended.clear()
        for info in replicas:
            load = snapshot.replicas.get(info.replica_id)
            if load is None:
                continue
            mine = mine_now.get(info.replica_id, ())
            of_others = max(0, load.running - mine_then.get(info.replica_id, 0))
            free = max(0, load.slots - of_others - len(mine))
            slots = len(mine) + ceil(free / max(1, snapshot.routers))
            await self._store.register_replica(info, slots, mine, load.slowness)
        logger.warning("the shared state is away: going on with the capacity known last")

    def end(self) -> list[str]:
        """The ids that ended meanwhile: the shared state may still hold them."""
        self._store = None
        logger.warning("the shared state is back")
        return list(self._ended)

    async def enqueue(self, ticket: Ticket, limits: Limits) -> Queued | Refusal:
        """Quotas are not counted: they are shared. Nothing is called back: what others run is out of sight."""
        assert self._store is not None
        return await self._store.enqueue(replace(ticket, recallable=False), replace(limits, quotas=()))

    async def ended(self, request_id: str, router_id: str) -> list[Assignment]:
        """A request is over or was taken back: its slot goes to the next of this router."""
        if self._store is None:
            return []
        self._ended.append(request_id)
        return await self._store.forget(request_id, router_id)

    async def due(self, router_id: str) -> list[Assignment]:
        """Gang batches of this router whose max-wait is over."""
        return await self._store.dispatch(router_id) if self._store is not None else []

    async def lost(self, replica_id: str) -> None:
        if self._store is not None:
            await self._store.drop_replica(replica_id)
