"""The loads of the experiment `goodput`, what it compares, and what it writes."""

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from policies.types import IntArray
from simulator.presets import FEATURES
from simulator.real_times import RealTimes
from simulator.reproduce import goodput
from simulator.reproduce.__main__ import main
from simulator.reproduce.common import Setting
from simulator.reproduce.goodput import TRAFFIC, Variant, in_time
from simulator.workload import Workload

pytestmark = pytest.mark.long

# Of the files that the study's reference was made from, 1500 requests each: medians and the spread of the logarithm.
STUDIED = {
    "mix": {"interactive": ((248, 1.003), (188, 0.799)), "standard": ((3458, 0.614), (205, 0.598))},
    "chat": {"interactive": ((234, 1.022), (184, 0.798))},
}
# Gaps between arrivals times the rate, there: their 50th, 75th, 90th and 95th percentile.
GAPS = {"mix": (0.151, 0.940, 2.654, 4.305), "chat": (0.009, 0.341, 2.272, 4.725)}


def law(tokens: IntArray) -> tuple[float, float]:
    return float(np.median(tokens)), float(np.log(tokens).std())


@pytest.mark.parametrize("kind", TRAFFIC)
def test_drawn_loads_have_the_lengths_and_bursts_of_the_studied_files(kind: str) -> None:
    """Within what 1500 requests tell: a tenth of a median, a third of a percentile of the gaps."""
    rate, count = 10.0, 40_000
    load = TRAFFIC[kind].drawn(rate, count, np.random.default_rng(0))
    assert load.rate == pytest.approx(rate, rel=0.1)
    labels = np.array(load.slo_class)
    assert set(labels.tolist()) == STUDIED[kind].keys()
    for name, laws in STUDIED[kind].items():
        mine = labels == name
        assert mine.mean() == pytest.approx(1 / len(STUDIED[kind]), abs=0.02)
        for tokens, (median, sigma) in zip((load.prompt_tokens, load.output_tokens), laws, strict=True):
            assert law(tokens[mine]) == (pytest.approx(median, rel=0.1), pytest.approx(sigma, rel=0.05))
    gaps = np.percentile(np.diff(load.arrival_s) * rate, (50, 75, 90, 95))
    assert gaps == pytest.approx(np.array(GAPS[kind]), rel=0.34)


def few(seed: int = 0) -> Workload:
    return TRAFFIC["mix"].drawn(15.0, 60, np.random.default_rng(seed))


CAPPED = [goodput.STOCK.capped(*cap) for cap in goodput.LINES.caps]


@pytest.mark.parametrize("variant", [*goodput.FILE_VARIANTS.values(), *CAPPED, *goodput.LEAVE_OUT.values()])
def test_every_variant_can_be_run(variant: Variant) -> None:
    assert 0.0 <= in_time(variant, few(), 0) <= 1.0


def test_the_grid_of_refusals_has_fifteen_different_settings_of_stock() -> None:
    engines = [variant.config().engine for variant in CAPPED]
    assert len({(each.max_batch_tokens, each.max_num_queued_tokens) for each in engines}) == 15
    assert {variant.system for variant in CAPPED} == {"stock"}


def test_several_replicas_are_judged_under_as_many_times_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By law for as long, in a file with the same requests in less time."""
    small(monkeypatch)
    monkeypatch.setattr(goodput, "REQUESTS", 2000)
    write(tmp_path, "mine", "interactive")
    loads = (partial(goodput._of_law, TRAFFIC["mix"], 10.0), partial(goodput._of_file, tmp_path / "mine.csv.gz"))
    (one, four), (file_one, file_four) = ([load(0, replicas) for replicas in (1, 4)] for load in loads)
    assert len(four) == 4 * len(one)
    assert four.arrival_s[-1] == pytest.approx(one.arrival_s[-1], rel=0.2)
    assert len(file_four) == len(file_one)
    assert file_four.arrival_s[-1] == pytest.approx(file_one.arrival_s[-1] / 4)
    assert {variant.config().replicas for variant in goodput.FILE_VARIANTS.values()} == {1, 4}


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One load of each kind, eight requests, two settings of the grid."""
    monkeypatch.setattr(goodput, "REQUESTS", 8)
    for name in ("TRAFFIC", "MEASURED_TRAFFIC"):
        traffic = {kind: replace(each, rates=each.rates[-1:]) for kind, each in getattr(goodput, name).items()}
        monkeypatch.setattr(goodput, name, traffic)
    monkeypatch.setattr(goodput, "CPU_TRAFFIC", replace(goodput.CPU_TRAFFIC, rates=(3.0,)))
    for name in ("LINES", "MEASURED", "CPU"):
        served = getattr(goodput, name)
        monkeypatch.setattr(goodput, name, replace(served, caps=served.caps[:2]))


def write(folder: Path, name: str, labels: str, stock: float | None = None) -> None:
    rows = [f"{0.1 * n},200,20,{labels}" for n in range(20)]
    text = "\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows])
    (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
    if stock is not None:
        entry = {"stock8192": stock, "best_cap": [1.0, 1024, 2500], "moore_hodgson": 1.0}
        (folder / "reference.json").write_text(json.dumps({name: entry}))


def test_the_experiment_writes_its_tables_and_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    write(tmp_path, "mine", "interactive", stock=1.0)
    write(tmp_path, "others", "chat")
    main(["goodput", "--data", str(tmp_path), "--figures", str(tmp_path), "--seeds", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")] == [
        "load", "---", "mix 20/s", "chat 70/s", "file", "---", "mine",
    ]  # fmt: skip
    assert "Stock is at most 0.0000 from the reference's: within 0.01." in lines
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_a_reference_that_does_not_agree_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    write(tmp_path, "mine", "interactive", stock=0.9)
    lines = goodput.goodput(Setting(data=tmp_path, runs=1))
    assert lines[-1] == "Stock is at most 0.1000 from the reference's: NOT within 0.01."


def test_leaving_features_out_names_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    heading, _, *rows = goodput.leave_out(Setting(runs=1))
    assert all(name in heading for name in FEATURES)
    assert len(rows) == 5


def test_the_measured_engine_and_the_slow_one_have_tables_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small(monkeypatch)
    main(["goodput-measured", "goodput-cpu", "--figures", str(tmp_path), "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("|")] == [
        "load", "---", "mix 20/s", "chat 40/s", "chat 10/s, documents", "chat 20/s, documents",
        "load", "---", *(f"CPU 3/s, steps {name}" for name in goodput.CPU_REAL_TIMES),
    ]  # fmt: skip
    assert (tmp_path / "goodput_measured.png").is_file()


def test_plain_vllm_keeps_fewer_promises_where_steps_take_longer_than_believed() -> None:
    rng = np.random.default_rng(0)
    load = goodput.CPU_TRAFFIC.drawn(8.1, 200, rng)
    believed, longer = (
        in_time(goodput.STOCK, load, 0, replace(goodput.CPU, real_times=real)) for real in (None, RealTimes(factor=1.4))
    )
    assert longer < believed - 0.05


def test_on_the_slow_engine_plain_vllm_keeps_95_percent_at_the_capacity_of_the_real_one() -> None:
    served = replace(goodput.CPU, real_times=RealTimes(factor=1.4))
    shares = [
        in_time(goodput.STOCK, goodput.CPU_TRAFFIC.drawn(3.0, 1500, np.random.default_rng(seed)), seed, served)
        for seed in range(3)
    ]
    assert np.mean(shares) == pytest.approx(0.95, abs=0.02)
