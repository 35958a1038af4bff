"""Log lines reach the process's standard error at once, whatever Ray Serve does with `sys.stderr`."""

import json
import subprocess
import sys

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
