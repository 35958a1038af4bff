"""`sluice serve` as a command: it ends what it started, however it ends itself, and it says what stands in its way."""

import ipaddress
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil

from tests.integration.application import SLUICE, Sluice, alive, free_port, wait_until


def test_a_second_start_on_the_same_port_says_what_is_wrong(sluice: Sluice) -> None:
    second = subprocess.run(
        [SLUICE, "serve", "--port", str(sluice.port)], capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 1
    assert f"127.0.0.1:{sluice.port}" in second.stderr
    assert "--port" in second.stderr
    assert "Traceback" not in second.stderr


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_nothing_listens_beyond_loopback(sluice: Sluice) -> None:
    ours = {process.pid for process in sluice.processes()}
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert listening
    elsewhere = [c for c in listening if not is_loopback(c.laddr[0])]
    open_to_all = [(c.laddr[0], psutil.Process(c.pid).cmdline()[:1]) for c in elsewhere]
    assert open_to_all == []


def test_it_starts_again_after_a_kill_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    first = Sluice(tmp_path, port, "--engine-replicas", "1").wait_until_ready()
    started = first.processes()
    assert len(started) > 5
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until(lambda: is_free(port), 30, "the killed application's address is free again")

    second = Sluice(tmp_path, port, "--engine-replicas", "1").wait_until_ready()
    answer = second.client().chat.completions.create(
        model="sluice-demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert answer.choices[0].finish_reason
    of_second = second.processes()
    assert second.interrupt() == 0
    assert alive(of_second) == []
    assert is_free(port)
    # Ray's own agents take most of a minute to see that their raylet is gone.
    wait_until(lambda: not alive(started[1:]), 120, "every process of the killed application has ended")


def test_wrong_vllm_arguments_are_named(tmp_path: Path) -> None:
    wrong = subprocess.run(
        [SLUICE, "serve", "--port", str(free_port()), "--", "--no-such-argument"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert wrong.returncode == 1
    assert "--no-such-argument" in wrong.stderr
    assert "Traceback" not in wrong.stderr
