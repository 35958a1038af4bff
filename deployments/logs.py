"""Logs of our processes: one JSON object a line on standard error, with the request's id where there is one."""

import logging
import sys

from pythonjsonlogger.json import JsonFormatter

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
