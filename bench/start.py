"""What a start costs: CPU seconds from `sluice serve` to the first answer, and the memory of what runs then.

    python -m bench.start --other ../sluice-before --repeats 5

Starts the demo model, waits for its first answer, and ends it again; with `--other`, the program of another checkout
in turn with this one's: A B, B A, A B ... CPU time (user and system) is that of every process that the start has made,
by what it is. Of processes that ended meanwhile their parents' account is taken where it says more than what was last
seen of them. Each start finds the files of the one before it in the page cache; CPU time leaves out what disks take.
"""

import argparse
import json
import platform
import re
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.cpu import Role, role_of
from bench.load import first_model
from bench.report import markdown_table
from bench.servers import HOST, SLUICE_READY, Server, ServerSpec
from bench.session import MEASURED, exit_status, folder, positive, turns
from bench.summary import Spread, paired_ratios

POLL_S = 0.5
ANSWER_TIMEOUT_S = 60.0
# Finer than roles; the first that is found decides.
PARTS = (
    (re.compile(r"\bsluice serve\b"), "`sluice serve`"),
    (re.compile(r"^ray::ServeController"), "Serve's controller"),
    (re.compile(r"^ray::(HAProxyManager|ProxyActor)"), "Serve's proxies"),
)
MEASURED_FOR_MEMORY = (Role.ENGINE_RELAY.value, Role.ENGINE_CORE.value, Role.ROUTER.value)
MEBIBYTE = 2**20


def part_of(command_line: str) -> str:
    return next((part for pattern, part in PARTS if pattern.search(command_line)), role_of(command_line).value)


