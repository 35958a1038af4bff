"""Logs of our processes: one JSON object a line on standard error, with the request's id where there is one."""

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

OUR_PACKAGES = ("policies", "predictor", "router", "deployments")


def log_as_json(level: int = logging.INFO) -> None:
    """Set up our packages' loggers in this process; other libraries' loggers stay as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter("{asctime}{levelname}{name}{message}{process}", style="{"))
    for package in OUR_PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
