"""How long a thread waits for a core, as Linux counts it."""

import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from router import event_loop
from router.event_loop import CoreWait, look_for_core_wait
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


async def test_where_no_file_can_be_opened_it_has_waited_as_long_as_before_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that fell would count no more, and then all that it had counted once again."""
    monkeypatch.setattr(event_loop, "CORE_WAIT_LOOK_S", 0.01)
    core_wait, observed = CoreWait(), list[float]()
    core_wait._file = tmp_path / "schedstat"
    core_wait._file.write_text("1 5000000000 1")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    look = asyncio.create_task(look_for_core_wait(core_wait, observed.append))
    await asyncio.sleep(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
    try:
        await look
        await look_for_core_wait(core_wait, observed.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    await look_for_core_wait(core_wait, observed.append)
    assert (observed, core_wait.seconds()) == ([0.0] * 3, 5.0)
    (record,) = caplog.records
    assert "no file can be opened" in record.message
