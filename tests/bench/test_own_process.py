"""Calls in processes of their own."""

import os
import sys
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest

from bench.own_process import in_own_process
from tests.waiting import wait_until

ASKING = "import time; from bench.own_process import in_own_process; in_own_process(time.sleep, 600)"


def test_each_call_has_a_process_that_is_gone_when_it_returns() -> None:
    first, second = in_own_process(os.getpid), in_own_process(os.getpid)
    assert len({first, second, os.getpid()}) == 3
    assert not psutil.pid_exists(first) and not psutil.pid_exists(second)


def test_what_the_function_raises_comes_back() -> None:
    with pytest.raises(ValueError, match="elephant"):
        in_own_process(int, "elephant")


def test_a_process_that_dies_is_told_of() -> None:
    with pytest.raises(BrokenProcessPool):
        in_own_process(os._exit, 3)


def test_nothing_outlives_a_parent_that_is_killed() -> None:
    with psutil.Popen([sys.executable, "-c", ASKING]) as asking:
        wait_until(lambda: any("spawn_main" in _line(child) for child in asking.children()), 60, "its process")
        children = asking.children(recursive=True)
        asking.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
