"""The servers under test as child processes: their command lines, their start, their end.

Both systems get the same vLLM arguments. A server is ready when it says so: plain vLLM by answering /health, Sluice by
a line on its standard output. Everything a server has started is found by its process tree and by a mark in the
environment (a daemon leaves the tree; a renamed process hides its environment), and is ended by process id.
"""

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq
from zmq.devices import ThreadProxy

HOST = "127.0.0.1"
# One list for both systems; what follows `--` on the command line of bench.compare is appended, and vLLM lets the
# last one win. No CUDA graphs, no logging of requests: neither exists on one side only.
ENGINE_ARGUMENTS = (
    "--max-model-len=2048",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=536870912",
    "--enforce-eager",
    "--no-enable-log-requests",
    "--disable-log-stats",
)
# Both systems are up at once, and vLLM wants this share of a GPU's memory to be free when an engine starts.
GPU_ARGUMENTS = ("--gpu-memory-utilization=0.45",)
SLUICE_READY, RAY_READY, PEER_READY = "Sluice is ready: ", "Ray Serve is ready: ", "vllm-router is ready: "
VLLM_ROUTER = "vllm-router==0.1.17"
MARK = "SLUICE_BENCH_SERVER"
POLL_S = 0.25
GRACEFUL_STOP_S = 40.0
UNREADY_STOP_S = 5.0
TERMINATE_S = 10.0
SHOWN_LOG_LINES = 25


class ServerFailed(Exception):
    """A server did not start, or ended too early; the message ends with its last log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """`ready_line` starts the line that announces readiness; None: /health answers.

    `folder`: where it is started, which Ray's workers import from; None is here.
    """

    name: str
    command: tuple[str, ...]
    port: int
    ready_line: str | None = None
    folder: Path | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line's own arguments, and after `--` those of the engines."""
    listed = list(arguments)
    cut = listed.index("--") if "--" in listed else len(listed)
    return listed[:cut], listed[cut + 1 :]


