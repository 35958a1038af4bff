"""From the start of a replica to its end, which may come while it still starts."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from deployments.process.watch import watched_loop
from policies.errors import SluiceError

T = TypeVar("T")


class Lifetime:
    """Ray Serve awaits a replica's `__del__` beside a constructor that still loads a model or waits for Redis.

    What the constructor opened after that would stay open, and what it registered would be given requests. So the start
    is called off first, and all that it has opened by then is closed, once. Between start and end its loop is watched.
    """

    def __init__(self) -> None:
        self.resources = AsyncExitStack()
        self._starting: asyncio.Task[Any] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self, opening: Coroutine[Any, Any, T]) -> T:
        """What `opening` returns. When this raises, all that it had opened is closed.

        Raises:
            SluiceError: the start was called off.
            Exception: its own.
        """
        self._starting = starting = asyncio.create_task(opening)
        try:
            opened = await starting
            if self._ending is None:
                self.resources.enter_context(watched_loop())
            return opened
        except BaseException as error:  # of any kind: it keeps no GPU, and routers find it no more
            called_off = self._ending is not None
            await self.end()
            if called_off:
                raise SluiceError("told to end before it had started") from error
            raise

    async def end(self) -> None:
        """However often it is called, once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await self.resources.aclose()
