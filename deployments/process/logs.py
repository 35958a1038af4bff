"""Logs of our processes: a line each on standard error, with the ids of the request where there is one, and a copy on
the standard output of the node's pod where that is asked for."""

import builtins
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from ray.serve._private.logging_utils import SERVE_LOGGER_NAME, buildin_print

from deployments.process.log_settings import LOG_LEVELS, LogFormat, LogSettings
from deployments.process.node_output import NodeOutput, open_node_output
from policies.errors import ConfigError
from router.timing import current

logger = logging.getLogger(__name__)

# vLLM puts the name of its process before a line.
_ERROR = re.compile(rb"^(?:\(\w+ pid=\d+\) )?([\w.]*(?:Error|Exception): .*)", re.MULTILINE)
_QUOTED = re.compile(r'[\s"=]')
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # in vLLM's lines
OUR_PACKAGES = ("policies", "predictor", "router", "deployments")
LOG_LEVEL_ENV = "SLUICE_LOG_LEVEL"


class _NodeHandler(logging.Handler):
    """One for each process, once it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._output = NodeOutput(open_node_output())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self.format(record))
        except Exception:  # a record that cannot be formatted must not end the code that logs it
            self.handleError(record)


class _Loggers:
    """The loggers of this process that Sluice sets up.

    Attributes:
        names: their names; vLLM's is among them once its front end is made.
        handlers: the handlers of each of them.
    """

    def __init__(self) -> None:
        self.names = [*OUR_PACKAGES, SERVE_LOGGER_NAME]
        self.handlers: list[logging.Handler] = []
        self._node: _NodeHandler | None = None

    def write_to(self, settings: LogSettings) -> None:
        # Not sys.stderr: Ray Serve puts its own logger there.
        self.handlers = [logging.StreamHandler(sys.__stderr__)]
        why_alone = self._add_node() if settings.to == "stdout" else None
        for handler in self.handlers:
            handler.setFormatter(_formatter(settings.format))
            handler.addFilter(_with_ids)
            handler.addFilter(_is_news)
        for name in self.names:
            self.take(name)
        if why_alone is not None:
            logger.warning("logs.to: stdout has nothing to write to, lines are in Ray's logs alone: %s", why_alone)

    def _add_node(self) -> OSError | None:
        """Returns why the node's output cannot be had, or None."""
        try:
            self._node = self._node or _NodeHandler()
        except OSError as error:
            return error
        self.handlers.append(self._node)
        return None

    def take(self, name: str) -> None:
        """Has this logger write as the others do."""
        taken = logging.getLogger(name)
        taken.handlers, taken.propagate = list(self.handlers), False


_loggers = _Loggers()


def log_by(settings: LogSettings) -> None:
    """Set up the loggers of our packages and of Ray Serve in this process; those of other libraries stay as they are.
    Called again it changes them.

    Ray Serve holds its own records back, and all that is printed in a replica, until there are 1000; they are lost with
    the process. `logging.config.dictConfig`, which vLLM calls, closes that buffer: it writes nothing any more, keeps
    everything, and a new controller, which asks each replica for the buffer's file, gets an error and stops it.

    Raises:
        ConfigError: no level is set, and SLUICE_LOG_LEVEL is none.
    """
    level = settings.level or _level()
    builtins.print = buildin_print  # Ray Serve's (2.60) prints a tuple where it is given a file, as tracebacks do
    _loggers.write_to(settings)
    for package in OUR_PACKAGES:
        logging.getLogger(package).setLevel(level)


def _level() -> str:
    """The level of our packages' logs, by the environment. Raises ConfigError."""
    level = os.environ.get(LOG_LEVEL_ENV) or "INFO"
    if level not in LOG_LEVELS:
        raise ConfigError(f"{LOG_LEVEL_ENV} is {level!r}: set it to one of {', '.join(LOG_LEVELS)}, or leave it out")
    return level


def log_of_vllm() -> None:
    """The same for vLLM's front end, to be called once it is made: that sets its handlers anew. A configuration of the
    user's own is kept."""
    if not os.environ.get("VLLM_LOGGING_CONFIG_PATH") and "vllm" not in _loggers.names:
        _loggers.names.append("vllm")
        _loggers.take("vllm")


@contextmanager
def root_level_kept() -> Iterator[None]:
    """Around what imports vLLM's routes: a package of theirs, model-hosting-container-standards (0.1.16), sets the root
    logger to ERROR, so that no warning of any library is heard; vLLM (0.32) puts back the levels of handlers alone."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


def _formatter(kind: LogFormat) -> logging.Formatter:
    if kind == "human":
        return _HumanFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    return JsonFormatter("{asctime}{levelname}{name}{message}{process}", style="{")


class _HumanFormatter(logging.Formatter):
    """Further keys of the JSON format stand behind the message as key=value; None and empty values are left out."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = ((name, value) for name, value in vars(record).items() if name not in _OF_EVERY_RECORD)
        told = [f"{name}={_shown(value)}" for name, value in extra if name[0] != "_" and value not in (None, "", [])]
        return " ".join([_COLOUR.sub("", super().formatMessage(record)), *told])


_OF_EVERY_RECORD = frozenset({*RESERVED_ATTRS, "asctime", "message", "taskName", "color_message"})


def _shown(value: object) -> str:
    """The value on one line, even if a client has put line ends into it."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if not text.isprintable():
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if _QUOTED.search(text) else text


def _with_ids(record: logging.LogRecord) -> bool:
    """Adds the ids of the HTTP request in whose task a record is logged; nothing is filtered out."""
    context = current.get()
    if context is not None:
        if context.request_id and not hasattr(record, "request_id"):
            record.request_id = context.request_id
        if context.trace_id and not hasattr(record, "trace_id"):
            record.trace_id = context.trace_id
    return True


def _is_news(record: logging.LogRecord) -> bool:
    """Leaves out Ray Serve's line for a request that went well: ours says more."""
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
    """The last line of the log that was written last; "" if there is none."""
    found = max((log for log in logs if log.is_file()), key=lambda log: log.stat().st_mtime, default=None)
    lines = _end_of(found).decode(errors="replace").splitlines() if found else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _end_of(log: Path) -> bytes:
    """The last 64 kB of a log; nothing if there is none."""
    if not log.is_file():
        return b""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (64 << 10)))
        return file.read()
