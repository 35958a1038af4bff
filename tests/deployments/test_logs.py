"""Log lines reach the process's standard error at once, whatever Ray Serve does with `sys.stderr`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


ENDS_ITS_CHILD = """
import subprocess, sys
from deployments.logs import last_error
child = "import sys; sys.stderr.write(sys.argv[1])"
subprocess.run([sys.executable, "-c", child, sys.argv[1]])
print(last_error())
"""
TRACEBACK = """Traceback (most recent call last):
  File "worker.py", line 1, in start
    raise ValueError(
{}ValueError: no memory left: take less
WARNING no Error: here
"""


@pytest.mark.parametrize("prefix", ["", "(EngineCore_DP0 pid=123) "], ids=["plain", "with vLLM's prefix"])
def test_what_a_child_process_died_of_is_found_in_the_log(tmp_path: Path, prefix: str) -> None:
    log, argv = tmp_path / "worker.err", [sys.executable, "-c", ENDS_ITS_CHILD, TRACEBACK.format(prefix)]
    with log.open("wb") as err:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=err, text=True, check=True, timeout=60)
    assert done.stdout == "ValueError: no memory left: take less\n"
    into_a_pipe = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert into_a_pipe.stdout == "None\n"
