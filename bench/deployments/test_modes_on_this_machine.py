"""The scheduler's modes side by side in one real engine, on this machine's CPU or GPU.

Not collected by default; run with `pytest bench/deployments/test_modes_on_this_machine.py -s` on an idle machine: 20
minutes at most with the settings below, and a line on stderr after each run. It leaves `modes.md` and `modes.png` in
the folder that it names at the end. Settings by environment:

    SLUICE_BENCH_MODEL     a model's folder or name; without, a random Qwen3 of 34 million parameters
    SLUICE_BENCH_ARGS      further vLLM arguments as JSON, such as {"load_format": "dummy"}
    SLUICE_BENCH_SECONDS   wall seconds for everything, the engines' starts included (default 1100); what the machine is
                           too slow for is left out: first requests, down to 1.5 for each slot, then rounds, down to one
    SLUICE_BENCH_REPEATS   rounds over all modes (default 3)
    SLUICE_BENCH_SLOTS     batch sizes, by default "16 48"
    SLUICE_BENCH_REQUESTS  most requests of a run for each slot (default 6)
    SLUICE_BENCH_SCALE     factor on prompts and answers (default 1)
    SLUICE_BENCH_CLOCK     "cpu" counts this process's CPU seconds, steadier where cores are shared; "wall" otherwise
    SLUICE_BENCH_OUT       where the table and the plot go (default: a folder of pytest's)

Each load has an engine in a process of its own, so that the next one finds all memory free. Modes take turns in it, in
an order that rotates, each with the same requests; ratios are to stock in the same round. Every round of `auto` starts
from what the modes before it taught it; "with a profile" from that alone, which is made of the warm-up. "By its steps"
is the same ratio with every step charged what one law, fitted to the steps of all modes, says of what it holds: where
cores are shared the clock hides differences of a few percent.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bench.deployments.engine_in_process import CLOCK, Request, VllmEngine, closed_loop, new_engine
from bench.deployments.engine_steps import StepRecorder, law_of, seconds_by
from bench.own_process import in_own_process
from bench.session import turns
from bench.summary import Spread
from deployments.command.calibrate import write_profile
from policies.types import StepResult, StepTimes
from simulator.plots import figure, save

# In an engine's process it is that of the process which asked for it.
BEGAN = float(os.environ.get("SLUICE_BENCH_BEGAN", time.monotonic()))
now = time.process_time if CLOCK == "cpu" else time.perf_counter

SECONDS = float(os.environ.get("SLUICE_BENCH_SECONDS", "1100"))
REPEATS = int(os.environ.get("SLUICE_BENCH_REPEATS", "3"))
SLOTS = tuple(map(int, os.environ.get("SLUICE_BENCH_SLOTS", "16 48").split()))
REQUESTS = float(os.environ.get("SLUICE_BENCH_REQUESTS", "6"))
SCALE = float(os.environ.get("SLUICE_BENCH_SCALE", "1"))
MODES: dict[str, dict[str, Any]] = {
    "stock": {"mode": "stock"},
    "mixed": {"mode": "mixed", "papers": {}, "max_batch_size": None},
    "exclusive k=1": {"mode": "exclusive", "papers": {"refill": 1}},
    "exclusive k*": {"mode": "exclusive", "papers": {}},
    "auto": {"mode": "auto", "papers": {}},
}
TIGHT: dict[str, dict[str, Any]] = {
    "stock": MODES["stock"],
    "auto, with a profile": MODES["auto"] | {"profile": True},  # after stock, which forgets what was learned
    "stock, watermark 5 %": {"mode": "stock", "watermark": 0.05},
    "static cap 12": {"mode": "mixed", "admission": "slots", "max_batch_size": 12},
    "static cap 24": {"mode": "mixed", "admission": "slots", "max_batch_size": 24},
    "eq. 12": {"mode": "mixed", "papers": {"memory": "exact"}, "max_batch_size": None},
    "forecast": MODES["mixed"],
    "auto": MODES["auto"],
}
TIGHT_SLOTS = 48
FIGURES = ("tokens_per_s", "ttft_mean_s", "itl_p99_s", "tpot_p99_s", "preempted")
COLUMNS = (
    "mode", "tokens/s to stock", "by its steps", "tokens/s", "mean TTFT s", "ITL p99 s", "TPOT p99 s", "preempted",
)  # fmt: skip
HEADER = f"| {' | '.join(COLUMNS)} |\n" + len(COLUMNS) * "|---" + "|"
_FRESH: dict[str, Any] = {"admission": "forecast", "max_batch_size": None, "papers": {}, "profile": None}


@dataclass(frozen=True, slots=True)
class Run:
    """One mode over the whole workload; seconds on the chosen clock."""

    tokens: int
    steps: list[StepResult]
    tokens_per_s: float
    ttft_mean_s: float
    itl_p99_s: float
    tpot_p99_s: float
    preempted: int


@dataclass(frozen=True, slots=True)
class Load:
    """Modes to compare in one engine.

    Attributes:
        engine: further arguments of it.
        loads_left: this one and those that come after it, each as its share of the time that the runs have.
    """

    title: str
    modes: dict[str, dict[str, Any]]
    slots: int
    clients: int
    engine: dict[str, Any]
    loads_left: tuple[int, ...]

    def ends_s(self, now_s: float, start_s: float) -> float:
        """Until when it may run, if the engine's start took so long and that of each later one does."""
        left_s = BEGAN + SECONDS - now_s - start_s * (len(self.loads_left) - 1)
        return now_s + max(0.0, left_s) * self.loads_left[0] / sum(self.loads_left)


