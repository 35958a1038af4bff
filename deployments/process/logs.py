"""Logs of our processes: one JSON object a line on standard error, with the request's id where there is one."""

import builtins
import logging
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from pythonjsonlogger.json import JsonFormatter
from ray.serve._private.logging_utils import SERVE_LOGGER_NAME, buildin_print

from policies.errors import ConfigError
from router.timing import current

# vLLM puts the name of its process before a line.
_ERROR = re.compile(rb"^(?:\(\w+ pid=\d+\) )?([\w.]*(?:Error|Exception): .*)", re.MULTILINE)
_TAIL_BYTES = 64 << 10
OUR_PACKAGES = ("policies", "predictor", "router", "deployments")
LOG_LEVEL_ENV = "SLUICE_LOG_LEVEL"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def log_as_json() -> None:
    """Set up the loggers of our packages and of Ray Serve in this process; those of other libraries stay as they are.

    Ray Serve holds its own records back, and all that is printed in a replica, until there are 1000; they are lost with
    the process. `logging.config.dictConfig`, which vLLM calls, closes that buffer: it writes nothing any more, keeps
    everything, and a new controller, which asks each replica for the buffer's file, gets an error and stops it.

    Raises:
        ConfigError: SLUICE_LOG_LEVEL is no level.
    """
    level = _level()
    builtins.print = buildin_print  # Ray Serve's (2.60) prints a tuple where it is given a file, as tracebacks do
    for package in OUR_PACKAGES:
        _write_to(_handler(), package)
        logging.getLogger(package).setLevel(level)
    of_serve = _handler()
    of_serve.addFilter(_is_news)
    _write_to(of_serve, SERVE_LOGGER_NAME)


def _level() -> str:
    """Of our packages' logs. Raises ConfigError."""
    level = os.environ.get(LOG_LEVEL_ENV) or "INFO"
    if level not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL_ENV} is {level!r}: set it to one of {', '.join(LOG_LEVELS)}, or leave it out")
    return level


def vllm_logs_as_json() -> None:
    """The same for vLLM's front end, once it is made: that sets its handlers anew. A configuration of the user's own
    stands."""
    if not os.environ.get("VLLM_LOGGING_CONFIG_PATH"):
        _write_to(_handler(), "vllm")


def _handler() -> logging.Handler:
    # Not sys.stderr: Ray Serve puts its own logger there.
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}{process}", style="{"))
    handler.addFilter(_with_request_id)
    return handler


def _write_to(handler: logging.Handler, name: str) -> None:
    logger = logging.getLogger(name)
    logger.handlers, logger.propagate = [handler], False


def _with_request_id(record: logging.LogRecord) -> bool:
    """Adds that of the HTTP request in whose task something is logged; nothing is filtered out."""
    context = current.get()
    if context is not None and context.request_id and not hasattr(record, "request_id"):
        record.request_id = context.request_id
    return True


def _is_news(record: logging.LogRecord) -> bool:
    """No line of Ray Serve's for a request that went well: ours says more."""
    return record.levelno >= logging.WARNING or not getattr(record, "serve_access_log", False)


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
