"""Processes that end with the one that started them."""

import ctypes
import os
import signal
import threading
from multiprocessing import connection, parent_process

# Looked up before any fork: between fork and exec another thread's lock may be held for ever.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, signal.SIGTERM)


def watch_parent() -> None:
    """Kill this process, which `multiprocessing` has started, when the one that started it ends, however that ends.

    Unlike `die_with_parent`, which ends with the thread that started the process.
    """
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True, name="end-with-parent").start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
