"""How processes log, for modules that do not import Ray, as `process/logs.py` does."""

from dataclasses import dataclass
from typing import Literal, get_args

LogTarget = Literal["files", "stdout"]
LogFormat = Literal["json", "human"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS = get_args(LogLevel)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How this process logs.

    Attributes:
        to: `stdout` copies every line to the node's standard output.
        level: None stands for SLUICE_LOG_LEVEL.
    """

    to: LogTarget = "files"
    format: LogFormat = "json"
    level: LogLevel | None = None
