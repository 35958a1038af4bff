"""Admission when the KV cache is short, on a virtual clock: vLLM as it is, with its watermark, and with the forecast.

Not collected by default; run with `pytest bench/deployments/test_short_caches.py -s`, on part of it with `-k dear`: two
minutes. It leaves `short_caches.md` in the folder SLUICE_BENCH_OUT, by default one of pytest's. vLLM's real scheduler,
600 requests, 128 clients and slots; output tokens per second, the start included, relative to vLLM as it is.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policies.types import StepCoefficients, StepTimes
from tests.virtual_engine import VirtualEngine, run_closed

SLOTS, REQUESTS, BLOCK_SIZE = 128, 600, 16
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


def throughput(name: str, times: StepTimes, tokens: int) -> tuple[float, int]:
    """Output tokens per second of virtual time, and preemptions."""
    rng = random.Random(7)
    requests = [(rng.randint(8, 300), min(400, 1 + int(rng.expovariate(1 / 60)))) for _ in range(REQUESTS)]
    engine = VirtualEngine(POLICIES[name], slots=SLOTS, blocks=tokens // BLOCK_SIZE + 1, budget=2048, times=times)
    caches = engine.scheduler.kv_cache_manager
    if "watermark" in name:
        caches.watermark_blocks = int(0.05 * caches.block_pool.num_gpu_blocks)
    run_closed(engine, requests, clients=SLOTS)
    assert all(answer.whole for answer in engine.answers.values())
    took_s = max(answer.times_s[-1] for answer in engine.answers.values())
    return sum(output for _, output in requests) / took_s, engine.preempted


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
    found = {name: throughput(name, TIMES[kind], tokens) for name in POLICIES}
    stock = found["stock"][0]
    rows.append(f"| {kind}, {tokens} | " + " | ".join(f"{t / stock:.3f} ({n})" for t, n in found.values()) + " |")
    print(f"\n{rows[-1]}", flush=True)
