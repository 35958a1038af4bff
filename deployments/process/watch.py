"""A process whose event loop hangs ends itself; one whose loop only waits for a core does not.

Ray Serve cannot tell the two apart: it ends a silent replica, and on a busy machine all of them are silent.
"""

import asyncio
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.event_loop import CoreWait

HANG_S = 90.0  # Ray Serve's own time, by its defaults, until it replaces a replica that does not answer
logger = logging.getLogger(__name__)


@contextmanager
def watched_loop(hang_s: float = HANG_S, end: Callable[[], object] = lambda: os._exit(1)) -> Iterator[None]:
    """For the time of the block, which is entered in the loop: call `end`, in a thread, once the loop hangs.

    A loop that stands in a C function and keeps Python's lock is not seen.
    """
    over = threading.Event()
    watch = threading.Thread(
        target=_watch,
        args=(asyncio.get_running_loop(), threading.get_ident(), CoreWait(), over, hang_s, end),
        name="watch",
        daemon=True,
    )
    watch.start()
    try:
        yield
    finally:
        over.set()


def _watch(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    core_wait: CoreWait,
    over: threading.Event,
    hang_s: float,
    end: Callable[[], object],
) -> None:
    look_s = min(1.0, hang_s / 4)
    while not over.wait(look_s):
        turned, waited_s, looks = threading.Event(), core_wait.seconds(), 0
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed
            return
        while not turned.wait(look_s) and not over.is_set():
            looks += 1  # not by a clock, which goes on while the whole process is stopped, or starves
            if looks * look_s - (core_wait.seconds() - waited_s) >= hang_s:
                logger.critical("the event loop hangs, this process ends:\n%s", _stack(thread))
                end()
                return


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else "its thread has ended"
