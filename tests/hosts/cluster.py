"""A Ray cluster of hosts, set up and served by the very commands of docs/guides/several-hosts.md."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.process.environment import connections_within, most_files
from deployments.serving.embedded_redis import find_server
from tests.documented import ROOT
from tests.hosts.lab import Host, LabError, Switch, lab, why_there_is_none
from tests.waiting import wait_until

GUIDE = ROOT / "docs/guides/several-hosts.md"
FURTHER = "worker-3"  # has no power at first
HOSTS = ("head", "worker-1", "worker-2", FURTHER, "redis", "client")
# What the guide does not say: a small machine plays all hosts, each of which would take memory and CPUs as its own.
SMALL = "--num-cpus 2 --object-store-memory 83886080"
# No systemd raises the limit of open files here.
FEWER_FILES = f"RAY_SERVE_HAPROXY_MAXCONN={min(1000, connections_within(most_files()))}"
UNIT, START_TIMEOUT_S = "ray.service", 900.0
PORT, REDIS_PORT = 8000, 6379


def guide(title: str) -> list[str]:
    """The lines of code below a heading of the guide, without comments."""
    _, _, section = GUIDE.read_text().partition(f"## {title}\n")
    lines = re.findall(r"^ {4}(\S.*)$", section.partition("\n## ")[0], re.MULTILINE)
    assert lines, f"{GUIDE.name} has no lines of code below: {title}"
    return [line for line in lines if not line.startswith("#")]


@dataclass(frozen=True)
class Replica:
    deployment: str
    replica_id: str
    host: str


class Cluster:
    """A head, two workers with a router and an engine each, a Redis and a client's host."""

    def __init__(self, switch: Switch) -> None:
        self.switch, self.head, self.redis, self.client = switch, switch["head"], switch["redis"], switch["client"]
        self.workers = [switch["worker-1"], switch["worker-2"]]
        self.spare: list[Host] = []  # have joined, and run no replica
        self._names = {host.address: host.name for host in switch.hosts.values()}

    def start(self) -> None:
        """Returns once a router and an engine serve on each worker."""
        self._start_redis()
        self.head.run("; ".join(guide("Ray's token")))
        for host in (self.head, *self.workers):
            self.prepare(host)
        head, worker = guide("Ray on every host")
        self.head.enable(UNIT, self.head.run(_unit_of(head, "--object-store-memory 83886080")))
        wait_until(lambda: self.nodes() is not None, START_TIMEOUT_S, "the head is up")
        for host in self.workers:
            host.enable(UNIT, host.run(_unit_of(worker, SMALL)))
        wait_until(lambda: len(self.nodes() or ()) == 3, START_TIMEOUT_S, "the workers are up")
        self.head.run("; ".join(guide("Deploy")[:2]))
        self.wait_until_whole()

    def _start_redis(self) -> None:
        (configuration,) = re.findall(r"^```conf\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
        (self.redis.home / "redis.conf").write_text(configuration)
        run = f"ExecStart={find_server()} /tmp/home/redis.conf"
        self.redis.enable("redis.service", f"[Service]\n{run}\nRestart=always\nRestartSec=1\n")
        wait_until(lambda: f":{REDIS_PORT} " in self.redis.run("ss -Hltn"), START_TIMEOUT_S, "Redis listens")

    def prepare(self, host: Host) -> None:
        """Ray's token, and the file of secrets: what the guide copies."""
        (host.home / ".ray").mkdir(exist_ok=True)
        token = host.home / ".ray/auth_token"
        if host is not self.head:
            shutil.copy(self.head.home / ".ray/auth_token", token)
        host.run("; ".join(guide("Redis")))
        host.run(f"echo {FEWER_FILES} >> ~/sluice.env")

    def join(self, host: Host) -> None:
        """A further worker, as the others; it has no replica until another one is drained."""
        host.boot()
        self.prepare(host)
        host.enable(UNIT, host.run(_unit_of(guide("Ray on every host")[1], SMALL)))
        self._wait_until_joined(host)

    def _wait_until_joined(self, host: Host) -> None:
        wait_until(lambda: host.name in (self.nodes() or ()), START_TIMEOUT_S, f"{host.name} has joined")
        self.spare.append(host)

    def nodes(self) -> set[str] | None:
        """The hosts that Ray takes for alive; None where the head does not say."""
        try:
            found = self._asked("/api/v0/nodes")["data"]["result"]["result"]
        except (LabError, LookupError, TypeError, ValueError):
            return None
        return {self._names[each["node_ip"]] for each in found if each["state"] == "ALIVE"}

    def replicas(self, state: str = "RUNNING") -> list[Replica]:
        try:
            applications = self._asked("/api/serve/applications/")["applications"]
            deployments = applications["sluice"]["deployments"]
        except (LabError, LookupError, ValueError):
            return []
        return [
            Replica(name, each["replica_id"], self._names.get(each.get("node_ip") or "", ""))
            for name, deployment in deployments.items()
            for each in deployment["replicas"]
            if each["state"] == state
        ]

    def _asked(self, path: str) -> Any:
        line = f'curl -sS --max-time 20 -H "Authorization: Bearer $(cat ~/.ray/auth_token)" http://127.0.0.1:8265{path}'
        return json.loads(self.head.run(line, 60))

    def is_whole(self) -> bool:
        placed = sorted((each.deployment, each.host) for each in self.replicas())
        names = sorted(host.name for host in self.workers)
        wanted = [(deployment, name) for deployment in ("EngineReplica", "Router") for name in names]
        return placed == wanted and all(self.answers(host) for host in (self.head, *self.workers))

    def wait_until_whole(self) -> None:
        what = "a router and an engine run on each worker, and every host answers"
        try:
            wait_until(self.is_whole, START_TIMEOUT_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; there are {self.replicas()}, and nodes {self.nodes()}") from None

    def answers(self, host: Host) -> bool:
        body = json.dumps({"model": "sluice-demo", "prompt": "Hello", "max_tokens": 2})
        asked = f"curl -sSf --max-time 30 {url(host)}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
        try:
            return "choices" in self.client.run(asked, 60)
        except LabError:
            return False

    def wait_until_idle(self) -> None:
        """Until no engine runs a request, and none waits."""

        def is_idle() -> bool:
            status = json.loads(self.client.run(f"curl -sSf --max-time 30 {url(self.head)}/sluice/status", 60))
            return not any(each["running"] for each in status["replicas"].values()) and not status["waiting"]

        wait_until(is_idle, 120.0, "no request is left")

    def drain(self, host: Host) -> None:
        """As the guide drains a host onto a spare one: returns once nothing of the application runs there."""
        host.run("; ".join(guide("Take a host out")[:2]))
        self.workers.remove(host)
        self.workers.append(self.spare.pop())

        def is_empty() -> bool:
            states = ("RUNNING", "STARTING", "UPDATING", "STOPPING", "PENDING_MIGRATION")
            return not any(each.host == host.name for state in states for each in self.replicas(state))

        wait_until(is_empty, START_TIMEOUT_S, f"{host.name} has no replica")

    def renew(self, host: Host) -> None:
        """As for a new kernel: drained, stopped and booted; it is a spare host once it has joined again."""
        self.drain(host)
        host.stop(UNIT)
        wait_until(lambda: host.name not in (self.nodes() or {host.name}), START_TIMEOUT_S, f"{host.name} has left")
        host.power_loss()
        host.boot()
        self._wait_until_joined(host)


def url(host: Host) -> str:
    return f"http://{host.name}:{PORT}"


def _unit_of(line: str, more: str) -> str:
    """The guide's command that makes the unit, with more options of `ray start`, and what it prints shown."""
    made, _, _ = line.partition(" | ")
    return f"{made} {more}"


class Load:
    """Clients on their host, for the time of the block."""

    def __init__(self, cluster: Cluster, hosts: Sequence[Host]) -> None:
        self._client, self._urls = cluster.client, [url(host) for host in hosts]
        self.found: dict[str, Any] = {}

    def __enter__(self) -> "Load":
        file = self._client.home / "load.json"
        file.unlink(missing_ok=True)
        line = f"exec python -m tests.hosts.clients /tmp/home/load.json {' '.join(self._urls)}"
        self._process = subprocess.Popen(
            self._client.command(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None and self._process.stdout.readline() == "running\n"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(600) == 0
        self._process.stdout.close()
        self.found = json.loads((self._client.home / "load.json").read_text())


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Raises AssertionError where no lab can be made here, or no cluster comes up in it."""
    why = why_there_is_none()
    assert why is None, why
    booted = tuple(name for name in HOSTS if name != FURTHER)
    with (
        tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        lab(Path(folder), HOSTS, booted) as switch,
    ):
        made = Cluster(switch)
        made.start()
        yield made
