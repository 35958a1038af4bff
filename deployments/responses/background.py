"""Responses that this router makes while nobody waits for them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deployments.responses.store import LEASE_S, Encoded, Place, ResponseStore
from policies.errors import SluiceError, StateStoreError
from router.background import BackgroundTasks
from router.clock import Clock
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # so long a cancelled one may go on
_TASK = "background response"


@dataclass(slots=True, eq=False)
class _Making:
    """One that is being made.

    Attributes:
        context: of its requests to engines, as if a client waited for them.
        queued: done once an engine has it before it, or with the error that kept it from there.
        unwanted: nobody is told of its end.
    """

    context: HttpContext
    queued: "asyncio.Future[None]"
    task: "asyncio.Task[None] | None" = None
    unwanted: bool = False

    @property
    def status(self) -> str:
        started = any(timing.assigned_s is not None for timing in self.context.timings)
        return "in_progress" if started else "queued"

    def note_queued(self) -> None:
        if not self.queued.done():
            self.queued.set_result(None)

    def stop(self) -> None:
        self.unwanted = True
        if self.task is not None:
            self.task.cancel()


class BackgroundResponses:
    """All of one router. How many there are is bounded as all requests are, by the queue and the slots of engines: one
    that may not queue is refused before its client has its id.

    Attributes:
        store: where they are told.
    """

    def __init__(self, store: ResponseStore, tasks: BackgroundTasks, clock: Clock) -> None:
        self.store, self._tasks, self._clock = store, tasks, clock
        self._making: dict[Place, _Making] = {}

    def keep_alive(self) -> None:
        """Tell from now on that they are being made."""
        self._tasks.repeat(self._beat, BEAT_S, "background responses")

    async def start(
        self, place: Place, queued: Encoded, context: HttpContext, make: Callable[[], Awaitable[Encoded]]
    ) -> None:
        """Returns once it is in the queue of the engines. It is made in a task of its own, in this context.

        Raises:
            TakenError, NoRoomError, StateStoreError: it cannot be stored.
            Exception: whatever kept `make` from the queue.
        """
        await self.store.begin(place, queued)
        making = _Making(context, asyncio.get_running_loop().create_future())
        context.on_queued = making.note_queued
        self._making[place] = making
        making.task = self._tasks.spawn(self._run(place, making, make), _TASK)
        try:
            await making.queued
        except BaseException:  # refused, or its client has left without its id
            making.stop()
            await self.store.delete(place)
            raise

    async def _run(self, place: Place, making: _Making, make: Callable[[], Awaitable[Encoded]]) -> None:
        current.set(making.context)
        try:
            await self._complete(place, await make())
            making.note_queued()  # where no engine was asked
        except Exception as error:
            if not making.queued.done():
                making.queued.set_exception(error)
            elif not making.unwanted:
                await self._fail(place, making, error)
        finally:
            del self._making[place]
            making.queued.cancel()
            await making.context.end()

    async def _complete(self, place: Place, encoded: Encoded) -> None:
        """Redis may be away for as long as the lease lasts."""
        give_up_s = self._clock.now() + LEASE_S
        while True:
            try:
                await self.store.complete(place, encoded)
                return
            except StateStoreError:
                if self._clock.now() > give_up_s:
                    raise
            await asyncio.sleep(BEAT_S)

    async def _fail(self, place: Place, making: _Making, error: Exception) -> None:
        """Raises an error that is not one of ours, of which its client is told no more than that."""
        known = making.context.refusal or (error if isinstance(error, SluiceError) else None)
        await self.store.fail(place, str(known) if known else "the response could not be made: ask again")
        if known is None:
            raise error

    async def _beat(self) -> None:
        if not self._making:
            return
        statuses = {place: making.status for place, making in self._making.items()}
        for place in await self.store.beat(statuses):
            if (making := self._making.get(place)) is not None:
                making.stop()

    async def close(self) -> None:
        """None of them is completed: they end as failed, and say why."""
        left = list(self._making)
        for making in self._making.values():
            making.stop()
        await self._tasks.close()
        for place in left:
            try:
                await self.store.fail(place, "the router that made this response was stopped: ask again")
            except StateStoreError as error:
                logger.warning("%s fails when its lease ends: %s", place.response_id, error)
