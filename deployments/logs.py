"""Logs of our processes: one JSON object a line on standard error, with the request's id where there is one."""

import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from pythonjsonlogger.json import JsonFormatter

# vLLM puts the name of its process before a line.
_ERROR = re.compile(rb"^(?:\(\w+ pid=\d+\) )?([\w.]*(?:Error|Exception): .*)", re.MULTILINE)
_TAIL_BYTES = 64 << 10
OUR_PACKAGES = ("policies", "predictor", "router", "deployments")


def log_as_json() -> None:
    """Set up our packages' loggers in this process; other libraries' loggers stay as they are."""
    # Not sys.stderr: Ray Serve puts its own logger there, which holds up to 1000 lines back, and they are lost with the
    # process.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}{process}", style="{"))
    for package in OUR_PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)


def last_error(log: Path, *, within_s: float = 2.0) -> str | None:
    """The last line of an exception in a process's log of standard error, or None.

    An engine core that fails while it starts tells its parent no more than that it did. Where Ray rotates logs, what a
    process has written stands in its file a moment later.
    """
    give_up_s = time.monotonic() + within_s
    while not (found := _ERROR.findall(_end_of(log))) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return str(found[-1].decode(errors="replace")) if found else None


def last_line(logs: Iterable[Path]) -> str:
    """Of the log that was written last; "" where there is none."""
    found = max((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime, default=None)
    lines = _end_of(found).decode(errors="replace").splitlines() if found else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _end_of(log: Path) -> bytes:
    if not log.is_file():
        return b""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read()
