"""The application under test: `sluice serve`, started as a user starts it."""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import openai
import psutil
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from deployments.process.ports import free_port
from deployments.serving.embedded_redis import embedded_url, find_server
from tests.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
SLUICE = str(Path(sys.executable).with_name("sluice"))
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 300.0
LOOKS = 5  # at the status, before what keeps it away is the test's
# Where the processor has bfloat16, two tokens often have the same score in it, and the batch decides which one wins.
EXACT = ("--dtype", "float32")


def chat(text: str, **more: Any) -> dict[str, Any]:
    """A greedy chat of one message with the demo model, for the official client."""
    return {"model": "sluice-demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def _taken(server: psutil.Process) -> int:
    """Connections that others opened to it."""
    known = server.net_connections("tcp")
    own_ports = {each.laddr.port for each in known if each.status == psutil.CONN_LISTEN}
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port in own_ports for each in known)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Sluice:
    """A `sluice serve` in a process group of its own, its output in a file, which is ready for the time of the block.

    As on a machine without a compiler, and where nothing was compiled before.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        settings: Mapping[str, Any] | None = None,
        key: str = "none",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Args:
        settings: come in a file of the folder.
        key: with which it is asked.
        """
        self.port, self.key = free_port(), key
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"sluice-{self.port}.log"
        if settings is not None:
            (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
            options = ("--config", "sluice.yaml", *options)
        nothing_compiles = {"CXX": str(folder / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        with self.log.open("wb") as output:
            self.process = psutil.Popen(
                [SLUICE, "serve", "--port", str(self.port), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                cwd=folder,
                env={**os.environ, **nothing_compiles, **env},
            )

    def __enter__(self) -> "Sluice":
        try:
            wait_until(lambda: self._is_ready() or self._has_ended(), START_TIMEOUT_S, "Sluice is ready")
            assert self._is_ready()
        except BaseException as error:
            self.kill()
            error.add_note(self.output())
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _is_ready(self) -> bool:
        return "Sluice is ready" in self.output()

    def _has_ended(self) -> bool:
        return self.process.poll() is not None

    def output(self) -> str:
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def engine_replicas(self) -> list[psutil.Process]:
        """The relays' processes; each has its engine core as a child."""
        return self.named("EngineReplica")

    def engine_cores(self) -> list[psutil.Process]:
        return self.named("VLLM::EngineCore")

    def routers(self) -> list[psutil.Process]:
        return self.named(":Router")

    def connections_of_routers(self) -> list[int]:
        """How many HAProxy has to each: at least its streams."""
        return [_taken(router) for router in self.routers()]

    def parents_of_new_replicas(self) -> Iterator[psutil.Process]:
        """The raylet, and what it has started by the time that it has been dealt with, but replicas: some of that waits
        to become one."""
        (raylet,) = self.named("raylet/raylet")
        yield raylet
        yield from (p for p in raylet.children() if not any("ray::Serve" in part for part in command_of(p)))

    def redis(self) -> psutil.Process:
        (found,) = self.named(Path(find_server()).name)
        return found

    def haproxy(self) -> psutil.Process | None:
        """The one that takes new connections, which is no child of the application's when its actor was killed."""
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr[1:] == (self.port,) and found.pid:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has gone meanwhile
                    return psutil.Process(found.pid)
        return None

    @property
    def logs(self) -> Path:
        """The folder that it prints first."""
        return Path(self.output().partition("logs: ")[2].splitlines()[0])

    def redis_url(self) -> str:
        """Its password is in a file for its user alone."""
        config = dict(line.split(" ", 1) for line in Path(self.redis().cwd(), "redis.conf").read_text().splitlines())
        return embedded_url(int(config["port"]), config["requirepass"])

    def listening(self) -> list[tuple[str, list[str]]]:
        """Every address that one of its processes listens on, and that process's command."""
        ours = {process.pid: process for process in self.processes()}
        found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in ours]
        return [(c.laddr[0], command_of(ours[c.pid])[:1]) for c in found]

    def named(self, name: str) -> list[psutil.Process]:
        """Not what one of them is about to start: between fork and exec that bears its parent's name."""
        found = [p for p in self.processes() if any(name in part for part in command_of(p))]
        return [p for p in found if parent_of(p) not in {each.pid for each in found}]

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        os.killpg(self.process.pid, signal.SIGINT)
        return int(self.process.wait(STOP_TIMEOUT_S))

    def kill(self) -> None:
        """All of it at once, unless it has ended: for when nothing is asked about its end."""
        if not self._has_ended():
            kill_all(self.processes())

    def status(self, model: str | None = None) -> dict[str, Any]:
        """The status of this model, or of the first with all others under ``more_models``.

        On a busy machine Redis may take longer to answer than a router waits, which is 503: then it looks again.
        """
        for _ in range(LOOKS - 1):
            with contextlib.suppress(OSError):
                return self._status(model)
            time.sleep(0.5)
        return self._status(model)

    def _status(self, model: str | None) -> dict[str, Any]:
        first: dict[str, Any] = json.loads(self.get("/sluice/status"))
        models = {each["model"]: each for each in (first, *first.get("more_models", ()))}
        return models[model] if model else first

    def metrics(self) -> list[str]:
        return self.get("/metrics").decode().splitlines()

    def series(self, name: str, **labels: str) -> list[float]:
        """Values of all series of this name with these labels."""
        samples = (sample for family in self._families() for sample in family.samples)
        return [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]

    def _families(self) -> Iterator[Metric]:
        return text_string_to_metric_families(self.get("/metrics").decode())

    def counted(self, name: str, **labels: str) -> float:
        """All of them together."""
        return sum(self.series(name, **labels))

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=120) as response:
            body: bytes = response.read()
        return body

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=180, max_retries=0)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=180, max_retries=0)


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def parent_of(process: psutil.Process) -> int | None:
    """None for one that has ended."""
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def kill_all(processes: list[psutil.Process]) -> None:
    """SIGKILL; returns when all have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # ended by itself
            process.kill()
    wait_until(lambda: not alive(processes), STOP_TIMEOUT_S, "the killed have ended")
    psutil.wait_procs(processes, timeout=0)  # reaps our own children


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if _is_alive(p)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # ended between the two looks
        return False