@dataclass(slots=True)
class Seen:
    """A process as it was last seen: its own CPU seconds, those of children that it has waited for, and bytes."""

    part: str
    parent: int
    own_s: float
    waited_for_s: float
    rss_bytes: int = 0
    pss_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start. Memory is a mean over the processes of a part, in bytes."""

    ready_s: float
    cpu_s: Mapping[str, float]
    rss_bytes: Mapping[str, float]
    pss_bytes: Mapping[str, float]

    @property
    def total_cpu_s(self) -> float:
        return sum(self.cpu_s.values())


def cpu_s_by_part(alive: Mapping[int, Seen], ended: Mapping[int, Seen]) -> dict[str, float]:
    """CPU seconds by part, of processes by their ids.

    What a process waited for counts as its own. A process that ended under one that had not waited for it, or that has
    ended itself, counts as it was last seen.
    """
    used_s: defaultdict[str, float] = defaultdict(float)
    last_seen_s: defaultdict[int, float] = defaultdict(float)
    for each in ended.values():
        if each.parent in alive:
            last_seen_s[each.parent] += each.own_s + each.waited_for_s
        else:
            used_s[each.part] += each.own_s
    for number, each in alive.items():
        used_s[each.part] += each.own_s + max(each.waited_for_s, last_seen_s[number])
    return dict(used_s)


@dataclass(slots=True)
class Watch:
    """Looks at a server's processes again and again, so that those that end are seen before."""

    server: Server
    seen: dict[psutil.Process, Seen] = field(default_factory=dict)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks now and then until the end of the with block."""
        stopped = threading.Event()
        watching = threading.Thread(target=self._look_until, args=(stopped,), daemon=True)
        watching.start()
        try:
            yield
        finally:
            stopped.set()
            watching.join()

    def _look_until(self, stopped: threading.Event) -> None:
        while not stopped.wait(POLL_S):
            self.look()

    def look(self) -> set[psutil.Process]:
        """Returns those that live."""
        alive = self.server.processes()
        for process in alive:
            with suppress(psutil.Error), process.oneshot():
                used = process.cpu_times()
                self.seen[process] = Seen(
                    part=part_of(" ".join(process.cmdline())),
                    parent=process.ppid(),
                    own_s=used.user + used.system,
                    waited_for_s=used.children_user + used.children_system,
                )
        return alive

    def result(self, ready_s: float) -> Start:
        alive = self.look()
        for process in alive & self.seen.keys():
            with suppress(psutil.Error):
                memory = process.memory_full_info()
                self.seen[process].rss_bytes, self.seen[process].pss_bytes = memory.rss, memory.pss
        living = {process.pid: seen for process, seen in self.seen.items() if process in alive}
        ended = {process.pid: seen for process, seen in self.seen.items() if process not in alive}
        return Start(
            ready_s=ready_s,
            cpu_s=cpu_s_by_part(living, ended),
            rss_bytes=_mean_by_part((seen.part, seen.rss_bytes) for seen in living.values()),
            pss_bytes=_mean_by_part((seen.part, seen.pss_bytes) for seen in living.values()),
        )


def _mean_by_part(values: Iterable[tuple[str, int]]) -> dict[str, float]:
    by_part: defaultdict[str, list[int]] = defaultdict(list)
    for part, value in values:
        by_part[part].append(value)
    return {part: statistics.mean(each) for part, each in by_part.items()}


def ask(url: str) -> None:
    """Ask for a short answer. Raises OSError where there is none."""
    body = {"model": first_model(url), "prompt": "Hello", "max_tokens": 4}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        json.load(answer)


def measure(spec: ServerSpec, timeout_s: float, logs: Path) -> Start:
    """Raises: ServerFailed, ServerUnusable, OSError."""
    with Server(spec, logs) as server:
        watch = Watch(server)
        with watch.looking():
            ready_s = server.wait_until_ready(timeout_s)
            ask(spec.url)
        return watch.result(ready_s)


def spec_of(name: str, checkout: Path | None, options: argparse.Namespace) -> ServerSpec:
    """The server of a checkout, in its own environment; None is this one."""
    programs = Path(sys.executable).parent if checkout is None else checkout.absolute() / ".venv" / "bin"
    counts = (f"--engine-replicas={options.engines}", f"--router-replicas={options.routers}")
    return ServerSpec(
        name=name,
        command=(str(programs / "sluice"), "serve", f"--host={HOST}", f"--port={options.port}", *counts),
        port=options.port,
        ready_line=SLUICE_READY,
        folder=checkout,
    )


def as_markdown(starts: Mapping[str, Sequence[Start]]) -> str:
    names = list(starts)
    everything = [start for each in starts.values() for start in each]
    used = {
        part: statistics.median(start.cpu_s.get(part, 0.0) for start in everything)
        for start in everything
        for part in start.cpu_s
    }
    rows = [_row(part, starts, "cpu_s", part) for part in sorted(used, key=lambda part: -used[part])]
    rows.append(["**all**", *(_cell(start.total_cpu_s for start in each) for each in starts.values())])
    memory = [
        _row(f"{part}, {kind.upper()}", starts, f"{kind}_bytes", part, MEBIBYTE)
        for part in MEASURED_FOR_MEMORY
        for kind in ("rss", "pss")
    ]
    tables = [
        f"CPU seconds to the first answer, median [least, greatest] of {len(starts[names[0]])} starts:",
        markdown_table(["process", *names], rows),
        "Memory of one process once it has answered, MiB:",
        markdown_table(["process", *names], memory),
    ]
    if len(names) == 2:
        old, new = ([start.total_cpu_s for start in each] for each in starts.values())
        tables.append(f"{names[1]} over {names[0]}, paired: {paired_ratios(new, old):.2f} of the CPU seconds.")
    return "\n\n".join(tables)


def _row(title: str, starts: Mapping[str, Sequence[Start]], kind: str, part: str, unit: int = 1) -> list[str]:
    return [title, *(_cell(getattr(start, kind).get(part, 0.0) / unit for start in each) for each in starts.values())]


def _cell(values: Iterable[float]) -> str:
    return format(Spread.of(list(values)), ".1f")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--other", type=folder, help="another checkout, with an environment in its .venv")
    add("--repeats", type=positive, default=3, help="starts of each (default: %(default)s)")
    add("--engines", type=positive, default=2, help="engine replicas (default: %(default)s)")
    add("--routers", type=positive, default=1, help="routers (default: %(default)s)")
    add("--port", type=positive, default=8620, help="for one at a time (default: %(default)s)")
    add("--ready-timeout", type=positive, default=600, help="seconds (default: %(default)s)")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, logs: Path) -> dict[str, list[Start]]:
    """Starts by checkout, in the order of the repeats."""
    specs = [spec_of("this", None, options)]
    if options.other is not None:
        specs.insert(0, spec_of("other", options.other, options))
    starts: dict[str, list[Start]] = {spec.name: [] for spec in specs}
    for repeat in range(options.repeats):
        for spec in turns(specs, repeat):
            print(f"repeat {repeat + 1}/{options.repeats}, {spec.name}", file=sys.stderr, flush=True)
            start = measure(spec, options.ready_timeout, logs)
            starts[spec.name].append(start)
            print(f"  {start.total_cpu_s:.1f} CPU s, ready after {start.ready_s:.0f} s", file=sys.stderr, flush=True)
    return starts


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(sys.argv[1:] if arguments is None else arguments)

    def measured(stack: ExitStack) -> int:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-start-")))
        starts = run(options, logs)
        print(f"{platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}\n")
        print(as_markdown(starts))
        return MEASURED

    return exit_status("bench.start", measured)


if __name__ == "__main__":
    sys.exit(main())
