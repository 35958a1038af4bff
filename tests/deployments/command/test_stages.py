"""What a start says of itself: with a terminal and without, and what processes tell by way of a file."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from deployments.command.stages import Stages
from deployments.process.stages import STAGES_ENV, note_stage
from tests.waiting import PATIENCE_S, wait_until


def whats(output: io.StringIO) -> list[str]:
    """Without the seconds before each."""
    return [line.partition(" s  ")[2] or line for line in output.getvalue().splitlines()]


def test_without_a_terminal_each_stage_has_a_line_with_the_seconds_so_far() -> None:
    output = io.StringIO()
    with Stages(output) as stages:
        stages.begin("starting Ray")
        stages.say("logs: here")
        stages.begin("deploying")
    seconds = [float(line.partition(" s  ")[0]) for line in output.getvalue().splitlines() if " s  " in line]
    assert whats(output) == ["starting Ray", "logs: here", "deploying"]
    assert seconds == sorted(seconds) and len(seconds) == 2
    assert "\x1b" not in output.getvalue() and "\r" not in output.getvalue()


def test_a_stage_that_takes_long_says_again_what_is_waited_for_and_how_busy_the_machine_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.command.stages.STILL_S", 0.3)
    output = io.StringIO()
    with Stages(output) as stages:
        stages.begin("starting Ray")
        wait_until(lambda: len(whats(output)) >= 3, PATIENCE_S, "it says so twice")
        stages.begin("deploying")
    first, *again, last = whats(output)
    assert (first, last) == ("starting Ray", "deploying")
    still = re.compile(r"still starting Ray \(\d+ s; the machine has a load of \d+ on \d+ cores?\)")
    assert all(still.fullmatch(line) for line in again)


def test_a_line_that_counts_is_no_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.command.stages.STILL_S", 0.0)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 30))
    with os.fdopen(theirs, "w") as output, Stages(output) as stages:
        stages.begin("starting Ray")
        drawn = os.read(ours, 4096)
    os.close(ours)
    assert b"still starting" in drawn and len(drawn.removeprefix(b"\r\x1b[K")) < 30


def test_what_other_processes_tell_is_shown_as_it_comes_and_numbered_by_process(tmp_path: Path) -> None:
    output, file = io.StringIO(), tmp_path / "stages"
    with Stages(output) as stages:
        stages.follow(file)
        env = {**os.environ, STAGES_ENV: str(file)}
        told = "from deployments.process.stages import note_stage; note_stage({!r}, {!r})"
        for what, who in (("has started", ""), ("loading", "engine"), ("loading", "engine"), ("waiting", "router")):
            subprocess.run([sys.executable, "-c", told.format(what, who)], env=env, check=True)
        wait_until(lambda: len(whats(output)) == 4, PATIENCE_S, "it is shown while it starts")
    assert whats(output) == ["has started", "engine 1: loading", "engine 2: loading", "router 1: waiting"]


def test_nothing_is_shown_after_its_end_and_nothing_before_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, file = io.StringIO(), tmp_path / "stages"
    monkeypatch.setenv(STAGES_ENV, str(file))
    with Stages(output) as stages:
        stages.follow(file)
        note_stage("ready", "engine")
        stages.end()
        note_stage("late", "engine")
    assert whats(output) == ["engine 1: ready"]
    assert not file.exists(), "replicas that come later do not let it grow"


def test_a_process_that_nobody_watches_tells_nothing_and_one_that_cannot_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(STAGES_ENV, raising=False)
    note_stage("loading", "engine")
    assert not caplog.messages
    monkeypatch.setenv(STAGES_ENV, str(tmp_path))
    note_stage("loading", "engine")
    assert f"{tmp_path} does not take it" in caplog.text


def test_a_terminal_has_one_line_that_counts_and_nothing_is_left_of_it() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as output:
        with Stages(output) as stages:
            stages.begin("starting Ray")
            shown = b""
            while shown.count(b"starting Ray") < 3:
                shown += os.read(ours, 4096)
            stages.say("logs: here")
            stages.begin("deploying")
        while not shown.endswith(b"deploying\r\x1b[K"):  # what was written may come in parts
            shown += os.read(ours, 4096)
    os.close(ours)
    assert shown.replace(b"\r\n", b"\n").count(b"\n") == 1, "that of what stays"
    assert b"\r\x1b[Klogs: here" in shown
