"""Last of this folder, for it ends the application that the others share."""

from tests.integration.application import Sluice, alive, is_free


def test_ctrl_c_leaves_nothing(sluice: Sluice) -> None:
    started = sluice.processes()
    assert len(started) > 5
    assert sluice.interrupt() == 0
    assert alive(started) == []
    assert is_free(sluice.port)
