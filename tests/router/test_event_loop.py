"""How long a thread waits for a core, as Linux counts it."""

import os
import subprocess
import sys
import time

from router.event_loop import CoreWait
from tests.waiting import PATIENCE_S


def test_the_system_says_for_how_long_a_thread_waits_for_a_core() -> None:
    """Beside another one on the only core that both may use."""
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(cores)])
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
            core_wait = CoreWait()
            give_up_s = time.monotonic() + PATIENCE_S
            while core_wait.seconds() < 0.05 and time.monotonic() < give_up_s:
                pass
            neighbour.kill()
        assert core_wait.seconds() >= 0.05
    finally:
        os.sched_setaffinity(0, cores)
