"""What the shared state knows of a replica: that it is there, the slots that it offers, and which of them are free."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from deployments.engines.base import Engine
from deployments.engines.on_board import OnBoard
from policies.errors import StateStoreAccessError, StateStoreError
from policies.live import Live
from router.state_store import ReplicaInfo, StateStore

logger = logging.getLogger(__name__)

# While the shared state was away routers sent requests that it knows nothing of; some may arrive as it comes back.
REGISTRATIONS_AFTER_AN_ABSENCE = 2


class Registration:
    """One replica's; its relay calls `beat` and `release` again and again.

    Attributes:
        info: as it registers.
        offers: whether it offers slots: not before it has started, nor once it drains.
    """

    def __init__(
        self,
        *,
        info: ReplicaInfo,
        store: StateStore,
        engine: Engine,
        board: OnBoard,
        lookahead: Live[int],
        heartbeat_s: float,
        lease_s: float,
        is_healthy: Callable[[], bool],
    ) -> None:
        """Args:
        lookahead: slots offered beyond the engine's own.
        is_healthy: while it is not, the replica says nothing: the routers take it out of the tables.
        """
        self.info, self.offers = info, False
        self._store, self._engine, self._board, self._lookahead = store, engine, board, lookahead
        self._heartbeat_s, self._lease_s, self._is_healthy = heartbeat_s, lease_s, is_healthy
        self._due = 0  # registrations, to tell what runs here

    @property
    def slots(self) -> int:
        """What this replica offers to the routers."""
        if not self.offers:
            return 0
        if self._board.prefill is not None:
            return min(self._engine.slots, self._board.prefill.offered(self._board.prompt_lengths))
        return self._engine.slots + self._lookahead.now

    # Its start and its end

    async def register(self, give_up_s: float) -> None:
        """Raises StateStoreError: the shared state has not answered until then, by `time.monotonic`."""
        await self.patiently(lambda: self._store.register_replica(self.info, self.slots), give_up_s)

    async def patiently(self, call: Callable[[], Awaitable[None]], give_up_s: float) -> None:
        """Call it at every heartbeat until the shared state has answered. Raises as `register`, and as `call` does."""
        while True:
            try:
                await call()
                return
            except StateStoreAccessError:
                raise
            except StateStoreError as error:
                if not self._is_healthy() or time.monotonic() >= give_up_s:
                    raise
                logger.warning("the start waits for the shared state: %s", error)
            await asyncio.sleep(self._heartbeat_s)

    async def offer(self, offers: bool) -> None:
        self.offers = offers
        try:
            await self._tell()
        except StateStoreError as error:
            logger.warning("the next heartbeat will tell what this replica offers: %s", error)

    async def drain(self, serving_s: float) -> None:
        """Offer no more slots, and return when the last request has ended.

        Args:
            serving_s: for how long requests that wait are still taken where no other replica would take them.
        """
        give_up_s = time.monotonic() + serving_s
        await self.offer(False)
        while time.monotonic() < give_up_s and await self._is_last_resort():
            await self.offer(True)
            await asyncio.sleep(self._heartbeat_s)
            await self.offer(False)  # before it looks: of two that leave at once, one sees the other gone
        await self._board.idle.wait()
        while await self._is_awaited():
            await asyncio.sleep(self._heartbeat_s)
            await self._board.idle.wait()

    async def _is_last_resort(self) -> bool:
        """Requests wait that this replica takes, and none of the others that offer slots."""
        try:
            snapshot, infos = await self._store.snapshot(), await self._store.replica_infos()
        except StateStoreError:
            return False
        loads, mine = snapshot.replicas, self.info.replica_id
        offering = [i for i in infos if i.replica_id != mine and i.replica_id in loads and loads[i.replica_id].slots]
        waiting = {slo_class for (slo_class, _), count in snapshot.lanes.items() if count}
        return self._is_healthy() and any(
            self.info.takes(slo_class) and not any(info.takes(slo_class) for info in offering) for slo_class in waiting
        )

    async def _is_awaited(self) -> bool:
        """Requests that it was given are on their way; those that do not come lose their slots to the lease."""
        try:
            load = (await self._store.snapshot()).replicas.get(self.info.replica_id)
        except StateStoreError:
            return False
        return self._is_healthy() and load is not None and load.running > 0

    async def leave(self) -> None:
        try:
            await self._store.drop_replica(self.info.replica_id)
        except StateStoreError as error:
            logger.warning("left without a word to the shared state: %s", error)

    # Again and again

    async def release(self) -> None:
        """Give back the slots of requests that have ended, as soon as there are some, in one call.

        Raises:
            StateStoreError: it does not answer; the next call tells what this one did not.
        """
        await self._board.changed.wait()
        self._board.changed.clear()
        if not self._is_healthy():
            return  # a slot of a dead engine is no slot
        slots, reading = self._board.slots, self._board.prompts.report()
        try:
            await self._store.release(self.info.replica_id, slots.to_release(), reading=reading)
        except StateStoreError:
            slots.not_released()
            self._board.prompts.not_heard(reading.read, slots.held)
            self._board.changed.set()
            await asyncio.sleep(self._heartbeat_s)
            raise
        slots.released()

    async def beat(self) -> None:
        """Tell what this replica offers, and hear which requests were assigned to it.

        Raises:
            StateStoreError: it does not answer; it is told all that runs here once it does.
        """
        if not self._is_healthy():
            return  # the sweep takes this replica out of the tables
        self._board.slots.sends_heartbeat()
        try:
            assigned = await self._tell()
        except StateStoreError:
            self._due = REGISTRATIONS_AFTER_AN_ABSENCE
            raise
        if assigned is None or self._due:
            await self._register_again()
        elif never_came := self._board.slots.never_came(assigned):
            logger.warning("%d assigned requests never came, releasing their slots", len(never_came))
            await self._store.release(self.info.replica_id, never_came, self._lease_s)

    async def _register_again(self) -> None:
        logger.warning("telling the shared state what this replica runs")
        board = self._board
        await self._store.register_replica(self.info, self.slots, list(board.slots.held), board.slowness)
        self._due = max(0, self._due - 1)
        board.prompts.not_heard(board.answering, board.slots.held)

    async def _tell(self) -> list[str] | None:
        """As `StateStore.beat_replica`."""
        board, reading, sizes = self._board, self._board.prompts.report(), self._engine.gang_sizes
        try:
            return await self._store.beat_replica(
                self.info.replica_id, self.slots, self._lease_s, board.slowness, sizes, reading
            )
        except StateStoreError:
            board.prompts.not_heard(reading.read, board.slots.held)
            raise

    async def ask_for_due_batches(self) -> None:
        """While idle: only time makes a gang batch of what waits."""
        if self._is_healthy() and self._board.idle.is_set() and self.offers:
            await self._store.dispatch()
