"""Log lines reach the process's standard error at once, whatever Ray Serve does with `sys.stderr`."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deployments.process.environment import serve_env
from deployments.process.logs import last_error, last_line

SCRIPT = """
import io, logging, os, sys
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
sys.stderr = io.StringIO()
log_by(LogSettings())
logging.getLogger("router.routed_client").warning("replica %s lost", "r1", extra={"request_id": "q7"})
os._exit(0)  # as if killed: nothing is flushed
"""


def test_a_line_is_written_before_the_process_can_be_killed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=60)
    line = json.loads(done.stderr)
    assert (line["levelname"], line["message"], line["request_id"]) == ("WARNING", "replica r1 lost", "q7")


LEVELS = """
import logging
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
log_by(LogSettings())
for level in ("debug", "info", "warning", "error"):
    getattr(logging.getLogger("router.routed_client"), level)(level)
"""


def said(script: str, level: str | None) -> str:
    """On standard error, with this level in the environment."""
    env = {name: value for name, value in os.environ.items() if name != "SLUICE_LOG_LEVEL"}
    env |= {} if level is None else {"SLUICE_LOG_LEVEL": level}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.parametrize(
    ("level", "lines"), [(None, 3), ("", 3), ("DEBUG", 4), ("INFO", 3), ("WARNING", 2), ("ERROR", 1)]
)
def test_the_environment_says_from_which_level_on(level: str | None, lines: int) -> None:
    assert len(said(LEVELS, level).splitlines()) == lines


def test_a_level_that_there_is_not_is_refused_by_name() -> None:
    why = "ConfigError: SLUICE_LOG_LEVEL is 'verbose': set it to one of DEBUG, INFO, WARNING, ERROR"
    assert why in said(LEVELS, "verbose")


CHANGED = """
import logging
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by
for settings in (LogSettings(level="DEBUG"), LogSettings(level="ERROR"), LogSettings(format="human"), LogSettings()):
    log_by(settings)
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("router.routed_client"), level)(level)
"""


def test_settings_take_the_place_of_the_environment_and_of_those_before() -> None:
    lines = said(CHANGED, "WARNING").splitlines()
    as_json = [json.loads(line)["message"] for line in lines[:5] + lines[7:]]
    assert as_json == ["debug", "info", "warning", "error", "error", "warning", "error"]
    for_people = [line.split(maxsplit=2)[2] for line in lines[5:7]]
    assert for_people == ["WARNING router.routed_client: warning", "ERROR   router.routed_client: error"]


IN_A_REPLICA = """
import logging, os, sys, tempfile
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger, get_component_logger_file_path
from ray.serve.schema import LoggingConfig
configure_component_logger(
    component_name="Router", component_id="r1", component_type=ServeComponentType.REPLICA, buffer_size=1000,
    logging_config=LoggingConfig(logs_dir=tempfile.mkdtemp()), max_bytes=10**6, backup_count=1,
)
from deployments.process.log_settings import LogSettings
from deployments.process.logs import log_by, log_of_vllm
from router.timing import HttpContext, current
log_by(LogSettings())
from vllm.logger import init_logger
log_of_vllm()
current.set(HttpContext(0.0, "standard", request_id="q7"))
try:
    raise RuntimeError("the cause")
except RuntimeError:
    init_logger("vllm.entrypoints.openai").exception("Error in chat completion stream generator.")
logging.getLogger("ray.serve").warning("of Ray Serve")
logging.getLogger("ray.serve").info("GET / 200", extra={"serve_access_log": True})
print("printed")
assert get_component_logger_file_path() is None  # what a new controller asks each replica
os._exit(0)
"""


@pytest.mark.slow
def test_what_vllm_and_ray_serve_say_in_a_replica_is_written_at_once_with_the_cause_and_the_request() -> None:
    env = {**os.environ, **serve_env(), "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-c", IN_A_REPLICA]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    of_vllm, of_serve, printed = lines[-3:]
    assert (of_vllm["name"], of_vllm["request_id"]) == ("vllm.entrypoints.openai", "q7")
    assert of_vllm["exc_info"].endswith("RuntimeError: the cause")
    assert (of_serve["message"], of_serve["levelname"]) == ("of Ray Serve", "WARNING")
    assert printed["message"].strip() == "printed"


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


def test_what_vllms_routes_import_leaves_the_warnings_of_other_libraries_heard() -> None:
    asks = (
        "import logging; from deployments.process.logs import root_level_kept\n"
        "with root_level_kept():\n"
        "    import model_hosting_container_standards.sagemaker\n"
        "    within = logging.root.level\n"
        "print(within, logging.root.level)"
    )
    done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-2:] == [str(logging.ERROR), str(logging.WARNING)], "the workaround is needed no more"
