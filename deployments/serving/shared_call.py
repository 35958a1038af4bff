"""One answer for all who ask the same within a moment."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from router.clock import Clock

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A costly call: it runs once at a time, and what it returns is everybody's for `fresh_s` from its beginning.

    So a result is no older than that, or than the call takes. A failed call is made again.
    """

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]], fresh_s: float, clock: Clock) -> None:
        self._call, self._fresh_s, self._clock = call, fresh_s, clock
        self._running: asyncio.Task[T] | None = None
        self._began_s = -math.inf

    async def get(self) -> T:
        """Raises what the call raises."""
        if self._running is None or self._is_over(self._running):
            self._began_s = self._clock.now()
            self._running = asyncio.create_task(self._call())
        return await asyncio.shield(self._running)  # where one leaves, the others wait for it

    def _is_over(self, task: "asyncio.Task[T]") -> bool:
        if not task.done():
            return False
        stale = self._clock.now() - self._began_s >= self._fresh_s
        return stale or task.cancelled() or task.exception() is not None
