"""Hosts on one machine: each has network, mounts, processes, names and System V objects of its own, in namespaces.

A `Switch` joins them. Its cables are cut in silence: packets vanish, and nobody gets a reset. What a host runs lives in
the namespaces of its first process, so that ending this one takes all of it away, as does the end of the program.
"""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
NETWORK = "10.77.0"
NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc")
START_S = 30.0
NOWHERE = "02:00:00:00:00:fe"  # a hardware address that nobody has
NEEDED = """\
hosts take namespaces and network links of their own, which this user may not make here ({why}).
Run it as root, or as another user by `unshare --map-root-user --net make test-hosts`; in a container it takes the
capabilities SYS_ADMIN and NET_ADMIN. It also takes 8 GB of memory."""

# $1 is the host's name, $2 its folder, $3 our checkout. What a host writes lies in its folder and outlives its power.
INIT = """
set -e
mount --make-rprivate /
hostname "$1"
ip link set lo up
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$2/../hosts" /etc/hosts
case "$3" in /tmp/*) mkdir -p "$2$3"; mount --rbind "$3" "$2$3";; esac
mount --rbind "$2/tmp" /tmp
trap : TERM INT
echo up
while :; do sleep 1000 & wait $!; done
"""


class LabError(Exception):
    """A command of the lab failed; the message has what it said."""


def why_there_is_none() -> str | None:
    """What is missing for a lab here, None where nothing is."""
    try:
        made = subprocess.run(["unshare", *NAMESPACES, "--fork", "ip", "link", "set", "lo", "up"], **_TEXT)
    except FileNotFoundError as error:
        return NEEDED.format(why=f"no {error.filename}: apt-get install util-linux iproute2")
    return NEEDED.format(why=made.stderr.strip()) if made.returncode else None


_TEXT = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}


def _do(command: list[str]) -> str:
    done = subprocess.run(command, **_TEXT)  # type: ignore[call-overload]
    if done.returncode:
        raise LabError(f"{shlex.join(command)}: {done.stdout}{done.stderr}")
    return str(done.stdout)


