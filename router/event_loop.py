"""How long an event loop stands still, and how much of that it waits for a core."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_S = 0.05
CORE_WAIT_LOOK_S = 1.0  # no more often: each look reads a file


async def look_for_lag(observe: Callable[[float], object]) -> None:
    """One look: by how many seconds a wait of LOOK_S ends late."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + LOOK_S
    await asyncio.sleep(LOOK_S)
    observe(max(0.0, loop.time() - due_s))


class CoreWait:
    """For how many seconds the thread that makes it has been ready to run, with every core taken; as Linux counts it.

    0 where it does not (/proc/PID/task/TID/schedstat: microseconds to read).

    Attributes:
        can_look: the last look succeeded.
    """

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._seconds, self.can_look = 0.0, True

    def seconds(self) -> float:
        """Since the thread began, as of the last look that succeeded; any thread may ask."""
        try:
            _, waited_ns, _ = self._file.read_text().split()
            self._seconds, self.can_look = int(waited_ns) / 1e9, True
        except (OSError, ValueError):  # a kernel without it, or a process that can open no file
            self.can_look = False
        return self._seconds


async def look_for_core_wait(core_wait: CoreWait, observe: Callable[[float], object]) -> None:
    """One look: for how many seconds out of CORE_WAIT_LOOK_S its thread has waited for a core.

    It opens a file, so it tells where this process can open none: libuv then ends new connections without a word.
    """
    before_s, could_look = core_wait.seconds(), core_wait.can_look
    await asyncio.sleep(CORE_WAIT_LOOK_S)
    observe(core_wait.seconds() - before_s)
    if could_look and not core_wait.can_look:
        logger.error("no file can be opened: until some are closed, new connections are ended unread (see ulimit -n)")
