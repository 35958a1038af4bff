"""Making workloads, and predictions with errors."""

import numpy as np
import pytest

from policies.errors import InputError
from policies.router.bin_edges import equal_mass_edges
from simulator.predictors import confused, predicted, rank_noise
from simulator.workload import (
    Workload,
    arrival_law,
    gamma_bursts,
    length_law,
    mixed,
    poisson,
    square_wave,
    synthetic,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def made(rng: np.random.Generator, count: int = 1000, output: str = "exponential:100") -> Workload:
    return synthetic("made", length_law("uniform:10:90"), length_law(output), count, rng)


def test_arrival_laws_keep_their_rate_and_their_spread(rng: np.random.Generator) -> None:
    for times, rate, cv in ((poisson(4.0, 40_000, rng), 4.0, 1.0), (gamma_bursts(4.0, 3.0, 40_000, rng), 4.0, 3.0)):
        gaps = np.diff(times)
        assert 1.0 / gaps.mean() == pytest.approx(rate, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.07)


def test_a_square_wave_is_slow_in_one_half_and_fast_in_the_other(rng: np.random.Generator) -> None:
    times = square_wave(2.0, 20.0, 10.0, 50_000, rng)
    fast = times % 10.0 >= 5.0
    assert np.all(np.diff(times) >= 0)
    assert fast.mean() == pytest.approx(20 / 22, rel=0.02)
    assert len(times) / times[-1] == pytest.approx(11.0, rel=0.02)


WRONG_ARRIVALS = "poisson poisson:0 waves:1 gamma:1 square:1:2 all:3 poisson:x poisson:nan poisson:-1 square:5:5:0"
WRONG_LAWS = (
    "normal:3 uniform:1 lognormal:x:1 constant uniform:9:2 lognormal:-5:1 lognormal:5:1e200 constant:-3 exponential:inf"
)


@pytest.mark.parametrize("text", WRONG_ARRIVALS.split())
def test_unknown_arrivals_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(InputError, match="poisson:RATE"):
        arrival_law(text)


@pytest.mark.parametrize("text", WRONG_LAWS.split())
def test_unknown_length_laws_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(InputError, match="lognormal:MEAN:SIGMA"):
        length_law(text)


def test_a_lognormal_law_is_given_by_its_mean(rng: np.random.Generator) -> None:
    assert length_law("lognormal:200:1")(rng, 200_000).mean() == pytest.approx(200.0, rel=0.02)


def test_parts_of_a_mixture_keep_their_names(rng: np.random.Generator) -> None:
    short, long = made(rng, output="constant:10"), made(rng, output="constant:500")
    both = mixed("both", short, long)
    assert len(both) == 2000 and both.slo_class is not None and set(both.slo_class) == {"made"}


def test_the_noise_of_table_1_gives_its_accuracies(rng: np.random.Generator) -> None:
    lengths = made(rng, 40_000, "lognormal:300:1").output_tokens
    predictions = rank_noise(lengths, 0.44, rng)
    for bins, accuracy in ((2, 0.84), (4, 0.63), (8, 0.41)):
        inner = equal_mass_edges(lengths, bins)[1:-1]
        right = np.searchsorted(inner, lengths, side="right") == np.searchsorted(inner, predictions, side="right")
        assert right.mean() == pytest.approx(accuracy, abs=0.02)


def test_a_confusion_matrix_sends_its_shares_to_each_bin(rng: np.random.Generator) -> None:
    lengths = made(rng, 30_000).output_tokens
    swapped = confused(lengths, [[0.0, 1.0], [1.0, 0.0]], rng)
    median = np.median(lengths)
    assert np.all((swapped > median) == (lengths < equal_mass_edges(lengths, 2)[1]))
    with pytest.raises(InputError, match="sum to 1"):
        confused(lengths, [[0.5, 0.4], [0.0, 1.0]], rng)


def test_predictors_are_known_by_name(rng: np.random.Generator) -> None:
    work = made(rng)
    assert np.array_equal(predicted(work, "oracle", rng).predicted_output_tokens, work.output_tokens)
    assert np.isnan(predicted(work, "none", rng).predicted_output_tokens).all()
    assert len(set(predicted(work, "neighbour:4:0.1", rng).predicted_output_tokens.tolist())) == 4
    for wrong in ("psychic", "noise", "neighbour:4:0.9"):
        with pytest.raises(InputError, match=wrong):
            predicted(work, wrong, rng)
