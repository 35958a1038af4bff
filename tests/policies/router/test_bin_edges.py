"""Edges of output-length bins against paper 000 and its errata; exact references are integrated here."""

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.papers.bin_worth import gang_throughput
from policies.router.bin_edges import equal_mass_edges, exponential_edges, optimal_edges, uniform_edges
from policies.types import FloatArray

LENGTHS = st.lists(st.integers(0, 4000), min_size=1, max_size=120)


def quantiles(count: int) -> FloatArray:
    return (np.arange(count) + 0.5) / count


def lognormal_lengths(count: int, sigma: float = 1.0) -> FloatArray:
    normal = NormalDist()
    return np.exp([sigma * normal.inv_cdf(q) for q in quantiles(count)])


def exponential_service(edges: FloatArray, rate: float, batch_size: int) -> float:
    """Mean time of a batch, exact: E[max] of B exponentials truncated to each bin, by the trapezoid rule."""
    total = 0.0
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        top = min(high, low + 60.0 / rate)
        x = np.linspace(low, top, 40_001)
        mass = math.exp(-rate * low) - math.exp(-rate * high)
        below = (math.exp(-rate * low) - np.exp(-rate * x)) / mass
        total += mass * (top - float(np.trapezoid(below**batch_size, x)))
    return total


def test_uniform_edges_are_equally_wide() -> None:
    assert uniform_edges(4, 0.0, 20.0).tolist() == [0.0, 5.0, 10.0, 15.0, 20.0]


def test_exponential_edges_follow_the_recursion_of_lemma_a1() -> None:
    edges = exponential_edges(4, 0.1, 200)
    first = math.fsum(1.0 / i for i in range(1, 201))
    second = 1.0 + math.log(first)
    third = 1.0 + math.log(second)
    steps = np.log([third, second, first]) / 0.1
    assert edges[0] == 0.0
    assert edges[-1] == math.inf
    assert edges[1:-1] == pytest.approx(np.cumsum(steps))


@pytest.mark.parametrize("k", range(2, 9))
def test_exponential_edges_are_stationary_points_of_the_bound(k: int) -> None:
    """ERRATA 0.8: the suspected sign error is none."""
    q = np.exp(-exponential_edges(k, 1.0, 200)[:-1])
    harmonic = math.fsum(1.0 / i for i in range(1, 201))
    inner = np.log(q[1:-1]) + (q[1:-1] - q[:-2]) / q[1:-1] - np.log(q[2:])
    assert np.abs(inner).max(initial=0.0) < 1e-9
    assert harmonic - q[-2] / q[-1] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("k", range(2, 9))
def test_edges_of_lemma_a1_serve_as_well_as_the_exact_optimum(k: int) -> None:
    """ERRATA 0.10: the bound's optimum lies within 0.014 % of the exact one (B = 200)."""
    exact = exponential_service(exponential_edges(k, 1.0, 200), 1.0, 200)
    sample = -np.log1p(-quantiles(20_000))
    optimum = exponential_service(optimal_edges(sample, k, 200), 1.0, 200)
    assert exact <= optimum * 1.0002


def test_equal_mass_loses_thirty_percent_on_exponential_lengths() -> None:
    """ERRATA 0.5: Exp(0.1), B = 200, k = 4."""
    equal_mass = np.append(-np.log1p(-np.arange(4) / 4) / 0.1, np.inf)
    worse = exponential_service(equal_mass, 0.1, 200)
    better = exponential_service(exponential_edges(4, 0.1, 200), 0.1, 200)
    assert worse == pytest.approx(24.056, abs=0.002)
    assert better == pytest.approx(16.939, abs=0.002)
    assert 1.0 - better / worse == pytest.approx(0.296, abs=0.001)