def vllm_is_for_gpus() -> bool:
    """Its CPU build says so in its version, or is a distribution of another name."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return False
    with suppress(importlib.metadata.PackageNotFoundError):
        return "cpu" not in importlib.metadata.version("vllm")
    return False


def shared_arguments(more: Sequence[str]) -> tuple[str, ...]:
    """Arguments of every engine on the build of vLLM that is installed here, with `more` behind them.

    Of an option that stands there twice the later counts: vLLM does so, and Sluice refuses both.
    """
    given = (*ENGINE_ARGUMENTS, *(GPU_ARGUMENTS if vllm_is_for_gpus() else ()), *more)
    found: dict[str, list[str]] = {}
    name = ""
    for argument in given:
        if argument.startswith("-"):
            name = argument.partition("=")[0]
            found.pop(name, None)
        found.setdefault(name, []).append(argument)
    return tuple(word for words in found.values() for word in words)


def gpus_of_an_engine(given: float | None) -> float:
    """`given`, or the number that the vLLM installed here needs."""
    if given is not None:
        return given
    return 1.0 if vllm_is_for_gpus() else 0.0


def plain_vllm(name: str, model: str, port: int, engine_arguments: Sequence[str]) -> ServerSpec:
    launcher = (sys.executable, "-m", "deployments.plain_vllm")
    return ServerSpec(
        name=name, command=(*launcher, model, f"--host={HOST}", f"--port={port}", *engine_arguments), port=port
    )


def sluice(name: str, port: int, *options: str) -> ServerSpec:
    """`sluice serve` with these options; those go before what a `--config` among them says."""
    command = (_program("sluice"), "serve", f"--port={port}", *options)
    return ServerSpec(name=name, command=command, port=port, ready_line=SLUICE_READY)


def ray_prefix_router(name: str, port: int, engine_urls: Sequence[str]) -> ServerSpec:
    """Stands before engines that run already."""
    command = (sys.executable, "-m", "bench.peers.ray_prefix_router", f"--port={port}", *engine_urls)
    return ServerSpec(name=name, command=command, port=port, ready_line=RAY_READY)


def vllm_router(
    name: str, port: int, engine_urls: Sequence[str], policy: Sequence[str] = ("--policy=cache_aware",)
) -> ServerSpec:
    """Stands before engines that run already. What it says of itself goes to ports behind theirs."""
    metrics_port = port + len(engine_urls) + 1
    own = (f"--host={HOST}", f"--port={port}", f"--prometheus-host={HOST}", f"--prometheus-port={metrics_port}")
    command = (_program("vllm-router"), *own, *policy, "--worker-urls", *engine_urls)
    return ServerSpec(name=name, command=command, port=port)


def by_kv_events(model: str, block_tokens: int, events: Mapping[str, int]) -> tuple[str, ...]:
    """vllm-router's policy that goes by what engines say of their caches.

    Args:
        model: as requests name it.
        block_tokens: of the engines' caches.
        events: the port of each engine's events, by its address.
    """
    sources = (f"--kv-event-source={url}={_zmq(port)}" for url, port in events.items())
    return ("--policy=kv_aware", f"--kv-event-model={model}", f"--kv-event-block-size={block_tokens}", *sources)


def publishing(port: int) -> tuple[str, ...]:
    """Arguments of an engine that says what its cache holds, to whoever listens at this port.

    vLLM binds its events to all addresses or to none: where it is given one, it connects to it.
    """
    return (
        "--kv-events-config",
        json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": _zmq(port)}),
    )


def forward_events(from_port: int, to_port: int) -> None:
    """For as long as this process lives: what engines publish, to those who subscribe, both by connecting to here."""
    forwarder = ThreadProxy(zmq.XSUB, zmq.XPUB)  # type: ignore[no-untyped-call]  # pyzmq leaves its types out
    forwarder.bind_in(_zmq(from_port))
    forwarder.bind_out(_zmq(to_port))
    forwarder.start()


def _zmq(port: int) -> str:
    return f"tcp://{HOST}:{port}"


def vllm_router_and_engines(
    name: str, model: str, port: int, engines: int, engine_arguments: Sequence[str]
) -> ServerSpec:
    """vllm-router and its engines as one server, which takes `engines` + 2 ports."""
    launcher = (sys.executable, "-m", "bench.peers.vllm_router", f"--port={port}", f"--engines={engines}")
    return ServerSpec(name=name, command=(*launcher, model, *engine_arguments), port=port, ready_line=PEER_READY)


def _program(name: str) -> str:
    """The script that belongs to this Python, not another one on PATH."""
    return str(Path(sys.executable).with_name(name))


def server_environment(mark: str) -> dict[str, str]:
    """This environment with the server's mark; what vLLM's CPU build needs, both launchers set alike.

    VLLM_CPU_KVCACHE_SPACE would override `--kv-cache-memory-bytes`.
    """
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return environment | {"PYTHONUNBUFFERED": "1", MARK: mark}


class Server:
    """A child process with all that it started. As a context manager it is stopped at the end in any case."""

    def __init__(self, spec: ServerSpec, log_folder: Path, terminate_s: float = TERMINATE_S) -> None:
        self.spec = spec
        self._terminate_s = terminate_s
        self.log_path = log_folder / f"{spec.name.replace(' ', '_')}-{spec.port}.log"
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()
        self._stop_s = UNREADY_STOP_S

    def __enter__(self) -> "Server":
        """Raises: ServerFailed: the port is taken or the program is missing."""
        self._check_port()
        try:
            with self.log_path.open("wb") as log:
                self._child = subprocess.Popen(
                    self.spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=server_environment(self._mark),
                    cwd=self.spec.folder,
                    process_group=0,  # Ctrl-C ends the bench, and the bench ends the server; all share cores alike
                )
        except OSError as error:
            program = self.spec.command[0]
            raise ServerFailed(
                f"cannot start {self.spec.name}: {program}: {error.strerror}{_way_out(program)}"
            ) from None
        self._root = psutil.Process(self._child.pid)
        return self

    def __exit__(self, *_: object) -> None:
        with _interrupts_ignored():
            self.stop()

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.spec.port))
            except OSError as error:
                raise ServerFailed(f"port {self.spec.port} for {self.spec.name}: {error.strerror}") from None

    def wait_until_ready(self, timeout_s: float) -> float:
        """Seconds it took. Raises: ServerFailed: it ended, or is not ready in time."""
        started_s = time.monotonic()
        while not self._is_ready():
            self.check_alive()
            if time.monotonic() - started_s > timeout_s:
                raise ServerFailed(f"{self.spec.name} is not ready after {timeout_s:g} s\n{self._log_tail()}")
            time.sleep(POLL_S)
        self._stop_s = GRACEFUL_STOP_S
        return time.monotonic() - started_s

    def check_alive(self) -> None:
        """Raises: ServerFailed."""
        status = self._child.poll()
        if status is not None:
            raise ServerFailed(f"{self.spec.name} ended with status {status}\n{self._log_tail()}")

    def _is_ready(self) -> bool:
        if self.spec.ready_line is not None:
            return self.spec.ready_line in self.log_path.read_text(errors="replace")
        with suppress(OSError), urllib.request.urlopen(f"{self.spec.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
        return "\n".join([f"last lines of its log, {self.log_path.name}:", *(f"  {line}" for line in lines)])

    def processes(self) -> set[psutil.Process]:
        """Every living process of this server."""
        marked = {process for process in psutil.process_iter() if self._bears_mark(process)}
        for parent in marked | self._seen | {self._root}:
            with suppress(psutil.Error):
                self._seen.update(parent.children(recursive=True))
        self._seen |= marked | {self._root}
        self._seen = {process for process in self._seen if _is_alive(process)}
        return set(self._seen)

    def _bears_mark(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return process.environ().get(MARK) == self._mark
        return False

    def stop(self) -> None:
        """Asks the server to end, then ends by process id what is left of it."""
        self.processes()
        self._child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(self._stop_s)
        self._send_each(signal.SIGTERM)
        self._send_each(signal.SIGKILL)
        self._child.wait()

    def _send_each(self, number: signal.Signals) -> None:
        left = self.processes()
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(number)
        psutil.wait_procs(left, timeout=self._terminate_s)


def _way_out(program: str) -> str:
    return f"; {sys.executable} -m pip install {VLLM_ROUTER}" if Path(program).name == "vllm-router" else ""


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C while servers are being stopped would leave the rest of them running."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