def workload(count: int) -> list[Request]:
    rng = random.Random(17)
    return [
        Request(int(SCALE * rng.randint(64, 512)), 1 + min(int(SCALE * 400), int(rng.expovariate(1 / (64 * SCALE)))))
        for _ in range(count)
    ]


def measure(engine: VllmEngine, requests: Sequence[Request], clients: int) -> Run:
    recorder = StepRecorder(engine.scheduler, now)
    try:
        found = closed_loop(engine, requests, clients=clients, now=now).figures()
    finally:
        recorder.close()
    return Run(
        tokens=found["output_tokens"],
        steps=recorder.steps,
        tokens_per_s=found["output_tokens_per_s"],
        ttft_mean_s=found["ttft_mean_s"],
        itl_p99_s=found["itl_p99_s"],
        tpot_p99_s=found["tpot_p99_s"] or 0.0,
        preempted=sum(step.preempted for step in recorder.steps),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of every mode in each round, and the law of all their steps."""

    runs: dict[str, list[Run]]
    times: StepTimes

    @property
    def rounds(self) -> int:
        return len(self.runs["stock"])

    def ratios(self, name: str) -> list[float]:
        """Tokens per second to those of stock in the same round, in rising order."""
        return self._ratios(name, lambda run: run.tokens_per_s)

    def ratios_by_steps(self, name: str) -> list[float]:
        """The same with the seconds that the law gives to the steps of a run."""
        return self._ratios(name, lambda run: run.tokens / seconds_by(self.times, run.steps))

    def _ratios(self, name: str, speed: Callable[[Run], float]) -> list[float]:
        pairs = zip(self.runs[name], self.runs["stock"], strict=True)
        return sorted(speed(mine) / speed(stock) for mine, stock in pairs)


def table(title: str, found: Comparison) -> str:
    lines = [
        f"## {title}",
        "",
        f"{found.rounds} rounds; medians, and in brackets the range of the ratios",
        "",
        HEADER,
    ]
    for name, runs in found.runs.items():
        both = [Spread.of(found.ratios(name)), Spread.of(found.ratios_by_steps(name))]
        figures = [f"{statistics.median(getattr(run, field) for run in runs):.3g}" for field in FIGURES]
        lines.append(f"| {name} | {both[0]:.3f} | {both[1]:.3f} | {' | '.join(figures)} |")
    return "\n".join(lines)


def plotted(found: dict[str, Comparison], path: Path) -> None:
    """Ratios to stock, a panel for each load: medians as bars, ranges as whiskers."""
    made = figure(columns=len(found))
    for axis, (title, comparison) in zip(made.axes, found.items(), strict=True):
        for at, name in enumerate(comparison.runs):
            all_ratios = comparison.ratios(name)
            axis.barh(at, statistics.median(all_ratios), color="#4477aa" if name == "auto" else "#bbccdd")
            axis.plot((all_ratios[0], all_ratios[-1]), (at, at), color="black")
        axis.set_yticks(range(len(comparison.runs)), list(comparison.runs))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("tokens/s to stock")
        axis.axvline(1.0, color="grey", linewidth=0.8)
    save(made, path)


def told(line: str) -> None:
    print(f"[{time.monotonic() - BEGAN:5.0f} s] {line}", file=sys.stderr, flush=True)


def set_mode(engine: VllmEngine, mode: dict[str, Any], profile: Path) -> None:
    """profile: for a mode that wants one."""
    scheduler = engine.scheduler
    settings = _FRESH | mode
    settings["profile"] = profile if settings["profile"] else None
    caches = scheduler.kv_cache_manager
    caches.watermark_blocks = int(settings.pop("watermark", 0.0) * caches.block_pool.num_gpu_blocks)
    scheduler.control(settings)


def compared(load: Load, folder: Path, asked_s: float) -> Comparison:
    """All modes in turn in an engine of this process, as long as this load's share of the time lasts.

    asked_s: when the process was asked for, on the monotonic clock.
    """
    engine = VllmEngine(new_engine(folder, max_num_seqs=load.slots, max_num_batched_tokens=2048, **load.engine))
    began = time.monotonic()
    ends = load.ends_s(began, began - asked_s)
    told(f"{load.title}: an engine in process {os.getpid()} after {began - asked_s:.0f} s")
    # Written after the warm-up, with what that has shown of step times.
    profile = folder / "profile.csv"
    warm_up = workload(2 * load.slots)
    warm = []
    for mode in (MODES["stock"], MODES["exclusive k*"]):
        set_mode(engine, mode, profile)
        warm.append(measure(engine, warm_up, load.clients))
    write_profile(profile, law_of(run.steps for run in warm), (64, 512), model="bench", gpu="here")
    request_s = (time.monotonic() - began) / (2 * len(warm_up))
    fitting = int((ends - time.monotonic()) / (request_s * REPEATS * len(load.modes)))
    requests = workload(min(round(REQUESTS * load.slots), max(round(1.5 * load.slots), fitting)))
    told(f"{load.title}: {len(requests)} requests a run, {1e3 * request_s:.0f} ms each")
    runs: dict[str, list[Run]] = {name: [] for name in load.modes}
    for repeat in range(REPEATS):
        round_began = time.monotonic()
        for name in turns(list(load.modes), repeat):
            set_mode(engine, load.modes[name], profile)
            runs[name].append(measure(engine, requests, load.clients))
            told(f"{load.title}: round {repeat + 1} of {REPEATS}, {name}: {runs[name][-1].tokens_per_s:.0f} tokens/s")
        if repeat + 1 < REPEATS and 2 * time.monotonic() - round_began > ends:
            told(f"{load.title}: no time for another round")
            break
    # The second warm-up too: it has what other modes may lack, prefills without decodes.
    return Comparison(runs, law_of(run.steps for run in (warm[1], *chain.from_iterable(runs.values()))))


class Report:
    """Runs by load and mode, written down load by load: what is ended in the middle leaves what it had."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Comparison] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, title: str, comparison: Comparison) -> None:
        self._found[title] = comparison
        text = "\n\n".join(table(title, each) for title, each in self._found.items())
        (self._folder / "modes.md").write_text(f"# The scheduler's modes, {CLOCK} seconds\n\n{text}\n")
        plotted(self._found, self._folder / "modes.png")
        print(f"\n{table(title, comparison)}\n\nwritten to {self._folder}")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return Report(Path(os.environ.get("SLUICE_BENCH_OUT") or tmp_path_factory.mktemp("modes")))


ROOMY_WEIGHTS = tuple(slots * len(MODES) for slots in SLOTS)
TIGHT_WEIGHT = TIGHT_SLOTS * len(TIGHT)


def run_load(load: Load, folder: Path, report: Report) -> None:
    os.environ["SLUICE_BENCH_BEGAN"] = str(BEGAN)
    report.add(load.title, in_own_process(compared, load, folder, time.monotonic()))


@pytest.mark.parametrize("number", range(len(SLOTS)), ids=[f"{slots} slots" for slots in SLOTS])
def test_modes_with_room(number: int, tmp_path: Path, report: Report) -> None:
    slots = SLOTS[number]
    title = f"{slots} slots, {2 * slots} clients"
    run_load(Load(title, MODES, slots, 2 * slots, {}, (*ROOMY_WEIGHTS[number:], TIGHT_WEIGHT)), tmp_path, report)


def test_modes_in_a_tight_cache(tmp_path: Path, report: Report) -> None:
    # 70: vLLM wants room for one request of the greatest length; without a model of one's own blocks hold 32 tokens.
    blocks = max(70, round(150 * SCALE)) if "SLUICE_BENCH_MODEL" not in os.environ else 600
    clients = 4 * TIGHT_SLOTS // 3
    title = f"{TIGHT_SLOTS} slots, {clients} clients, a cache for a third of them"
    cache = {"num_gpu_blocks_override": blocks}
    run_load(Load(title, TIGHT, TIGHT_SLOTS, clients, cache, (TIGHT_WEIGHT,)), tmp_path, report)
