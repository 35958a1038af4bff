"""The comparison of predictions by what they change: ends of its scale, on made-up answers."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bench.predictor import end_to_end

pytestmark = pytest.mark.slow  # loading torch takes seconds


@pytest.fixture
def answers(tmp_path: Path) -> end_to_end.Answers:
    """Two sources know nothing, two which half of the answers is the longer one."""
    lengths = np.rint(np.random.default_rng(0).lognormal(5.0, 0.8, 600)).astype(int)
    halves = np.where(lengths > np.median(lengths), 300.0, 80.0)
    path = tmp_path / "predictions.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["set", "prompt_tokens", "output_tokens", *list(end_to_end.SOURCES)[:-1]])
        writer.writerows(
            ["made_up", 10, tokens, 200, half, 200, half] for tokens, half in zip(lengths, halves, strict=True)
        )
    return end_to_end.read_answers(path)


def test_bins_gain_nothing_by_one_number_for_all_and_most_by_known_lengths(answers: end_to_end.Answers) -> None:
    gains = dict(zip(end_to_end.SOURCES, end_to_end._gang(answers, (end_to_end.TRAFFIC[0], 4, 0)), strict=True))
    assert gains["one_histogram"] == gains["prompt_length"] == pytest.approx(1.0)
    assert 1.1 < gains["checkpoint"] == gains["histogram"] < gains["known"]


def test_changes_are_paired_and_counts_that_may_be_zero_stand_as_they_are() -> None:
    waits_s = np.array([[2.0, 1.0], [4.0, 6.0], [8.0, 8.0]])
    assert end_to_end._against_first(waits_s) == ["4.00 [2.00, 8.00]", "+0 % [-50, +50]"]
    preemptions = np.array([[0.0, 1.0], [2.0, 3.0]])
    assert end_to_end._against_first(preemptions) == ["1.00 [0.00, 2.00]", "2.00 [1.00, 3.00]"]
