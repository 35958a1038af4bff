"""Last of this folder, for it kills the application that the others share: however it ends, it ends what it started."""

import os
import signal
import socket
from pathlib import Path

from tests.integration.application import Sluice, alive, wait_until


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_it_starts_again_after_a_kill_and_ctrl_c_leaves_nothing(sluice: Sluice, tmp_path: Path) -> None:
    started = sluice.processes()
    assert len(started) > 5
    os.kill(sluice.process.pid, signal.SIGKILL)
    wait_until(lambda: is_free(sluice.port), 30, "the killed application's address is free again")

    second = Sluice(tmp_path, sluice.port, "--engine-replicas", "1").wait_until_ready()
    answer = second.client().chat.completions.create(
        model="sluice-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert answer.choices[0].finish_reason
    of_second = second.processes()
    assert second.interrupt() == 0
    assert alive(of_second) == []
    assert is_free(second.port)
    # Ray's own agents take most of a minute to see that their raylet is gone.
    wait_until(lambda: not alive(started[1:]), 120, "every process of the killed application has ended")
