"""Responses that this router makes in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deployments.responses.store import LEASE_S, Encoded, Lease, NoRoomError, Place, ResponseStore, TakenError
from policies.errors import SluiceError, StateStoreError
from router.background import BackgroundTasks
from router.clock import Clock
from router.timing import HttpContext, current

logger = logging.getLogger(__name__)

BEAT_S = 1.0  # a cancelled response may go on for this long
_TASK = "background response"


@dataclass(slots=True, eq=False)
class _Making:
    """A response that is being made.

    Attributes:
        size: bytes of its request, which stay in memory until its end.
        context: the context of its requests to engines, as if a client waited for them.
        queued: done once an engine has it before it, or with the error that kept it from there.
        unwanted: its end is not told.
    """

    lease: Lease
    size: int
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
    """All background responses of one router. Their number is bounded as that of all requests, by the queue and the
    slots of engines: one that may not queue is refused before its client has its id.

    Attributes:
        store: where they are told.
    """

    def __init__(self, store: ResponseStore, tasks: BackgroundTasks, clock: Clock, *, max_bytes: int) -> None:
        """Args:
        max_bytes: the bytes of the requests of all of them together.
        """
        self.store, self._tasks, self._clock, self._max_bytes = store, tasks, clock, max_bytes
        self._making: set[_Making] = set()

    def keep_alive(self) -> None:
        """Give signs of life for them from now on."""
        self._tasks.repeat(self._beat, BEAT_S, "background responses")

    async def start(
        self,
        place: Place,
        queued: Encoded,
        context: HttpContext,
        make: Callable[[], Awaitable[Encoded]],
        *,
        size: int = 0,
    ) -> None:
        """Returns once it is in the queue of the engines. It is made in a task of its own, in this context.

        Raises:
            TakenError, NoRoomError, StateStoreError: it cannot be stored.
            Exception: the error that kept `make` from the queue.
        """
        if sum(making.size for making in self._making) + size > self._max_bytes:
            raise self.store.no_room("no room for another response in the background (router.max_buffered_bytes)")
        making = _Making(Lease.of(place), size, context, asyncio.get_running_loop().create_future())
        self._making.add(making)
        try:
            await self.store.begin(making.lease, queued)
            context.on_queued = making.note_queued
            making.task = self._tasks.spawn(self._run(making, make), _TASK)
            await making.queued
        except (TakenError, NoRoomError):
            self._making.discard(making)
            raise
        except BaseException:  # refused, or its client has left without its id
            await self._withdraw(making)
            raise

    async def _withdraw(self, making: _Making) -> None:
        making.stop()
        self._making.discard(making)
        try:
            await self.store.withdraw(making.lease)
        except StateStoreError as error:
            logger.warning("%s fails when its lease ends: %s", making.lease.place.shown, error)

    async def _run(self, making: _Making, make: Callable[[], Awaitable[Encoded]]) -> None:
        current.set(making.context)
        try:
            await self._complete(making.lease, await make())
            making.note_queued()  # where no engine was asked
        except Exception as error:
            if not making.queued.done():
                making.queued.set_exception(error)
            elif not making.unwanted:
                await self._fail(making, error)
        finally:
            self._making.discard(making)
            making.queued.cancel()
            await making.context.end()

    async def _complete(self, lease: Lease, encoded: Encoded) -> None:
        """Redis may be away for as long as the lease lasts."""
        give_up_s = self._clock.now() + LEASE_S
        while True:
            try:
                await self.store.complete(lease, encoded)
                return
            except StateStoreError:
                if self._clock.now() > give_up_s:
                    raise
            await asyncio.sleep(BEAT_S)

    async def _fail(self, making: _Making, error: Exception) -> None:
        """Raises an error that is not one of ours, of which its client is told no more than that."""
        known = making.context.refusal or (error if isinstance(error, SluiceError) else None)
        await self.store.fail(making.lease, str(known) if known else "the response could not be made: ask again")
        if known is None:
            raise error

    async def _beat(self) -> None:
        begun = {making.lease: making for making in self._making if making.task is not None}
        if begun:
            for lease in await self.store.beat({lease: making.status for lease, making in begun.items()}):
                begun[lease].stop()

    async def drain(self, timeout_s: float) -> None:
        """Return when all of them have ended, or after this time."""
        if tasks := [making.task for making in self._making if making.task is not None]:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def close(self) -> None:
        """End all of them as failed, with the reason."""
        left = list(self._making)
        for making in left:
            making.stop()
        await self._tasks.close()
        told = await asyncio.gather(*(self._tell_stopped(making.lease) for making in left), return_exceptions=True)
        if lost := [each for each in told if each is not None]:
            logger.warning("%d responses in the background fail when their leases end: %r", len(lost), lost[0])

    async def _tell_stopped(self, lease: Lease) -> None:
        await self.store.fail(lease, "the router that made this response was stopped: ask again")
