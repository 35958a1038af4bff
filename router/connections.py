"""This router's connections to engine replicas: at most one to each, opened when it is first needed."""

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable, Callable, Collection, Container, Iterable
from typing import Any

from policies.errors import ReplicaLostError, SluiceError
from router.clock import Clock
from router.connection import ReplicaConnection
from router.metrics import RouterMetrics
from router.state_store import StateStore

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 5.0


class Connections:
    """`open` one before requests go there; `get` returns it from then on, until it is forgotten."""

    def __init__(
        self,
        *,
        router_id: str,
        engine_version: str,
        tls: ssl.SSLContext | None,
        store: StateStore,
        clock: Clock,
        metrics: RouterMetrics,
        lost_after_looks: int,
        drop_after_s: float,
        opened: Callable[[ReplicaConnection], object],
        is_needed: Callable[[str], bool],
        drop: Callable[[str], Awaitable[None]],
    ) -> None:
        """Args:
        tls: of connections; None makes plain ones.
        lost_after_looks: a connected replica that is missing in the shared state in more of them, in a row, is lost.
        drop_after_s: one that refuses connections is dropped no more often than that.
        opened: is called with each new connection, before any other part has it.
        is_needed: whether requests were given to this replica.
        drop: takes a replica out of the tables.
        """
        self._router_id, self._engine_version, self._tls = router_id, engine_version, tls
        self._store, self._clock, self._metrics = store, clock, metrics
        self._lost_after_looks, self._drop_after_s = lost_after_looks, drop_after_s
        self._opened, self._is_needed, self._drop = opened, is_needed, drop
        self._attempts: dict[str, asyncio.Task[ReplicaConnection]] = {}
        self._dropped_s: dict[str, float] = {}  # when replicas that refused us were
        self._out_of_reach_s: dict[str, float] = {}  # since when replicas are

    @property
    def replica_ids(self) -> Iterable[str]:
        """Ids of all replicas, those with a connection in the making included."""
        return self._attempts.keys()

    @property
    def all_open(self) -> list[ReplicaConnection]:
        return [connection for connection in map(self.get, self._attempts) if connection is not None]

    def get(self, replica_id: str) -> ReplicaConnection | None:
        """None where none is open."""
        task = self._attempts.get(replica_id)
        return task.result() if task and task.done() and not task.cancelled() and not task.exception() else None

    @property
    def out_of_reach(self) -> tuple[str, ...]:
        """Ids of replicas that may serve others, but could not be reached from here when that was tried last."""
        return tuple(sorted(self._out_of_reach_s))

    def fell_silent(self, replica_id: str) -> None:
        """It is out of reach from now on, until it can be connected again."""
        self._out_of_reach_s.setdefault(replica_id, self._clock.now())

    def reaches_none(self, registered: Collection[str], for_s: float) -> bool:
        """Whether all replicas have been out of reach for so long. Those that are dead do not stay registered."""
        latest_s = self._clock.now() - for_s
        since_s = [self._out_of_reach_s.get(replica_id, math.inf) for replica_id in registered]
        return bool(since_s) and max(since_s) <= latest_s

    def try_again(self, registered: Container[str]) -> None:
        """To be called at every heartbeat: whether those that were out of reach still are."""
        self._out_of_reach_s = {each: at_s for each, at_s in self._out_of_reach_s.items() if each in registered}
        self.begin(self._out_of_reach_s)

    async def open(self, replica_id: str) -> ReplicaConnection:
        """Concurrent callers share one attempt, and what follows if it fails.

        Raises:
            ReplicaLostError, ProtocolError: the replica cannot be reached, or must not be used.
            StateStoreError: where it is cannot be told.
        """
        return await asyncio.shield(self._attempt(replica_id))

    def begin(self, replica_ids: Iterable[str]) -> None:
        """To open one to each of these, where there is none. One that cannot be reached is tried at the next call."""
        for replica_id in replica_ids:
            self._attempt(replica_id)

    def _attempt(self, replica_id: str) -> "asyncio.Task[ReplicaConnection]":
        task = self._attempts.get(replica_id)
        if task is None:
            task = self._attempts[replica_id] = asyncio.create_task(self._connect(replica_id))
            task.add_done_callback(lambda ended: self._forget_failed(replica_id, ended))
        return task

    async def statuses(self) -> dict[str, dict[str, Any]]:
        """What each replica's engine says of itself, by replica id; one that does not answer has an `error`.

        Raises:
            StateStoreError: the shared state cannot be reached.
        """
        ids = [info.replica_id for info in await self._store.replica_infos()]
        return dict(zip(ids, await asyncio.gather(*map(self._status, ids)), strict=True))

    def missing(self, registered: Container[str]) -> list[ReplicaConnection]:
        """To be called at every heartbeat: those whose replicas are lost, swept out or dropped by another router.

        A replica that was dropped by mistake is registered again after its next heartbeat. Looks count and not seconds:
        while this process or the shared state stands still, the replica could not register either.
        """
        connections = self.all_open
        for connection in connections:
            is_registered = connection.info.replica_id in registered
            connection.missed_looks = 0 if is_registered else connection.missed_looks + 1
        return [connection for connection in connections if connection.missed_looks > self._lost_after_looks]

    def forget(self, connection: ReplicaConnection) -> bool:
        """Close it, so that the next request to its replica opens another; False when that was done before."""
        replica_id = connection.info.replica_id
        if self.get(replica_id) is not connection:
            return False
        del self._attempts[replica_id]
        connection.close()
        return True

    def close(self) -> None:
        for connection in self.all_open:
            connection.close()
        for attempt in self._attempts.values():
            attempt.cancel()

    async def _connect(self, replica_id: str) -> ReplicaConnection:
        info = await self._store.replica_info(replica_id)
        if info is None:
            raise ReplicaLostError(f"replica {replica_id} is not registered any more")
        try:
            connection = await ReplicaConnection.open(
                info, router_id=self._router_id, engine_version=self._engine_version, tls=self._tls
            )
        except Exception as error:  # of any kind: it is of no use from here
            self._metrics.out_of_reach.inc()
            if isinstance(error.__cause__, ConnectionRefusedError):
                await self._drop_dead(replica_id)
            else:
                self.fell_silent(replica_id)
            raise
        self._out_of_reach_s.pop(replica_id, None)
        self._opened(connection)
        return connection

    def _forget_failed(self, replica_id: str, attempt: "asyncio.Task[ReplicaConnection]") -> None:
        if attempt.cancelled():
            del self._attempts[replica_id]
        elif (error := attempt.exception()) is not None:
            logger.warning("replica %s cannot be reached: %s", replica_id, error)
            del self._attempts[replica_id]

    async def _drop_dead(self, replica_id: str) -> None:
        """Its machine answers, and its process does not listen any more. Drop it where requests were given to it, and
        not again at once: one that comes back lives, and others who reach it must not miss it.

        Whether one is dead of which no word comes at all its heartbeat tells: others may reach it.
        """
        if not self._is_needed(replica_id):
            return
        now_s = self._clock.now()
        self._dropped_s = {known: at_s for known, at_s in self._dropped_s.items() if now_s - at_s < self._drop_after_s}
        if replica_id in self._dropped_s:
            await asyncio.sleep(self._dropped_s[replica_id] + self._drop_after_s - now_s)
        self._dropped_s[replica_id] = self._clock.now()
        await self._drop(replica_id)

    async def _status(self, replica_id: str) -> dict[str, Any]:
        """One that can be reached has the same time again to answer."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                connection = await self.open(replica_id)
            return dict(await connection.call("status", timeout_s=STATUS_TIMEOUT_S))
        except TimeoutError:
            return {"error": f"replica {replica_id} is out of reach"}
        except SluiceError as error:
            return {"error": str(error)}
