"""The rendered manifest at work: KubeRay's part is played here, Ray, Redis and Sluice are real.

Redis starts from the rendered configuration, the head and the two groups of workers from the rendered start parameters
and environment, and the rendered serveConfigV2 goes to the dashboard as the operator sends it. One machine stands for
all pods, so addresses and ports are its own, and there is one proxy, the head's.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from deployments.process.environment import one_machine_env
from deployments.process.ports import free_port
from deployments.serving.embedded_redis import find_server
from tests.integration.application import REPOSITORY, START_TIMEOUT_S, command_of, kill_all
from tests.k8s.cases import named
from tests.k8s.engines import Helm4, Manifest, Values, documents, start_params
from tests.k8s.schemas import templates_of
from tests.waiting import PATIENCE_S, wait_until

PASSWORD = "a-password.of_this~test"
COMMANDS = Path(sys.executable).parent
OBJECT_STORE_BYTES = 80 << 20
# Ray gives its own parts 30 s to come up, which a busy machine may not keep; the kubelet then starts a container anew.
CONTAINER_STARTS = 8
# A pod sees its own processes only, and they end with it: a head that Ray gave up on leaves no GCS behind. The drain
# script looks for its raylet among all that it sees.
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _values() -> Values:
    """The demo with one engine, which is enough here."""
    values = named("cpu-demo")
    values["app"]["engine"]["replicas"] = 1
    values["redis"]["auth"] = {"password": PASSWORD}
    return values


class MiniKubeRay:
    """Does with a RayService what the operator does, on this machine."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self.service = next(m for m in manifests if m["kind"] == "RayService")
        self.folder, self.processes = folder, dict[str, psutil.Popen]()
        self.redis_port, self.gcs_port = free_port(), free_port()
        self.dashboard_port, self.http_port = free_port(), free_port()
        self._addresses: dict[str, str] = {}
        self._local_env = one_machine_env(folder)
        files = [m["data"] for m in manifests if m["kind"] == "ConfigMap"]
        self._redis_conf = next(data for data in files if "redis.conf" in data)
        self._scripts = next(data for data in files if "drain.py" in data)
        # What pods mount at /etc/sluice/scripts.
        self._haproxy = folder / "haproxy.sh"
        self._haproxy.write_text(self._scripts["haproxy.sh"])
        self._haproxy.chmod(0o555)

    def start_redis(self) -> None:
        """The rendered configuration; the last of two lines for one setting counts."""
        data = self.folder / "redis"
        data.mkdir()
        rendered = self._redis_conf["redis.conf"].replace("dir /data", f"dir {data}")
        local = f"port {self.redis_port}\nbind 127.0.0.1\nrequirepass {PASSWORD}\n"
        (data / "redis.conf").write_text(rendered + local)
        self._start("redis", [find_server(), str(data / "redis.conf")], dict(os.environ))

    def start_node(self, group: str, name: str | None = None) -> None:
        """A pod of this group; `name` tells several apart."""
        name = name or group
        # Not 127.0.0.1: Ray takes that for the machine's outer address.
        self._addresses.setdefault(name, f"127.0.0.{len(self._addresses) + 2}")
        params = start_params(self.service)[group] | self._local_params(name)
        arguments = " ".join(f"--{name}={value}" for name, value in params.items())
        arguments += " --head" if group == "head" else ""
        # Through a shell, as KubeRay does: the quotes around `resources` are for it.
        command = ["bash", "-c", f"exec ray start --block --disable-usage-stats {arguments}"]
        command = [*_OWN_PROCESSES, *command]
        # One after the other: nodes of one machine that start at once take each other's ports.
        for _ in range(CONTAINER_STARTS):
            # A container has a file system of its own.
            (self.folder / "r/ray_current_cluster").unlink(missing_ok=True)
            self._start(name, command, self._env(group))
            wait_until(lambda: self._has_started(name), START_TIMEOUT_S, f"{name} has started")
            if name not in self._ended():
                return

    def _has_started(self, name: str) -> bool:
        return "Ray runtime started" in self._log(name) or name in self._ended()

    def drain(self, name: str, seconds: int) -> None:
        """What the rendered preStop hook runs in a pod."""
        script = self.folder / "drain.py"
        script.write_text(self._scripts["drain.py"])
        inside = self.processes[name].children()[0].pid
        env = {**os.environ, "PATH": f"{COMMANDS}:{os.environ['PATH']}"}
        command = ["nsenter", f"--target={inside}", "--pid", "--mount", sys.executable, str(script), str(seconds)]
        subprocess.run(command, env=env, check=True, timeout=seconds + 120)

    def _local_params(self, name: str) -> dict[str, str]:
        local = {
            "node-ip-address": self._addresses[name],
            "object-store-memory": str(OBJECT_STORE_BYTES),
            "dashboard-agent-listen-port": str(free_port()),
        }
        if name != "head":
            return local | {"address": f"{self._addresses['head']}:{self.gcs_port}"}
        options = self.service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "password"
        ports = {"port": self.gcs_port, "dashboard-port": self.dashboard_port, "ray-client-server-port": free_port()}
        head = {name: str(port) for name, port in ports.items()} | {"temp-dir": str(self.folder / "r")}
        return local | head | {"dashboard-host": "127.0.0.1", "redis-password": PASSWORD}

    def _env(self, group: str) -> dict[str, str]:
        """The pod's, with Kubernetes' way of naming other variables, then what only this machine needs."""
        env: dict[str, str] = {}
        for entry in templates_of(self.service)[group]["spec"]["containers"][0]["env"]:
            value = PASSWORD if "valueFrom" in entry else entry["value"]
            for name, known in env.items():
                value = value.replace(f"$({name})", known)
            env[entry["name"]] = value
        env["SLUICE_REDIS_URL"] = env["SLUICE_REDIS_URL"].replace(
            "my-sluice-redis:6379", f"127.0.0.1:{self.redis_port}"
        )
        assert env["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/etc/sluice/scripts/haproxy.sh"
        haproxy = {
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(self._haproxy),
            "SLUICE_HAPROXY_BIND": f"127.0.0.1:{self.http_port}",
            "SLUICE_HAPROXY_PORT": str(self.http_port),
        }
        paths = {"PYTHONPATH": str(REPOSITORY), "PATH": f"{COMMANDS}:{os.environ['PATH']}"}
        local = {**os.environ, **env, **self._local_env, **haproxy, **paths, "HF_HOME": str(self.folder / "models")}
        local["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # else nothing may join a head on loopback
        if group == "head":
            return local | {
                "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis_port}",
                "RAY_external_storage_namespace": "uid-1",
            }
        # KubeRay's own, where Ray's state is in Redis: so long workers wait for another head.
        return local | {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        log = self.folder / f"{name}.log"
        if log.exists():
            log.rename(self.folder / f"{name}-before.log")
        with log.open("wb") as output:
            self.processes[name] = psutil.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def put_config(self) -> None:
        config = yaml.safe_load(self.service["spec"]["serveConfigV2"])
        config |= {"http_options": {"host": "127.0.0.1", "port": self.http_port}, "proxy_location": "HeadOnly"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.dashboard_port}/api/serve/applications/",
            data=json.dumps(config).encode(),
            method="PUT",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200

    def answers(self, address: str) -> bool:
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}/api/version"

    @property
    def health(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/health"

    def haproxy_is_mended(self) -> bool:
        """By the script of the chart, which has the file shortly after each time that Ray Serve wrote it anew."""
        (written,) = (self.folder / "h").glob("*/haproxy.cfg")  # one for the node
        return "http-buffer-request" in written.read_text()

    def family(self, name: str) -> list[psutil.Process]:
        process = self.processes[name]
        return [process, *process.children(recursive=True)] if process.is_running() else []

    def replicas(self, name: str) -> set[int]:
        """Processes of Ray Serve's replicas on a node."""
        return {p.pid for p in self.family(name) if any("ray::ServeReplica" in part for part in command_of(p))}

    def kill(self, name: str) -> None:
        """SIGKILL to all of a node at once, as when its machine is lost."""
        kill_all(self.family(name))

    def close(self) -> None:
        kill_all([process for name in self.processes for process in self.family(name)])

    def wait(self, address: str, timeout_s: float, what: str) -> None:
        try:
            wait_until(lambda: self.answers(address) or self._ended(), timeout_s, what)
            assert not self._ended(), f"{self._ended()} ended before {what}"
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.logs()}") from late

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _ended(self) -> list[str]:
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def logs(self) -> str:
        """The ends of what nodes said, and of what the head's own parts did."""
        of_ray = [
            each for name in ("gcs_server", "raylet") for each in self.folder.glob(f"r/session_latest/logs/{name}*")
        ]
        found = [*self.folder.glob("*.log"), *of_ray]
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in found)


@pytest.fixture
def operator(helm4: Helm4) -> Iterator[MiniKubeRay]:
    with tempfile.TemporaryDirectory(prefix="k", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        running = MiniKubeRay(documents(helm4.render(_values())), Path(folder))
        try:
            yield running
        finally:
            running.close()


def _complete(operator: MiniKubeRay) -> Any:
    """Waits for an engine that still starts."""
    url = f"http://127.0.0.1:{operator.http_port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", timeout=START_TIMEOUT_S)
    messages: Any = [{"role": "user", "content": "Name three rivers."}]
    return client.chat.completions.create(model="sluice-demo", messages=messages, max_tokens=8).usage


def _stream(operator: MiniKubeRay, tokens: int) -> Iterator[Any]:
    url = f"http://127.0.0.1:{operator.http_port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", timeout=START_TIMEOUT_S)
    return iter(
        client.completions.create(
            model="sluice-demo",
            prompt="Three rivers:",
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_rendered_manifest_serves_and_survives_a_lost_head_and_a_drained_pod(operator: MiniKubeRay) -> None:
    operator.start_redis()
    operator.start_node("head")
    operator.wait(operator.dashboard, START_TIMEOUT_S, "the dashboard")
    operator.start_node("router")
    operator.start_node("engine")
    operator.put_config()
    operator.wait(operator.health, START_TIMEOUT_S, "the first answer")
    assert _complete(operator).completion_tokens > 0
    assert len(operator.replicas("engine")) == len(operator.replicas("router")) == 1, "each on pods of its own"
    assert operator.replicas("head") == set()
    wait_until(operator.haproxy_is_mended, PATIENCE_S, "the script of the chart mends HAProxy's configuration")

    engines = operator.replicas("engine")
    operator.kill("head")
    assert not operator.answers(operator.health), "the only proxy went with the head"
    operator.start_node("head")
    operator.wait(operator.health, START_TIMEOUT_S, "the answer after the loss")
    assert _complete(operator).completion_tokens > 0
    assert operator.replicas("engine") == engines, "the engine that had its model loaded"

    operator.start_node("engine", "engine-2")
    stream = _stream(operator, tokens=300)
    next(stream)
    operator.drain("engine", 300)  # a replacement starts first
    assert operator.replicas("engine") == set(), "nothing of Serve is left where the pod may stop now"
    *_, last = stream
    assert last.usage.completion_tokens == 300, "what ran there ran to its end"
    wait_until(lambda: len(operator.replicas("engine-2")) == 1, START_TIMEOUT_S, "an engine on the other pod")
    assert _complete(operator).completion_tokens > 0
