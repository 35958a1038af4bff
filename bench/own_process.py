"""A call in a process of its own, which has ended when the call returns.

An engine that is only dropped keeps memory: of a GPU all its weights. What a process had is given back when it ends.
"""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns; it, its arguments and its result must be picklable.

    Raises:
        BrokenProcessPool: the process died.
        Exception: what the function raised.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _end_with_parent() -> None:
    """A killed parent cannot end its engine, which would keep the GPU: a thread in the child watches the parent."""
    parent = parent_process()
    assert parent is not None
    threading.Thread(target=_kill_after, args=(parent.sentinel,), daemon=True, name="end-with-parent").start()


def _kill_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
