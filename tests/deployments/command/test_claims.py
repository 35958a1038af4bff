"""The address and the folder of a start: what is taken is told before anything starts."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from deployments.command.claims import check_address, fresh_run_dir
from deployments.process.ports import free_port
from policies.errors import ApplicationStartError
from tests.integration.application import REPOSITORY

# Takes the folder of a port, leaves a process of its own behind, prints the pid of that, and waits to be killed.
HOLDER = """
import subprocess, sys, time
from deployments.command.claims import fresh_run_dir
from policies.errors import ApplicationStartError
try:
    run_dir = fresh_run_dir(int(sys.argv[1]))
except ApplicationStartError as error:
    sys.exit(str(error))
(run_dir / "log").touch()
nowhere = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "300"], stdout=nowhere, stderr=nowhere).pid, flush=True)
time.sleep(300)
"""


def test_a_host_may_be_a_name_or_an_address_of_either_family() -> None:
    assert check_address("::1", free_port()) == "::1"
    assert check_address("127.0.0.1", free_port()) == "127.0.0.1"
    assert check_address("localhost", free_port()) in ("127.0.0.1", "::1")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_host_that_no_host_can_be_is_told(host: str) -> None:
    with pytest.raises(ApplicationStartError, match="Is --host right"):
        check_address(host, free_port())


def test_an_address_in_use_is_named_in_brackets() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ApplicationStartError, match=rf"cannot serve on \[::1\]:{port}: .*--port"):
            check_address("::1", port)


@contextmanager
def holder(port: int) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process | None]]:
    """A process that takes the port's folder, and what it has started; None where it was refused."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    child = psutil.Process(int(line)) if line else None
    try:
        yield process, child
    finally:
        process.kill()
        process.communicate()
        if child is not None:
            child.kill()


@pytest.mark.slow
def test_a_second_start_leaves_the_folder_of_the_first_alone_until_that_is_killed() -> None:
    port = free_port()
    run_dir = Path(tempfile.gettempdir(), f"sluice-{os.getuid():x}-{port}")
    try:
        with holder(port) as (first, left_behind):
            assert left_behind is not None
            with holder(port) as (second, nothing):
                assert nothing is None and "running there already" in second.communicate()[1]
            assert (run_dir / "log").exists()
            first.kill()
            first.wait()
            assert left_behind.is_running()
            with holder(port) as (_, started):
                assert started is not None
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.with_name(f"{run_dir.name}.lock").unlink(missing_ok=True)


def test_a_lock_that_leads_elsewhere_is_refused_by_name(tmp_path: Path) -> None:
    port = free_port()
    lock = Path(tempfile.gettempdir(), f"sluice-{os.getuid():x}-{port}.lock")
    lock.symlink_to(tmp_path / "elsewhere")
    try:
        with pytest.raises(ApplicationStartError, match=rf"{lock}: .*TMPDIR"):
            fresh_run_dir(port)
        assert not (tmp_path / "elsewhere").exists()
    finally:
        lock.unlink()


@pytest.mark.parametrize("host", ["fe80::nonsense", "192.0.2.1"])
def test_a_host_that_is_not_here_is_refused_before_anything_starts(host: str) -> None:
    with pytest.raises(ApplicationStartError, match="cannot serve on"):
        check_address(host, 8000)
