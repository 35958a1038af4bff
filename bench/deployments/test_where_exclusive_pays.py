"""Where exclusive batching wins, and whether auto finds it: what no CPU shows, swept on a virtual clock.

Not collected by default; run with `pytest bench/deployments/test_where_exclusive_pays.py -s`, on part of the grid with
`-k "16-"` or `-k "64-4.0"`. It leaves `crossover.md` and `crossover.png` in the folder SLUICE_BENCH_OUT, by default one
of pytest's, and names the loads where auto stays more than 1 % below the better of the two modes. vLLM's real scheduler
over step times that are made up: x is what a token costs more in a mixed step, a the ratio of the fixed cost of a
prefill step to that of a decode step. Throughput between a half and nine tenths of the requests, relative to stock;
auto is measured before it takes requests, as an engine is that has just started.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policies.types import StepCoefficients, StepTimes
from simulator.plots import figure, save
from tests.virtual_engine import VirtualEngine, run_closed

DECODE_OVERHEAD_S, PREFILL_S, DECODE_S = 0.006, 2e-5, 4e-5
MEAN_OUTPUT = 80
REQUESTS = (
    48  # for each slot: some thirty replans, so that the looks at the other mode count as they do in the long run
)
GRID = [(n, a, x) for n in (16, 64, 256) for a in (0.4, 1.0, 4.0) for x in (0.0, 0.05, 0.1, 0.2)]
HEADER = "| slots | a | x | exclusive | auto | it ended |\n" + 6 * "|---" + "|"


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens per second relative to stock."""

    slots: int
    a: float
    x: float
    exclusive: float
    auto: float
    ended: str

    @property
    def short(self) -> float:
        """What auto lacks to the better mode, as a share of stock."""
        return max(1.0, self.exclusive) - self.auto

    @property
    def row(self) -> str:
        figures = f"{self.exclusive:.3f} | {self.auto:.3f} | {self.ended}"
        return f"| {self.slots} | {self.a:g} | {100 * self.x:g} % | {figures} |"


def made_up(a: float, x: float) -> StepTimes:
    return StepTimes(
        prefill=StepCoefficients(overhead_s=a * DECODE_OVERHEAD_S, prefill_s=PREFILL_S),
        decode=StepCoefficients(overhead_s=DECODE_OVERHEAD_S, decode_s=DECODE_S),
        mixed=StepCoefficients(
            overhead_s=max(1.0, a) * DECODE_OVERHEAD_S, prefill_s=(1 + x) * PREFILL_S, decode_s=(1 + x) * DECODE_S
        ),
    )


def throughput(settings: dict[str, Any], slots: int, times: StepTimes) -> tuple[float, VirtualEngine]:
    """Output tokens per second of virtual time."""
    rng = random.Random(4)
    requests = [
        (rng.randint(200, 800), min(1000, 1 + int(rng.expovariate(1 / MEAN_OUTPUT)))) for _ in range(REQUESTS * slots)
    ]
    engine = VirtualEngine(settings, slots=slots, blocks=60 * slots + 200, budget=8192, times=times)
    if settings["mode"] == "auto":
        engine.measure()
    run_closed(engine, requests, clients=2 * slots)
    ends = sorted(answer.times_s[-1] for answer in engine.answers.values())
    first, last = ends[len(ends) // 2], ends[9 * len(ends) // 10]
    tokens = sum(first < at <= last for answer in engine.answers.values() for at in answer.times_s)
    return tokens / (last - first), engine


def plotted(loads: list[Load], path: Path) -> None:
    """A panel for each number of slots; for each a exclusive as a line and auto as marks over x."""
    sizes = sorted({load.slots for load in loads})
    made = figure(columns=len(sizes))
    for axis, slots in zip(made.axes, sizes, strict=True):
        for a, colour in zip(sorted({load.a for load in loads}), ("#4477aa", "#228833", "#ee6677"), strict=False):
            mine = [load for load in loads if (load.slots, load.a) == (slots, a)]
            x = [100 * load.x for load in mine]
            axis.plot(x, [load.exclusive for load in mine], color=colour, label=f"exclusive, a = {a:g}")
            axis.plot(x, [load.auto for load in mine], "o", color=colour)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(
            title=f"{slots} slots; dots: auto", xlabel="extra cost of a mixed token, %", ylabel="tokens/s to stock"
        )
    made.axes[0].legend(fontsize=7)
    save(made, path)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Load]]:
    """Loads as they are done; written down at the end."""
    done: list[Load] = []
    yield done
    folder = Path(os.environ.get("SLUICE_BENCH_OUT") or tmp_path_factory.mktemp("crossover"))
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([HEADER, *(load.row for load in done)])
    missed = "\n".join(f"auto misses {100 * load.short:.1f} %: {load.row}" for load in done if load.short > 0.01)
    (folder / "crossover.md").write_text(f"{text}\n\n{missed or 'auto is within 1 % of the better mode everywhere'}\n")
    plotted(done, folder / "crossover.png")
    print(f"\n{text}\n\n{missed}\nwritten to {folder}")


@pytest.mark.parametrize(("slots", "a", "x"), GRID)
def test_auto_finds_the_better_mode(slots: int, a: float, x: float, loads: list[Load]) -> None:
    times = made_up(a, x)
    stock, _ = throughput({"mode": "stock"}, slots, times)
    exclusive, _ = throughput({"mode": "exclusive"}, slots, times)
    auto, engine = throughput({"mode": "auto"}, slots, times)
    ended = "exclusive" if engine.scheduler.status()["exclusive"] else "mixed"
    loads.append(Load(slots, a, x, exclusive / stock, auto / stock, ended))
    print(f"\n{loads[-1].row}", flush=True)
