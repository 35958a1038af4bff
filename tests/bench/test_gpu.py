import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.gpu import Part, model_folder, parts, run, with_its_share

pytestmark = pytest.mark.slow


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(sizes=["0.6b", "8b"], repeats=3, out=out)


def test_every_size_is_calibrated_before_modes_are_compared(tmp_path: Path) -> None:
    names = [part.name for part in parts(options(tmp_path), tmp_path)]
    assert names == ["calibrate-0.6b", "calibrate-8b", "modes-0.6b", "modes-8b"]


def test_a_model_needs_no_weights(tmp_path: Path) -> None:
    model = model_folder(tmp_path, "8b")
    assert [path.name for path in model.iterdir()] == ["config.json"]
    config = json.loads((model / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["head_dim"]) == (36, 151936, 128)
    assert not config["tie_word_embeddings"]


def test_a_part_that_takes_too_long_is_ended_and_named(tmp_path: Path) -> None:
    part = Part("slow", ("sh", "-c", "echo on it; exec sleep 600"), {})
    assert run(part, tmp_path, 5.0) == "ended after 5 s"  # by then the shell has started
    assert (tmp_path / "slow.log").read_text() == "on it\n"


def test_a_part_that_fails_is_named(tmp_path: Path) -> None:
    assert run(Part("bad", (sys.executable, "-c", "raise SystemExit(3)"), {}), tmp_path, 60.0) == "failed with status 3"


def test_a_part_plans_with_less_than_its_share_and_may_take_twice_of_it_as_far_as_there_is_time(tmp_path: Path) -> None:
    part = Part("planned", ("sh", "-c", "echo $SLUICE_BENCH_SECONDS $SLUICE_BENCH_OUT"), {})
    for left_s, parts_left, planned_s, limit in ((1200.0, 4, 270, 600.0), (400.0, 1, 360, 400.0)):
        told, limit_s = with_its_share(part, left_s, parts_left)
        assert limit_s == limit
        assert run(told, tmp_path, 60.0) == "ran"
        assert (tmp_path / "planned.log").read_text() == f"{planned_s} {tmp_path / 'planned'}\n"
