"""What processes of a node write to the standard output of whatever started Ray there: real pipes and processes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.process.node_output import MOST_WAITING_BYTES, NodeOutput
from tests.integration.application import REPOSITORY
from tests.waiting import PATIENCE_S, wait_until

# Three processes deep, as Ray is: a node, its raylet, and the raylet's workers, each with a file of its own.
NODE = """
import os, subprocess, sys
RAYLET = '''
import os, subprocess, sys
for number, script in enumerate(sys.argv[2:]):
    with open(os.path.join(sys.argv[1], f"worker-{number}.err"), "w") as file:
        env = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
        subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.DEVNULL, stderr=file)
os.wait()
'''
subprocess.run([sys.executable, "-c", RAYLET, *sys.argv[1:]], stdout=subprocess.DEVNULL, check=True)
"""
BEGIN = """
import logging, os, sys
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
log_by(LogSettings(to="stdout", format="{}"))
log = logging.getLogger("router.routed_client").info
"""


@contextmanager
def node(folder: Path, *workers: str, log_format: str = "json") -> Iterator[subprocess.Popen[bytes]]:
    """Its standard output is a pipe, which nobody has read yet."""
    scripts = [BEGIN.format(log_format) + worker for worker in workers]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", NODE, str(folder), *scripts]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as started:
        try:
            yield started
        finally:
            started.kill()


def read(started: subprocess.Popen[bytes]) -> list[str]:
    """To its end: until the last process that writes has ended."""
    assert started.stdout is not None
    return started.stdout.read().decode().splitlines()


def test_a_line_arrives_on_the_output_of_what_started_ray_and_in_the_file(tmp_path: Path) -> None:
    with node(tmp_path, 'log("served", extra={"request_id": "q7"})') as started:
        (line,) = map(json.loads, read(started))
    assert (line["message"], line["request_id"], line["levelname"]) == ("served", "q7", "INFO")
    assert json.loads((tmp_path / "worker-0.err").read_text()) == line


def test_lines_for_people_hold_all_on_one_line(tmp_path: Path) -> None:
    extra = {"request_id": "q7", "error": "no\nline=2", "model": "\x1b[31m", "replicas": ["a", "b"], "moves": None}
    said = f'log("\\x1b[36mrequest\\x1b[0m", extra={extra!r})'
    with node(tmp_path, said, log_format="human") as started:
        (line,) = read(started)
    told = (
        r'.* INFO    router\.routed_client: request request_id=q7 error="no\\nline=2" model="\\u001b\[31m" replicas=a,b'
    )
    assert re.fullmatch(told, line), line


def test_long_lines_of_several_processes_arrive_whole(tmp_path: Path) -> None:
    """A pipe takes no more than 4096 bytes of a line at once. On a busy machine a process may leave lines out, and one
    that never got the lock before its end all of them: the system gives it to the first that asks."""
    workers = [f'for number in range(200): log("{name}" * 30_000)' for name in "abc"]

    def found(folder: Path) -> set[tuple[str, int]]:
        folder.mkdir()
        with node(folder, *workers) as started:
            messages = [json.loads(line)["message"] for line in read(started)]
        arrived = [message for message in messages if "lines are missing" not in message]
        return {("".join(sorted(set(message))), len(message)) for message in arrived}

    rounds = [found(tmp_path / str(number)) for number in range(3)]
    assert set().union(*rounds) <= {(name, 30_000) for name in "abc"}
    assert max(map(len, rounds)) >= 2, "lines of several processes"


FLOOD = """
for number in range({lines}): log("%d %s", number, "x" * 1000)
print("done", file=sys.__stderr__, flush=True)
sys.stdin.read()
"""


def test_nobody_waits_for_an_output_that_stands_still_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    """The worker has written all, and goes on, before the output is read; then the next line comes after the count."""
    lines = 3 * MOST_WAITING_BYTES // 1000
    with node(tmp_path, f"import time\n{FLOOD.format(lines=lines)}") as started:
        file = tmp_path / "worker-0.err"
        wait_until(lambda: file.exists() and "done" in file.read_text()[-10:], PATIENCE_S, "it has written all")
        messages = [json.loads(line)["message"] for line in read(started)]
    counted = [re.fullmatch(r"(\d+) lines are missing in standard output, .*", each) for each in messages]
    left_out = sum(int(found[1]) for found in counted if found)
    arrived = [int(each.split()[0]) for each, found in zip(messages, counted, strict=True) if not found]
    assert arrived == sorted(arrived) and len(arrived) + left_out == lines
    assert left_out > lines // 3
    assert sum("x" * 1000 in line for line in file.read_text().splitlines()) == lines, "the file has all"


def test_an_output_that_is_gone_is_told_once_and_the_file_goes_on(tmp_path: Path) -> None:
    script = 'import time\nlog("one")\nsys.stdin.readline()\nfor _ in range(1000): log("two"); time.sleep(0.001)'
    with node(tmp_path, script) as started:
        assert started.stdout is not None
        started.stdout.close()
        started.wait(PATIENCE_S)
    told = [json.loads(line)["message"] for line in (tmp_path / "worker-0.err").read_text().splitlines()]
    assert sum("takes no more lines" in each for each in told) == 1
    assert told.count("two") == 1000


@pytest.mark.parametrize("raylet", [None, "1"])
def test_where_there_is_nothing_to_write_to_the_file_says_so(raylet: str | None) -> None:
    """No Ray, or a process that nobody has started: not even that of another user."""
    env: dict[str, Any] = {name: value for name, value in os.environ.items() if name != "RAY_RAYLET_PID"}
    env |= {} if raylet is None else {"RAY_RAYLET_PID": raylet}
    script = BEGIN.format("json") + 'log("served")'
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    why, line = map(json.loads, done.stderr.splitlines())
    assert why["levelname"] == "WARNING" and "logs.to: stdout has nothing to write to" in why["message"]
    assert line["message"] == "served"


def test_after_a_full_disk_it_goes_on_and_says_how_many_lines_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    output, (readable, writable) = os.open("/dev/full", os.O_WRONLY), os.pipe()
    written = NodeOutput(output)
    for number in range(3):
        written.write(f"lost {number}")
    wait_until(lambda: not written._waiting, PATIENCE_S, "they are tried")
    os.dup2(writable, output)
    written.write("there is room again")
    assert os.read(readable, 1000) == b"there is room again\n"
    wait_until(lambda: caplog.records, PATIENCE_S, "it is said")
    assert caplog.records[-1].getMessage().startswith("3 lines are missing")
