"""The loads of the experiment `completion`, what it compares, and what it writes."""

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from policies.types import StepCoefficients, StepTimes
from simulator.cluster import run
from simulator.engine import EngineConfig
from simulator.engines import engine_profile
from simulator.presets import system
from simulator.report import Target, attainment
from simulator.reproduce import completion
from simulator.reproduce.__main__ import main
from simulator.reproduce.completion import TRAFFIC, VARIANTS
from simulator.reproduce.goodput import in_time
from simulator.workload import Workload, gamma_bursts

pytestmark = pytest.mark.long

# Of the files that the study's reference was made from, 1500 requests each: the share of a class, and the medians of
# its prompts and answers.
STUDIED = {
    "chat": {"chat": (1.0, 245, 153)},
    "agents": {"tool": (1.0, 748, 38)},
    "mix": {"chat": (0.6, 250, 152), "document": (0.4, 3340, 254)},
}


def drawn(name: str, load: float, count: int) -> Workload:
    traffic = TRAFFIC[name]
    return traffic.drawn(load * traffic.capacity, count, np.random.default_rng(0))


@pytest.mark.parametrize("name", TRAFFIC)
def test_drawn_loads_have_the_rate_the_classes_and_the_lengths_of_the_studied_files(name: str) -> None:
    """Within what 1500 requests tell: a tenth of a median."""
    load = drawn(name, 1.5, 40_000)
    assert load.rate == pytest.approx(1.5 * TRAFFIC[name].capacity, rel=0.05)
    gaps = np.diff(load.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)
    labels = np.array(load.slo_class)
    assert set(labels.tolist()) == STUDIED[name].keys()
    for slo_class, (share, prompt, output) in STUDIED[name].items():
        mine = labels == slo_class
        assert mine.mean() == pytest.approx(share, abs=0.02)
        assert np.median(load.prompt_tokens[mine]) == pytest.approx(prompt, rel=0.1)
        assert np.median(load.output_tokens[mine]) == pytest.approx(output, rel=0.1)


def test_some_of_what_agents_ask_for_has_a_long_answer() -> None:
    load = drawn("agents", 1.0, 40_000)
    assert (load.output_tokens > 300).mean() == pytest.approx(0.12, abs=0.02)


def test_beyond_capacity_sluice_keeps_more_whole_answers_in_time_and_most_where_lengths_are_known() -> None:
    shares = {
        name: in_time(variant, drawn("chat", 1.5, 1500), 0, completion.SERVED) for name, variant in VARIANTS.items()
    }
    assert shares["stock"] + 0.05 < shares[completion.WITHOUT_PREDICTIONS] < shares["Sluice"]
    assert shares["Sluice"] < shares["Sluice, lengths known"] + 0.01


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads of each kind, twenty requests, two settings of the grid."""
    monkeypatch.setattr(completion, "REQUESTS", 20)
    monkeypatch.setattr(completion, "LOADS", (0.8, 2.5))
    monkeypatch.setattr(completion, "SERVED", replace(completion.SERVED, caps=completion.SERVED.caps[:2]))


def test_the_experiments_write_their_tables_and_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    main(["completion", "completion-lengths", "--figures", str(tmp_path), "--seeds", "1"])
    heading, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert all(name in heading for name in (*VARIANTS, "Sluice - stock", "Sluice - Sluice, no predictions"))
    assert [row.split("|")[1].strip() for row in rows] == [
        "---", *(f"{name} x {load:g}" for name in TRAFFIC for load in (0.8, 2.5)),
        "load", "---", *(f"{name} x 2.5" for name in TRAFFIC),
    ]  # fmt: skip
    assert (tmp_path / "completion.png").read_bytes().startswith(b"\x89PNG")


def test_who_misses_is_told_by_the_length_of_answers() -> None:
    """Beyond capacity the longest are given up first."""
    job = (lambda seed, replicas: drawn("agents", 2.5, 600), VARIANTS["Sluice"], 0)
    shorter, longest = completion._shares_by_length(job)
    assert 1.0 >= shorter > longest >= 0.0


def served_after_a_burst(system_name: str) -> tuple[float, float]:
    """Tool calls on 16 slots, 200 at once and then four a second: the share in time, and seconds from the last arrival
    to the last token."""
    rng, count = np.random.default_rng(0), 1000
    law = StepCoefficients(overhead_s=0.0125, prefill_s=0.00014, decode_s=0.0006)
    times = StepTimes(prefill=law, decode=law, mixed=law)
    profile = replace(engine_profile("Llama-3.1-8B@h100_sxm"), times=times, clock=times)
    arrival_s = np.concatenate([np.linspace(0.0, 0.5, 200), gamma_bursts(4.0, 2.0, count - 200, rng)])
    answers = np.where(rng.random(count) < 0.88, rng.integers(12, 37, count), rng.integers(240, 721, count))
    workload = Workload.of(
        "tool calls", arrival_s, rng.integers(100, 320, count), answers, slo_class=["agents"] * count
    )
    targets = {"agents": Target(e2e_s=3.2)}
    sizes = EngineConfig(slots=16, total_blocks=40_000, max_batch_tokens=2048)
    served = run(system(system_name, profile, sizes, 1, targets), workload)
    return attainment(served, targets), max(each.finished_s or inf for each in served.requests) - arrival_s.max()


def test_a_burst_that_makes_many_late_is_served_and_over() -> None:
    """Where late answers held a tenth of the slots, an engine stayed at that tenth for as long as requests came."""
    stock, _ = served_after_a_burst("stock")
    kept, ended_s = served_after_a_burst("sluice")
    assert kept > stock
    assert ended_s < 20.0
