"""Admission when the KV cache is short, on a virtual clock: vLLM as it is, with its watermark, and with the forecast.

Not collected by default; run with `pytest bench/deployments/test_short_caches.py -s`, or with `-k dear` on part of it:
some seven minutes. It leaves `short_caches.md` in the folder SLUICE_BENCH_OUT, by default one of pytest's. vLLM's real
scheduler, 3000 requests, 128 clients and slots; output tokens per second relative to vLLM as it is, between a quarter
and nineteen twentieths of the requests, and of the first 600, when lengths and step times are still being learned.

`-k dozen` is the load of `test_modes_on_this_machine.py -k tight`, where a dozen run, on the virtual clock.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.types import StepCoefficients, StepTimes
from tests.virtual_engine import VirtualEngine, run_closed

SLOTS, REQUESTS, FIRST, BLOCK_SIZE = 128, 3000, 600, 16
_CHEAP = StepCoefficients(overhead_s=0.010, prefill_s=2e-5, decode_s=1e-4)
_DEAR = StepCoefficients(overhead_s=0.0046, prefill_s=1.5e-4, decode_s=2.05e-4, kv_s=8.3e-7)
_MIXING = StepCoefficients(overhead_s=0.006, prefill_s=2e-5, decode_s=4e-5)
# A preempted prefill costs little, or as on a small CPU; and, as on a GPU, little where a mixed token costs 20 % more.
TIMES = {
    "cheap": StepTimes(prefill=_CHEAP, decode=_CHEAP, mixed=_CHEAP),
    "dear": StepTimes(prefill=_DEAR, decode=_DEAR, mixed=_DEAR),
    "mixing": StepTimes(
        prefill=_MIXING, decode=_MIXING, mixed=StepCoefficients(overhead_s=0.006, prefill_s=2.4e-5, decode_s=4.8e-5)
    ),
}
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {"mode": "stock"},
    "watermark 5 %": {"mode": "stock"},
    "forecast alone": {"mode": "mixed", "overcommit": False},
    "forecast": {"mode": "mixed"},
    "auto": {"mode": "auto"},
}
HEADER = f"| recomputing, tokens | {' | '.join(POLICIES)} |\n" + (len(POLICIES) + 1) * "|---" + "|"


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens per second of virtual time: in the long run, and while the first requests were answered."""

    steady: float
    start: float
    preempted: int

    def cell(self, stock: "Run") -> str:
        return f"{self.steady / stock.steady:.3f}, {self.start / stock.start:.3f} ({self.preempted})"


def run(name: str, times: StepTimes, tokens: int) -> Run:
    rng = random.Random(7)
    requests = [(rng.randint(8, 300), min(400, 1 + int(rng.expovariate(1 / 60)))) for _ in range(REQUESTS)]
    engine = VirtualEngine(POLICIES[name], slots=SLOTS, blocks=tokens // BLOCK_SIZE + 1, budget=2048, times=times)
    if name == "auto":
        engine.measure()
    return measured(run_closed(with_watermark(engine, name), requests, clients=SLOTS))


def run_dozen(name: str, seed: int) -> Run:
    rng = random.Random(seed)
    requests = [(rng.randint(64, 512), 1 + min(400, int(rng.expovariate(1 / 64)))) for _ in range(REQUESTS)]
    engine = VirtualEngine(POLICIES[name], slots=48, blocks=150, block_size=32, budget=2048, times=TIMES["dear"])
    if name == "auto":
        engine.measure()
    return measured(run_closed(with_watermark(engine, name), requests, clients=64))


def with_watermark(engine: VirtualEngine, name: str) -> VirtualEngine:
    caches = engine.scheduler.kv_cache_manager
    if "watermark" in name:
        caches.watermark_blocks = int(0.05 * caches.block_pool.num_gpu_blocks)
    return engine


def measured(engine: VirtualEngine) -> Run:
    assert all(answer.whole for answer in engine.answers.values())
    ends = sorted(answer.times_s[-1] for answer in engine.answers.values())
    tokens_at = np.sort([at for answer in engine.answers.values() for at in answer.times_s])

    def tokens_per_s(first_s: float, last_s: float) -> float:
        first, last = np.searchsorted(tokens_at, (first_s, last_s), side="right")
        return float((last - first) / (last_s - first_s))

    steady = tokens_per_s(ends[REQUESTS // 4], ends[19 * REQUESTS // 20])
    began_s = min(answer.asked_s for answer in engine.answers.values())
    return Run(steady, tokens_per_s(began_s, ends[FIRST - 1]), engine.preempted)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Lines of the table as they are done; written down at the end."""
    done: list[str] = []
    yield done
    folder = Path(os.environ.get("SLUICE_BENCH_OUT") or tmp_path_factory.mktemp("short_caches"))
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([HEADER, *done])
    (folder / "short_caches.md").write_text(text + "\n")
    print(f"\n{text}\n\nwritten to {folder}")


@pytest.mark.parametrize("tokens", [2400, 4800, 9600, 19200])
@pytest.mark.parametrize("kind", TIMES)
def test_admission_in_a_short_cache(kind: str, tokens: int, rows: list[str]) -> None:
    found = {name: run(name, TIMES[kind], tokens) for name in POLICIES}
    rows.append(f"| {kind}, {tokens} | " + " | ".join(each.cell(found["stock"]) for each in found.values()) + " |")
    print(f"\n{rows[-1]}", flush=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_dozen_at_once(seed: int, rows: list[str]) -> None:
    found = {name: run_dozen(name, seed) for name in POLICIES}
    rows.append(f"| a dozen, seed {seed} | " + " | ".join(each.cell(found["stock"]) for each in found.values()) + " |")
    print(f"\n{rows[-1]}", flush=True)
