"""Logs of our processes: one JSON object a line on standard error, with the request's id where there is one."""

import logging
import os
import re
import sys
from pathlib import Path

from pythonjsonlogger.json import JsonFormatter

# vLLM puts the name of its process before a line.
_ERROR = re.compile(rb"^(?:\(\w+ pid=\d+\) )?([\w.]*(?:Error|Exception): .*)", re.MULTILINE)
_TAIL_BYTES = 64 << 10
OUR_PACKAGES = ("policies", "predictor", "router", "deployments")


def log_as_json(level: int = logging.INFO) -> None:
    """Set up our packages' loggers in this process; other libraries' loggers stay as they are."""
    # Not sys.stderr: Ray Serve puts its own logger there, which holds up to 1000 lines back, and they are lost with the
    # process.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}{process}", style="{"))
    for package in OUR_PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def last_error() -> str | None:
    """The last line of an exception on standard error, a child process's too; None without, or where it is no file.

    An engine core that fails while it starts tells its parent nothing but that.
    """
    where = Path(f"/proc/self/fd/{sys.__stderr__.fileno()}") if sys.__stderr__ else None
    if where is None or not where.is_file():
        return None
    with where.open("rb") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
        found = _ERROR.findall(log.read())
    return found[-1].decode(errors="replace") if found else None
