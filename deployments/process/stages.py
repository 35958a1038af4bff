"""What processes of an application that starts are doing, for whoever started it on the same machine.

Each appends lines to one file: `PID<tab>WHO<tab>WHAT`, WHO being empty where there is one of the kind.
"""

import logging
import os

logger = logging.getLogger(__name__)

STAGES_ENV = "SLUICE_STAGES"


def note_stage(what: str, who: str = "") -> None:
    """Nothing where nobody looks: SLUICE_STAGES names the file, which is gone once all have started."""
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
