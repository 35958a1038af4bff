"""Log lines reach the process's standard error at once, whatever Ray Serve does with `sys.stderr`."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.logs import last_error, last_line

SCRIPT = """
import io, logging, os, sys
from deployments.logs import log_as_json
sys.stderr = io.StringIO()
log_as_json()
logging.getLogger("router.routed_client").warning("replica %s lost", "r1", extra={"request_id": "q7"})
os._exit(0)  # as if killed: nothing is flushed
"""


def test_a_line_is_written_before_the_process_can_be_killed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    line = json.loads(done.stderr)
    assert (line["levelname"], line["message"], line["request_id"]) == ("WARNING", "replica r1 lost", "q7")


TRACEBACK = """Traceback (most recent call last):
  File "worker.py", line 1, in start
    raise ValueError(
{}ValueError: no memory left: take less
WARNING no Error: here
"""


@pytest.mark.parametrize("prefix", ["", "(EngineCore_DP0 pid=123) "], ids=["plain", "with vLLM's prefix"])
def test_what_an_engine_died_of_is_found_in_the_log_also_if_it_comes_there_late(tmp_path: Path, prefix: str) -> None:
    log = tmp_path / "worker.err"
    writing = threading.Timer(0.3, log.write_text, [TRACEBACK.format(prefix)])
    writing.start()
    assert last_error(log, within_s=60) == "ValueError: no memory left: take less"
    writing.join()


def test_a_log_without_an_error_has_none(tmp_path: Path) -> None:
    assert last_error(tmp_path / "nowhere.err", within_s=0) is None
    (tmp_path / "worker.err").write_text("WARNING no Error: here")
    assert last_error(tmp_path / "worker.err", within_s=0) is None


def test_the_last_line_is_that_of_the_log_written_last(tmp_path: Path) -> None:
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    assert last_line([out, err]) == ""
    out.write_text("one\ntwo\n\n")
    err.write_text("other\n")
    os.utime(err, (1, 1))
    assert last_line([out, err]) == "two"
