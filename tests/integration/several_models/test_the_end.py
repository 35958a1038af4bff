"""Last of this folder, for it ends the application that the others share: however one ends, it ends what it started."""

import psutil

from tests.integration.application import START_TIMEOUT_S, Sluice, alive, is_free
from tests.waiting import wait_until


def test_every_process_of_a_killed_application_ends(killed: list[psutil.Process]) -> None:
    # Ray's own agents take most of a minute to see that their raylet is gone.
    wait_until(lambda: not alive(killed), START_TIMEOUT_S, "every process of the killed application has ended")


def test_ctrl_c_leaves_nothing(models: Sluice) -> None:
    started = models.processes()
    assert len(started) > 5
    assert models.interrupt() == 0
    assert alive(started) == []
    assert is_free(models.port)