class _Namespaces:
    """A process in new namespaces that stays for as long as it is not killed."""

    def __init__(self, script: str, *arguments: str, kinds: tuple[str, ...] = NAMESPACES) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "--fork", "--kill-child"]
        command += ["--mount-proc"] if "--pid" in kinds else []
        self._outer = subprocess.Popen(
            [*command, "bash", "-c", script, "init", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        assert self._outer.stdout is not None
        if (said := self._outer.stdout.readline().strip()) != "up":
            raise LabError(f"no namespaces: {said}\n{self._outer.communicate(timeout=60)[0]}")
        outer = self._outer.pid
        self.pid = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        self._enter = ["nsenter", "--target", str(self.pid), *kinds, "--"]

    def within(self, *command: str) -> list[str]:
        return [*self._enter, *command]

    def end(self) -> None:
        """All that runs in them, at once."""
        self._outer.kill()
        self._outer.wait(START_S)
        if self._outer.stdout is not None:
            self._outer.stdout.close()


class Switch:
    """Hosts by their names, in one network; /etc/hosts of each knows them all.

    Args:
        folder: holds what hosts write, a folder for each; with a short path, for Unix sockets lie below it.
        names: at most 200; they have the addresses NETWORK.1 and so on, in this order.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder
        lines = [f"{NETWORK}.{number} {name}" for number, name in enumerate(names, 1)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._inside = _Namespaces("echo up; exec sleep infinity", kinds=("--net",))
        self.ip("link", "add", "switch", "type", "bridge")
        self.ip("link", "set", "switch", "up")
        self.hosts = {name: Host(self, name, number) for number, name in enumerate(names, 1)}

    def __getitem__(self, name: str) -> "Host":
        return self.hosts[name]

    def ip(self, *arguments: str) -> None:
        _do(self._inside.within("ip", *arguments))

    def bridge(self, *arguments: str) -> None:
        _do(self._inside.within("bridge", *arguments))

    def end(self) -> None:
        for host in self.hosts.values():
            host.power_loss()
        self._inside.end()


class Host:
    """One host. It has no power until `boot`; folders and files that it wrote below /tmp stay without power."""

    def __init__(self, switch: Switch, name: str, number: int) -> None:
        self.name, self.address = name, f"{NETWORK}.{number}"
        self.folder = switch.folder / name
        self.home = self.folder / "tmp/home"
        self.home.mkdir(parents=True)
        self.environment: Mapping[str, str] = {}
        self._switch, self._port, self._mac = switch, f"port{number}", f"02:00:00:00:00:{number:02x}"
        self._inside: _Namespaces | None = None
        self._units: dict[str, str] = {}
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def has_power(self) -> bool:
        return self._inside is not None

    def boot(self) -> None:
        """Returns once the host is in the network and its units have begun."""
        inside = self._inside = _Namespaces(INIT, self.name, str(self.folder), str(CHECKOUT))
        self._switch.ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(inside.pid))
        self._switch.ip("link", "set", self._port, "master", "switch", "up")
        self._ip("link", "set", "eth0", "address", self._mac, "up")
        self._ip("address", "add", f"{self.address}/24", "dev", "eth0")
        for name in self._units:
            self._begin(name)

    def power_loss(self) -> None:
        """All at once, and in silence: the cable is cut before the kernel can say for the dead that they are."""
        if self._inside is None:
            return
        self.cut()
        self._inside.end()
        self._inside = None
        for process in self._running:
            process.wait(START_S)
        self._running.clear()
        with contextlib.suppress(LabError):  # the kernel takes it away with the other end, in its own time
            self._switch.ip("link", "delete", self._port)

    def set_clock(self, ahead_s: int) -> None:
        """Of the Pythons that begin here from now on, by tests/hosts/clock: the time of day alone.

        The kernel has one time of day for all namespaces. Under libfaketime 0.9.10, which shifts that of whole
        processes, time.sleep of Python 3.11 fails.
        """
        shifted = {"PYTHONPATH": str(CHECKOUT / "tests/hosts/clock"), "HOSTS_CLOCK_AHEAD_S": str(ahead_s)}
        self.environment = shifted if ahead_s else {}

    def cut(self) -> None:
        """The switch passes nothing more from or to it, and the host sees no loss of a carrier."""
        self._switch.bridge("link", "set", "dev", self._port, "state", "0")

    def join(self) -> None:
        self._switch.bridge("link", "set", "dev", self._port, "state", "3")

    def block(self, other: "Host") -> None:
        """What this host sends to the other one gets lost; what comes from it arrives."""
        self._ip("neighbor", "replace", other.address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")

    def unblock(self, other: "Host") -> None:
        self._ip("neighbor", "delete", other.address, "dev", "eth0")

    @contextlib.contextmanager
    def cut_from(self, *others: "Host") -> Iterator[None]:
        """For the time of the block nothing passes between this host and those, in either direction."""
        for other in others:
            self.block(other)
            other.block(self)
        try:
            yield
        finally:
            for other in others:
                self.unblock(other)
                other.unblock(self)

    def command(self, line: str) -> list[str]:
        """What runs this line of a shell on the host, with its environment alone."""
        assert self._inside is not None, f"{self.name} has no power"
        paths = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"PATH": paths, "HOME": "/tmp/home", "LANG": "C.UTF-8", "TERM": "dumb", **self.environment}
        words = [f"{name}={value}" for name, value in variables.items()]
        return self._inside.within("env", "-i", f"--chdir={CHECKOUT}", *words, "bash", "-c", line)

    def run(self, line: str, timeout_s: float = 600.0) -> str:
        """Returns what it printed.

        Raises:
            LabError: it failed, or did not end in time.
        """
        try:
            done = subprocess.run(
                self.command(line), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.name}: not within {timeout_s} s: {line}") from error
        if done.returncode:
            raise LabError(f"{self.name}: {line}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout

    def enable(self, name: str, unit: str) -> None:
        """As `systemctl enable --now`: it runs now, and after each boot. See tests/hosts/service.py."""
        self._units[name] = unit
        (self.home / name).write_text(unit)
        self._begin(name)

    def stop(self, name: str) -> None:
        """As `systemctl stop`; it begins again at `start`, or at the next boot."""
        self.run(f"kill -TERM $(cat /tmp/home/{name}.pid); while [ -e /tmp/home/{name}.pid ]; do sleep 0.1; done", 120)

    def start(self, name: str) -> None:
        self._begin(name)

    def _begin(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            line = f"exec python -m tests.hosts.service /tmp/home/{name}"
            self._running.append(
                subprocess.Popen(self.command(line), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
            )

    def _ip(self, *arguments: str) -> None:
        assert self._inside is not None, f"{self.name} has no power"
        _do(self._inside.within("ip", *arguments))


@contextlib.contextmanager
def lab(folder: Path, names: tuple[str, ...], booted: tuple[str, ...]) -> Iterator[Switch]:
    """A switch with these hosts, for the time of the block."""
    switch = Switch(folder, names)
    try:
        for name in booted:
            switch[name].boot()
        yield switch
    finally:
        switch.end()
