"""What a CPU engine gains by a core to itself: `sluice serve` with one engine, the rest of it kept off one core or not.

Not collected by default; run with `pytest bench/deployments/test_cores_of_engines.py -s` on a machine of two idle cores
or more: 5 minutes. One application serves throughout, and its processes are moved between two runs of one pair; which
of the two is first alternates. Every run has prompts of its own: the second of a pair would find those of the first in
the prefix cache.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import uvloop

from bench.cpu import Role, cpu_s_by_role, cpu_times
from bench.load import LoadReport, first_model, measure
from bench.servers import ENGINE_ARGUMENTS, Server, sluice
from bench.session import turns
from bench.summary import Spread, paired_ratios
from bench.workload import LoadConfig
from deployments.command.cores import keep_to
from deployments.process.environment import cores_beside_engines
from deployments.process.ports import free_port

PAIRS = 6
# Streams, and requests of a run.
LOADS = ((16, 96), (64, 256))
START_TIMEOUT_S = 300.0

Run = tuple[LoadReport, float]  # and the engine's share of a core


@pytest.mark.parametrize(("streams", "requests"), LOADS)
def test_with_and_without_a_core_to_itself(streams: int, requests: int, tmp_path: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    beside = cores_beside_engines(everywhere, 1)
    runs: dict[bool, list[Run]] = {False: [], True: []}
    spec = sluice(
        "Sluice", free_port(), "--model=demo", "--router-replicas=1", "--engine-replicas=1", "--", *ENGINE_ARGUMENTS
    )
    with Server(spec, tmp_path) as server:
        server.wait_until_ready(START_TIMEOUT_S)
        load(server, streams, requests // 4, seed=2 * PAIRS)
        for pair in range(PAIRS):
            for alone in turns((False, True), pair):
                keep_to(beside if alone else everywhere, server.processes())
                runs[alone].append(load(server, streams, requests, seed=2 * pair + alone))
    print(f"\n{streams} streams, with a core to itself / without, {PAIRS} pairs")
    for name, values in figures(runs[True]).items():
        print(f"  {name:<16} x{paired_ratios(values, figures(runs[False])[name]):.2f}")
    print(f"  the engine's share of a core: {shares(runs[False]):.2f} -> {shares(runs[True]):.2f}")


def load(server: Server, streams: int, requests: int, seed: int) -> Run:
    url = server.spec.url
    before = cpu_times(server.processes())
    config = LoadConfig(url=url, model=first_model(url), concurrency=streams, requests=requests, seed=seed)
    report = uvloop.run(measure(config))
    assert not report.errors
    engine_s = cpu_s_by_role(before, cpu_times(server.processes()))[Role.ENGINE_CORE]
    return report, engine_s / report.duration_s


def figures(runs: Sequence[Run]) -> dict[str, list[float]]:
    return {
        "requests/s": [report.requests_per_s for report, _ in runs],
        "TTFT p50": [report.ttft_p50_s or 0.0 for report, _ in runs],
        "ITL p50": [report.itl_p50_s or 0.0 for report, _ in runs],
        "engine's share": [share for _, share in runs],
    }


def shares(runs: Sequence[Run]) -> Spread:
    return Spread.of([share for _, share in runs])
