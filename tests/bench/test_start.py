import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.start import Seen, Start, Watch, _parsed, as_markdown, cpu_s_by_part, part_of, spec_of


@pytest.mark.parametrize(
    ("command_line", "part"),
    [
        ("/venv/bin/python /venv/bin/sluice serve --port=1", "`sluice serve`"),
        ("ray::ServeController.run_control_loop", "Serve's controller"),
        ("ray::HAProxyManager", "Serve's proxies"),
        ("ray::ProxyActor", "Serve's proxies"),
        ("ray::DashboardAgent", "Ray"),
        ("VLLM::EngineCore", "engine core"),
        ("ray::ServeReplica:sluice:EngineReplica", "engine relay"),
    ],
)
def test_processes_are_told_apart(command_line: str, part: str) -> None:
    assert part_of(command_line) == part


def test_what_ended_counts_once_with_whom_had_to_wait_for_it() -> None:
    alive = {
        1: Seen("a", parent=0, own_s=1.0, waited_for_s=5.0),  # it has waited for more than was seen
        2: Seen("b", parent=1, own_s=2.0, waited_for_s=0.0),  # its child ended, and it has not waited for it
    }
    ended = {
        3: Seen("c", parent=1, own_s=4.0, waited_for_s=0.5),
        4: Seen("c", parent=2, own_s=3.0, waited_for_s=0.0),
        5: Seen("c", parent=9, own_s=0.25, waited_for_s=0.0),  # its parent ended unseen
    }
    assert cpu_s_by_part(alive, ended) == {"a": 6.0, "b": 5.0, "c": 0.25}


def test_of_a_process_that_has_ended_what_was_last_seen_counts() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        server: Any = SimpleNamespace(processes=lambda: {psutil.Process(child.pid)})
        watch = Watch(server)
        watch.look()
        (seen,) = watch.seen.values()
        seen.part, seen.own_s = "child", 7.0
        child.communicate(b"\n")
    server.processes = lambda: {psutil.Process()}
    watch.look()
    found = watch.result(1.0)
    assert found.ready_s == 1.0 and found.total_cpu_s >= 7.0
    (part,) = found.rss_bytes
    assert part_of(" ".join(psutil.Process().cmdline())) == part
    assert found.rss_bytes[part] >= found.pss_bytes[part] > 1 << 20


def test_each_checkout_is_started_by_its_own_program(tmp_path: Path) -> None:
    options = _parsed(["--other", str(tmp_path), "--engines", "3", "--port", "9000"])
    mine, other = spec_of("this", None, options), spec_of("other", options.other, options)
    assert mine.command[0] == str(Path(sys.executable).with_name("sluice"))
    assert other.command[0] == f"{tmp_path}/.venv/bin/sluice"
    assert mine.command[1:] == other.command[1:]
    assert (mine.folder, other.folder) == (None, tmp_path)
    assert "--engine-replicas=3" in mine.command and "--port=9000" in mine.command


def test_the_tables_compare_the_two_start_by_start() -> None:
    def start(router_s: float, megabytes: int) -> Start:
        size = {"router": megabytes * 2.0**20}
        return Start(ready_s=9.0, cpu_s={"router": router_s, "Ray": 1.0}, rss_bytes=size, pss_bytes=size)

    told = as_markdown({"other": [start(9.0, 600), start(19.0, 600)], "this": [start(4.0, 300), start(9.0, 300)]})
    assert "| router  | 14.0 [9.0, 19.0]  | 6.5 [4.0, 9.0]  |" in told
    assert "| **all** | 15.0 [10.0, 20.0] | 7.5 [5.0, 10.0] |" in told
    assert "router, RSS" in told and "300.0 [300.0, 300.0]" in told
    assert "this over other, paired: 0.50 [0.50, 0.50] of the CPU seconds." in told
