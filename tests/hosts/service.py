"""Obeys a unit of systemd's as far as ours say something: systemd itself does not run in namespaces like these.

    python -m tests.hosts.service FILE

Known are of [Service] Environment, EnvironmentFile, ExecStart, Restart=always, RestartSec; other keys of UNOBEYED are
passed over, and any other one is refused. As with KillMode=control-group, what a command leaves behind is killed before
the command starts again; what belongs to it is told by INVOCATION_ID, which systemd sets as well.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

UNOBEYED = {"User", "LimitNOFILE", "TimeoutStopSec", "Type", "KillMode"}
STOP_S = 60.0


class Stopped(Exception):
    """By SIGTERM, as `systemctl stop` does."""


def service(unit: str) -> dict[str, list[str]]:
    """The keys of [Service], with the values of each."""
    section, found = "", dict[str, list[str]]()
    for line in unit.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif section == "Service" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value.replace("%%", "%"))
    if unknown := found.keys() - UNOBEYED - {"Environment", "EnvironmentFile", "ExecStart", "Restart", "RestartSec"}:
        raise ValueError(f"this stand-in for systemd knows nothing of {sorted(unknown)}")
    return found


def environment(keys: Mapping[str, list[str]]) -> dict[str, str]:
    words = [word for value in keys.get("Environment", ()) for word in shlex.split(value)]
    for file in keys.get("EnvironmentFile", ()):
        path = Path(file.removeprefix("-"))
        if path.exists() or not file.startswith("-"):
            words += [word for line in path.read_text().splitlines() for word in shlex.split(line, comments=True)]
    return dict(word.split("=", 1) for word in words)


def kill_what_is_left(invocation: str) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"INVOCATION_ID={invocation}\0".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def run(keys: Mapping[str, list[str]], number: int) -> None:
    """Once, to its end."""
    (command,), invocation = keys["ExecStart"], f"{os.getpid()}-{number}"
    env = {**os.environ, **environment(keys), "INVOCATION_ID": invocation}
    print(f"{time.strftime('%T')} starts: {command}", flush=True)
    process = subprocess.Popen(shlex.split(command), env=env)
    try:
        code = process.wait()
        print(f"{time.strftime('%T')} ended with {code}", flush=True)
    except Stopped:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        raise
    finally:
        kill_what_is_left(invocation)


def stop(*_: object) -> None:
    raise Stopped


def main() -> None:
    keys, pid_file = service(Path(sys.argv[1]).read_text()), Path(f"{sys.argv[1]}.pid")
    assert keys["Restart"] == ["always"]
    signal.signal(signal.SIGTERM, stop)
    pid_file.write_text(str(os.getpid()))
    number = 0
    with contextlib.suppress(Stopped):
        while True:
            run(keys, number := number + 1)
            time.sleep(float(keys["RestartSec"][0]))
    pid_file.unlink()


if __name__ == "__main__":
    main()
