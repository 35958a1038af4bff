"""Background tasks whose failures are seen."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from policies.errors import StateStoreError

logger = logging.getLogger(__name__)


class BackgroundTasks:
    """Keeps running tasks alive, logs those that fail, and ends all of them on `close`."""

    def __init__(self, failed: Callable[[str], object]) -> None:
        """Args:
        failed: is called with the name of each task that fails.
        """
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def repeat(self, call: Callable[[], Awaitable[None]], pause_s: float, name: str) -> None:
        """Call it for ever, pausing after each end. Failures do not stop it: without its heartbeat a router is dead."""
        self.spawn(self._repeat(call, pause_s, name), name)

    async def _repeat(self, call: Callable[[], Awaitable[None]], pause_s: float, name: str) -> None:
        while True:
            try:
                await call()
            except StateStoreError as error:
                logger.warning("%s waits for the shared state: %s", name, error)
            except Exception as error:
                self._note(name, error)
            await asyncio.sleep(pause_s)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(task.get_name(), error)

    def _note(self, name: str, error: BaseException) -> None:
        self._failed(name)
        logger.error("background task %s failed", name, exc_info=error)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
