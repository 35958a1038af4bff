"""Processes of an application that starts tell what they do, to `sluice serve` on the same machine.

Each appends lines to one file: `PID<tab>WHO<tab>WHAT`, WHO being empty where there is one of the kind.
"""

import logging
import os

logger = logging.getLogger(__name__)

STAGES_ENV = "SLUICE_STAGES"


def note_stage(what: str, who: str = "") -> None:
    """Write a stage to the file that SLUICE_STAGES names; without it, and once the file is gone, do nothing."""
    if (file := os.environ.get(STAGES_ENV)) is None:
        return
    try:
        told = os.open(file, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        return
    except OSError as error:  # no reason for an engine not to start
        logger.warning("%s: %s does not take it: %s", what, file, error)
        return
    with os.fdopen(told, "w") as output:
        output.write(f"{os.getpid()}\t{who}\t{what}\n")
