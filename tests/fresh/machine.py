"""A new Debian in a folder: debootstrap makes it, and every command in it runs in namespaces of its own.

So nothing is mounted here, and nothing that a command starts outlives it: the kernel takes both away with the
namespaces.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEBIANS = {"bookworm": "3.11", "trixie": "3.13"}
"""What is tried, and the Python of each."""
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
# $1 is the machine, $2 the folders that it shares with this one, $3 the command.
ENTER = """
set -e
mount --bind "$1" "$1"  # `ip netns` wants its root to be a mount
mount -t proc proc "$1/proc"
mount -t sysfs -o ro sysfs "$1/sys"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/dev/shm"
for folder in $2; do mkdir -p "$1$folder"; mount --bind -o ro "$folder" "$1$folder"; done
exec chroot "$1" sh -c "$3"
"""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OURS = re.compile(r"PIP_|SSL_CERT_FILE$|NODE_EXTRA_CA_CERTS$")  # how pip and npm reach their registries here


class MachineError(Exception):
    """A command failed; the message has the end of what it said."""


def mirror() -> str | None:
    """The mirror of Debian from which this machine's own packages come."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    return next((uri for uri in listed if uri.rstrip("/").endswith("/debian")), None)


def why_there_is_none(suites: list[str]) -> str | None:
    """Why no machine can be made here, None where one can."""
    if os.geteuid() != 0:
        return "debootstrap and chroot take root"
    missing = [name for name in ("apt-get", "debootstrap", "unshare", "chroot") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)}: not found here (debootstrap is a package of that name)"
    found = mirror()
    if found is None:
        return "apt knows no mirror of Debian here (has apt-get update been run?)"
    for suite in suites:
        try:
            urllib.request.urlopen(f"{found}dists/{suite}/InRelease", timeout=20).close()
        except (urllib.error.URLError, OSError) as error:
            return f"the mirror has no {suite}: {error}"
    return None


def has_torch(python: str, torch: str) -> bool:
    """Whether pip finds this build for that Python: where it is configured to look, or in PyTorch's own index."""
    pip = [sys.executable, "-m", "pip", "--retries", "0", "install", "--dry-run", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--ignore-installed", "--target", folder, "--python-version", python, torch]
        indexes: tuple[list[str], ...] = ([], ["--extra-index-url", "https://download.pytorch.org/whl/cpu"])
        return any(subprocess.run([*pip, *index, *wanted], capture_output=True).returncode == 0 for index in indexes)


@dataclass
class Machine:
    suite: str
    root: Path
    env: Mapping[str, str]
    shared: tuple[str, ...]

    def command(self, command: str, *, user: str = "root") -> list[str]:
        variables = {**self.env, "PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        words = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), "sh", "-c", command]
        if user != "root":
            words = ["setpriv", f"--reuid={user}", "--clear-groups", *words]
        return [*NAMESPACES, "sh", "-c", ENTER, "sh", str(self.root), " ".join(self.shared), shlex.join(words)]

    def attempt(
        self, command: str, *, user: str = "root", timeout_s: float = 3600.0
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(command, user=user),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def run(self, command: str, *, timeout_s: float = 3600.0) -> str:
        """Raises MachineError."""
        print(f"\n{self.suite}# {command}", flush=True)
        done = self.attempt(command, timeout_s=timeout_s)
        said = done.stdout.rpartition("\r")[2] if "\r" in done.stdout else done.stdout
        print(said[-3000:], flush=True)
        if done.returncode != 0:
            raise MachineError(f"{command}: exit {done.returncode}\n{done.stdout[-5000:]}")
        return done.stdout

    @contextlib.contextmanager
    def running(self, command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
        """Until the end of the block, then ended by Ctrl-C, or killed with all that it started."""
        print(f"\n{self.suite}# {command}", flush=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process
            os.killpg(process.pid, signal.SIGINT)
            process.wait(300)
        finally:
            process.kill()
            process.wait()
            print(log.read_text()[-3000:], flush=True)


@contextlib.contextmanager
def new_machine(suite: str) -> Iterator[Machine]:
    """Raises MachineError: debootstrap failed."""
    root = Path(tempfile.mkdtemp(prefix=f"{suite}-", dir="/var/tmp"))
    root.chmod(0o755)
    try:
        made = [*NAMESPACES, "debootstrap", "--variant=minbase", suite, str(root), mirror() or ""]
        done = subprocess.run(made, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3600)
        if done.returncode != 0:
            raise MachineError(f"debootstrap: {done.stdout[-3000:]}{done.stderr[-2000:]}")
        shutil.copy("/etc/hosts", root / "etc/hosts")
        env, shared = _settings(root)
        yield Machine(suite, root, env, shared)
    finally:
        assert str(root) not in Path("/proc/mounts").read_text(), f"something is mounted below {root}: not removed"
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)


def _settings(root: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """How pip and npm reach their registries here: variables, files that these name copied, folders shared."""
    env: dict[str, str] = {}
    shared: list[str] = []
    (root / "etc/ours").mkdir()
    for name, value in os.environ.items():
        if not OURS.match(name):
            continue
        env[name] = value
        if Path(value).is_file():
            shutil.copy(value, root / "etc/ours" / name)
            env[name] = f"/etc/ours/{name}"
        elif Path(value).is_dir():
            shared.append(value)
    return env, tuple(shared)