def test_a_batch_of_one_gets_bins_of_equal_mass_from_the_exponential_law() -> None:
    edges = exponential_edges(4, 2.0, 1)
    assert np.exp(-2.0 * edges) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_optimal_edges_gain_half_as_much_again_as_equal_mass_on_lognormal_lengths() -> None:
    """ERRATA 0.5: lognormal with sigma 1, B = 32, k = 4: 2.00 against 3.08 times the throughput of one bin.

    Integrating the law itself gives 1.990 and 3.049; samples of 20 000 scatter from 3.01 to 3.15.
    """
    lengths = lognormal_lengths(200_000)
    one_bin = gang_throughput([0.0, np.inf], lengths, 32)
    assert gang_throughput(equal_mass_edges(lengths, 4), lengths, 32) / one_bin == pytest.approx(1.990, abs=0.004)
    assert gang_throughput(optimal_edges(lengths, 4, 32), lengths, 32) / one_bin == pytest.approx(3.049, abs=0.004)


def test_optimal_and_equal_mass_edges_agree_on_uniform_lengths() -> None:
    """Lemma 4.1: for the uniform law bins of equal mass are optimal."""
    lengths = 1.0 + 19.0 * quantiles(20_000)
    for k in range(2, 6):
        assert equal_mass_edges(lengths, k)[1:-1] == pytest.approx(uniform_edges(k, 1.0, 20.0)[1:-1], abs=0.002)
        assert optimal_edges(lengths, k, 128)[1:-1] == pytest.approx(uniform_edges(k, 1.0, 20.0)[1:-1], abs=0.03)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 4), st.integers(1, 20))
def test_no_other_cuts_beat_the_optimal_edges(lengths: list[int], k: int, batch_size: int) -> None:
    distinct = sorted(set(lengths))
    cuts = combinations(distinct[1:], min(k, len(distinct)) - 1)
    best = max(gang_throughput([0.0, *cut, np.inf], lengths, batch_size) for cut in cuts)
    assert gang_throughput(optimal_edges(lengths, k, batch_size), lengths, batch_size) == pytest.approx(best)


def test_a_quarter_of_the_resolution_costs_a_permille_at_most() -> None:
    lengths = np.ceil(200.0 * lognormal_lengths(20_000))
    fine = gang_throughput(optimal_edges(lengths, 4, 32, resolution=4096), lengths, 32)
    for resolution in (256, 1024):
        coarse = gang_throughput(optimal_edges(lengths, 4, 32, resolution=resolution), lengths, 32)
        assert coarse == pytest.approx(fine, rel=1e-3)


@given(LENGTHS, st.integers(1, 12), st.integers(1, 64))
def test_edges_always_ascend_from_zero_to_infinity(lengths: list[int], k: int, batch_size: int) -> None:
    for edges in (equal_mass_edges(lengths, k), optimal_edges(lengths, k, batch_size)):
        assert edges.shape == (k + 1,)
        assert edges[0] == 0.0
        assert edges[-1] == np.inf
        assert (np.diff(edges) > 0.0).all()


@given(LENGTHS, st.integers(1, 12))
def test_every_length_falls_into_exactly_one_bin(lengths: list[int], k: int) -> None:
    edges = equal_mass_edges(lengths, k)
    inside = (edges[:-1, None] <= np.array(lengths)) & (np.array(lengths) < edges[1:, None])
    assert (inside.sum(axis=0) == 1).all()


def test_ties_that_fill_a_bin_leave_the_rest_evenly_to_the_others() -> None:
    """ERRATA 0.17: half of the lengths are equal, so quartiles cannot be realised."""
    edges = equal_mass_edges([7] * 60 + list(range(100, 160)), 4)
    counts, _ = np.histogram([7] * 60 + list(range(100, 160)), np.append(edges[:-1], 1e9))
    assert counts.tolist() == [60, 20, 20, 20]


def test_the_order_of_the_sample_does_not_matter() -> None:
    lengths = np.random.default_rng(5).geometric(0.01, size=500)
    assert (optimal_edges(lengths, 4, 8) == optimal_edges(lengths[::-1], 4, 8)).all()


@pytest.mark.parametrize("arguments", [(0, 0.1, 8), (4, 0.0, 8), (4, math.inf, 8), (4, 0.1, 0)])
def test_exponential_edges_refuse_what_has_no_meaning(arguments: tuple[int, float, int]) -> None:
    with pytest.raises(InputError):
        exponential_edges(*arguments)


def test_a_range_that_is_empty_has_no_uniform_edges() -> None:
    with pytest.raises(InputError, match="l_min < l_max"):
        uniform_edges(2, 5.0, 5.0)
