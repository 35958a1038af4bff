"""A Ray as `ray start --head` makes it, on loopback, to which `serve deploy` deploys."""

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml

from deployments.process.ports import free_port
from tests.integration.application import REPOSITORY, START_TIMEOUT_S, kill_all
from tests.waiting import wait_until

RAY = str(Path(sys.executable).with_name("ray"))
SERVE = str(Path(sys.executable).with_name("serve"))
NODE_STARTS = 3
LOCAL = REPOSITORY / "deployments/configs/local.yaml"


@dataclass(frozen=True)
class RayHead:
    env: dict[str, str]
    address: str
    dashboard: str
    http_port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def temporary(self) -> Path:
        return Path(self.env["TMPDIR"])

    def deploy(self, settings: Mapping[str, Any], folder: Path) -> None:
        """As `serve deploy`; applications that are not named are deleted."""
        config = folder / "deployed.yaml"
        config.write_text(yaml.safe_dump(self._here(settings)))
        env = {**self.env, "RAY_DASHBOARD_ADDRESS": self.dashboard}
        subprocess.run([SERVE, "deploy", str(config)], env=env, check=True, timeout=START_TIMEOUT_S)

    def put(self, settings: Mapping[str, Any]) -> None:
        """The same without its program, which takes seconds to start."""
        request = _with_token(f"{self.dashboard}/api/serve/applications/", self.env)
        request.data, request.method = json.dumps(self._here(settings)).encode(), "PUT"
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def _here(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "http_options": {"host": "127.0.0.1", "port": self.http_port}}

    def get(self, path: str) -> bytes:
        """A page of the dashboard."""
        with urllib.request.urlopen(_with_token(f"{self.dashboard}{path}", self.env), timeout=60) as response:
            body: bytes = response.read()
        return body

    def listed(self, what: str) -> list[dict[str, Any]]:
        """As `ray list WHAT --detail`."""
        page = json.loads(self.get(f"/api/v0/{what}?detail=true&limit=1000"))
        found: list[dict[str, Any]] = page["data"]["result"]["result"]
        return found

    def nodes(self) -> set[str]:
        """Ids of those that live."""
        return {node["node_id"] for node in self.listed("nodes") if node["state"] == "ALIVE"}

    def applications(self) -> dict[str, Any]:
        """By name, as `serve status` asks for them."""
        found: dict[str, Any] = json.loads(self.get("/api/serve/applications/"))["applications"]
        return found

    def serving(self, name: str) -> dict[str, int]:
        """The process of each replica of an application, once all run."""
        try:
            deployments = self.applications()[name]["deployments"].values()
        except (OSError, LookupError):  # while there is none
            return {}
        found = [replica for deployment in deployments for replica in deployment["replicas"]]
        all_run = all(each["status"] == "HEALTHY" for each in deployments) and {r["state"] for r in found} == {
            "RUNNING"
        }
        return {replica["replica_id"]: replica["pid"] for replica in found} if all_run else {}


def answers(url: str | urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _with_token(url: str, env: dict[str, str]) -> urllib.request.Request:
    token = Path(env["HOME"], ".ray/auth_token").read_text().strip()
    return urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})


@contextlib.contextmanager
def ray_env(http_port: int, home: Path, *, loopback: bool, **more: str) -> Iterator[dict[str, str]]:
    """What `sluice env --loopback` prints, as the head of the shipped configuration says, and nothing else; or
    `sluice env`, as for several nodes."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as temporary:  # short: it holds Unix sockets
        bare = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": temporary}
        bare |= {"PYTHONPATH": str(REPOSITORY), **more}
        first, *_ = (line.removeprefix("#   ") for line in LOCAL.read_text().splitlines() if line.startswith("#   "))
        assert first == 'eval "$(sluice env --loopback)"'
        # Ray makes a token when a program starts one of its own, and then asks for it here.
        subprocess.run([RAY, "get-auth-token", "--generate"], env=bare, check=True, capture_output=True, timeout=60)
        options = f"--loopback --port {http_port}" if loopback else ""
        lines = f"{first.replace('--loopback', options)} && exec env -0"
        printed = subprocess.run(["bash", "-c", lines], env=bare, check=True, capture_output=True, timeout=60).stdout
        yield dict(entry.split("=", 1) for entry in printed.decode().strip("\0").split("\0"))


@contextlib.contextmanager
def ray_head(folder: Path, *options: str, loopback: bool = True, **more: str) -> Iterator[RayHead]:
    """For the time of the block; with these options of `ray start`, and this environment on top.

    loopback: it takes no second node then.
    """
    port, http_port, dashboard_port = free_port(), free_port(), free_port()  # 8000 may be taken where tests run
    with ray_env(http_port, folder, loopback=loopback, **more) as env:
        log = folder / "head.log"
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        own = [
            "--head", "--node-ip-address", host, "--port", str(port), "--dashboard-port", str(dashboard_port),
            "--ray-client-server-port", str(free_port()), "--include-dashboard", "true", "--disable-usage-stats",
        ]  # fmt: skip
        made = RayHead(env, f"{host}:{port}", f"http://127.0.0.1:{dashboard_port}", http_port, log)
        with _node(env, log, lambda: answers(_with_token(f"{made.dashboard}/api/version", env)), *own, *options):
            yield made


@contextlib.contextmanager
def second_node(head: RayHead, folder: Path, *options: str) -> Iterator[None]:
    """A second node of the same Ray, on this machine too, for the time of the block."""
    log = folder / "second.log"
    host = head.address.partition(":")[0]
    own = ["--node-ip-address", host, "--address", head.address]
    with _node(head.env, log, lambda: len(head.nodes()) == 2, *own, *options):
        yield


@contextlib.contextmanager
def _node(env: Mapping[str, str], log: Path, is_up: Callable[[], bool], *options: str) -> Iterator[None]:
    """Anew where it ends before it is up: Ray gives its parts 30 s, which a busy machine may not keep."""
    with contextlib.ExitStack() as stack:
        for _ in range(NODE_STARTS):
            node = stack.enter_context(_started(env, log, *options))
            if _is_up(node, is_up):
                break
        else:
            raise AssertionError(log.read_text())
        yield


def _is_up(node: psutil.Popen, has_come: Callable[[], bool]) -> bool:
    """Else it has ended."""
    wait_until(lambda: node.poll() is not None or has_come(), START_TIMEOUT_S, "the node is up, or has ended")
    return node.poll() is None


@contextlib.contextmanager
def _started(env: Mapping[str, str], log: Path, *options: str) -> Iterator[psutil.Popen]:
    command = [
        RAY, "start", "--block", "--num-cpus", "2",
        "--object-store-memory", str(80 << 20), "--dashboard-agent-listen-port", str(free_port()),
        "--min-worker-port", "0", "--max-worker-port", "0", *options,
    ]  # fmt: skip
    # Through a pipe, as of a container, whose reader ends with the last who writes.
    with log.open("wb") as output, subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output) as reader:
        assert reader.stdin is not None
        node = psutil.Popen(command, env=env, stdout=reader.stdin, stderr=subprocess.STDOUT, start_new_session=True)
        reader.stdin.close()
        try:
            yield node
        finally:
            if node.poll() is None:
                kill_all([node, *node.children(recursive=True)])
