"""The lab itself: hosts are apart, and what is cut is cut in silence."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import lab as labs
from tests.hosts.lab import NEEDED, LabError, Switch, lab, why_there_is_none
from tests.hosts.service import environment, service

pytestmark = pytest.mark.long

ASK = """python - <<END
import socket
try:
    socket.create_connection(("two", 5000), 2).close()
except OSError as error:
    print(type(error).__name__)
END"""
REFUSED, NOTHING = "ConnectionRefusedError", "TimeoutError"


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switch]:
    why = why_there_is_none()
    assert why is None, why
    with lab(tmp_path_factory.mktemp("lab"), ("one", "two", "three"), ("one", "two")) as made:
        yield made


def asked(switch: Switch) -> str:
    return switch["one"].run(ASK).strip()


def test_a_host_has_a_name_processes_and_temporary_files_of_its_own(switch: Switch) -> None:
    switch["one"].run("touch /tmp/of-one /dev/shm/of-one")
    assert switch["two"].run("hostname; ls /tmp/of-one /dev/shm/of-one 2>/dev/null; true") == "two\n"
    assert len(switch["two"].run("ls -d /proc/[0-9]*").split()) < 10
    with pytest.raises(LabError, match="one: exit 3"):
        switch["one"].run("exit 3")


def test_a_cut_cable_a_blocked_way_and_a_lost_power_are_silent(switch: Switch) -> None:
    one, two = switch["one"], switch["two"]
    assert asked(switch) == REFUSED
    two.cut()
    assert asked(switch) == NOTHING
    two.join()
    assert asked(switch) == REFUSED
    two.block(one)
    assert asked(switch) == NOTHING
    two.unblock(one)
    with one.cut_from(two):
        assert asked(switch) == NOTHING
    assert asked(switch) == REFUSED
    two.power_loss()
    assert asked(switch) in (NOTHING, "OSError")  # no route, once nobody has answered for the address
    assert not two.has_power


def test_a_host_may_have_another_time_of_day(switch: Switch) -> None:
    one, asks = switch["one"], "python -c 'import time; time.sleep(0.1); print(int(time.time()))'"
    one.set_clock(3600)
    assert 3590 < int(one.run(asks)) - time.time() < 3610
    one.set_clock(0)
    assert abs(int(one.run(asks)) - time.time()) < 10


def test_a_host_boots_with_its_files_and_its_units(switch: Switch) -> None:
    three = switch["three"]
    three.boot()
    three.enable(
        "n.service", "[Service]\nExecStart=sh -c 'date +%%N >> /tmp/home/starts'\nRestart=always\nRestartSec=0.2\n"
    )
    three.run("until [ $(wc -l < ~/starts) -ge 3 ]; do sleep 0.1; done")
    three.stop("n.service")
    before = len(three.run("cat ~/starts").split())
    three.power_loss()
    three.boot()
    three.run(f"until [ $(wc -l < ~/starts) -gt {before} ]; do sleep 0.1; done")


def test_whoever_may_make_no_hosts_is_told_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labs, "NAMESPACES", ("--no-such-namespaces",))
    assert "unshare --map-root-user" in (why_there_is_none() or "")
    assert "SYS_ADMIN" in NEEDED


def test_a_unit_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text("B=3\n# no\nC='x y'\n")
    unit = (
        f'[Unit]\nAfter=x\n[Service]\nEnvironment=A=1 "B=2 %% 3"\nEnvironmentFile=-{file}\nEnvironmentFile=-/no/such\n'
    )
    assert environment(service(unit)) == {"A": "1", "B": "3", "C": "x y"}
    with pytest.raises(ValueError, match="WatchdogSec"):
        service("[Service]\nWatchdogSec=3\n")
