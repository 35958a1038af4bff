"""What a router goes by while the shared state is away: the replicas it is connected to, and its share of their slots.

A store of its own with the same moves. It begins with what was known last: the requests of this router that run, and of
the slots that were free a share for each router. When the shared state is back, what still waits is queued there, and
each replica tells what it runs.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from policies.admission import Limits, Refusal
from router.memory_store import MemoryStateStore
from router.state_store import Assignment, ReplicaInfo, Snapshot, Ticket

logger = logging.getLogger(__name__)


class LocalCapacity:
    """`begin` when the shared state fails, `end` when it answers again."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._store: MemoryStateStore | None = None

    @property
    def in_use(self) -> bool:
        return self._store is not None

    async def begin(
        self, replicas: Iterable[ReplicaInfo], snapshot: Snapshot, running: Mapping[str, Iterable[str]]
    ) -> None:
        """Args:
        replicas: those that this router is connected to.
        snapshot: the last one of the shared state.
        running: this router's requests by replica id.
        """
        self._store = MemoryStateStore(self._now)
        for info in replicas:
            load = snapshot.replicas.get(info.replica_id)
            if load is None:
                continue
            mine = list(running.get(info.replica_id, ()))
            share = -(-load.credit // max(1, snapshot.routers))
            await self._store.register_replica(info, len(mine) + share, mine, load.slowness)
        logger.warning("the shared state is away: going on with the capacity known last")

    def end(self) -> None:
        self._store = None
        logger.warning("the shared state is back")

    async def enqueue(self, ticket: Ticket, limits: Limits) -> list[Assignment] | Refusal:
        """Quotas are not counted: they are shared."""
        assert self._store is not None
        return await self._store.enqueue(ticket, replace(limits, quotas=()))

    async def ended(self, request_id: str, router_id: str) -> list[Assignment]:
        """A request is over or was taken back: its slot goes to the next of this router."""
        if self._store is None:
            return []
        return await self._store.forget(request_id, router_id)

    async def lost(self, replica_id: str) -> None:
        if self._store is not None:
            await self._store.drop_replica(replica_id)
