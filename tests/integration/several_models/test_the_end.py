"""Last of this folder, for it kills the application that the others share: what that had started ends by itself."""

import os
import signal

import pytest

from tests.integration.application import START_TIMEOUT_S, Sluice, alive, is_free
from tests.waiting import wait_until

pytestmark = pytest.mark.long


def test_every_process_of_a_killed_application_ends(models: Sluice) -> None:
    _, *started = models.processes()
    assert len(started) > 5
    os.kill(models.process.pid, signal.SIGKILL)
    wait_until(lambda: is_free(models.port), START_TIMEOUT_S, "the killed application's address is free again")
    # Ray's own agents take most of a minute to see that their raylet is gone.
    wait_until(lambda: not alive(started), START_TIMEOUT_S, "every process of the killed application has ended")
