"""Processes that end with the one that started them."""

import ctypes
import signal

# Looked up before any fork: between fork and exec another thread's lock may be held for ever.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, signal.SIGTERM)
