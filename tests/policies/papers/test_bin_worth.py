"""What bins are worth: the paper's closed forms, their corrected numbers, and simulated batches as a second opinion."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.papers.bin_worth import (
    bins_for_load,
    expected_batch_max,
    exponential_service_bound,
    gang_throughput,
    latency_uniform,
    min_bins_uniform,
    neighbour_error_matrix,
    throughput_uniform,
    throughput_uniform_with_errors,
)
from policies.router.bin_edges import exponential_edges, harmonic, uniform_edges

UNIFORM = 1.0 + 19.0 * (np.arange(200_000) + 0.5) / 200_000


@pytest.mark.parametrize(("k", "requests_per_s"), [(1, 6.4475), (2, 8.4342), (3, 9.3996), (4, 9.9703), (5, 10.3472)])
def test_throughput_follows_theorem_4_2(k: int, requests_per_s: float) -> None:
    """B = 128, lengths 1 to 20 (figure 3)."""
    assert throughput_uniform(k, 128, 1.0, 20.0) == pytest.approx(requests_per_s, abs=5e-5)


def test_throughput_of_a_uniform_sample_matches_the_closed_form() -> None:
    for k in (1, 2, 5):
        sampled = gang_throughput(uniform_edges(k, 1.0, 20.0), UNIFORM, 128)
        assert sampled == pytest.approx(throughput_uniform(k, 128, 1.0, 20.0), rel=1e-4)


def test_five_bins_reach_85_percent_of_the_capacity_and_not_all_of_it() -> None:
    """ERRATA 0.2 and 0.3: capacity 12.190; 90 % takes 9 bins, 95 % takes 17, 99 % takes 89."""
    capacity = 128 / 10.5
    assert capacity == pytest.approx(12.190, abs=5e-4)
    assert throughput_uniform(5, 128, 1.0, 20.0) / capacity == pytest.approx(0.849, abs=5e-4)
    assert [min_bins_uniform(d * capacity, 128, 1.0, 20.0) for d in (0.10, 0.05, 0.01)] == [9, 17, 89]


@pytest.mark.parametrize("k", [1, 2, 3, 7, 64, 1000, 100_000])
def test_a_shortfall_that_k_bins_have_exactly_needs_k_bins(k: int) -> None:
    """ERRATA 0.4: rounding must not push the ceiling to k + 1."""
    epsilon = 128 / 10.5 - throughput_uniform(k, 128, 1.0, 20.0)
    assert min_bins_uniform(epsilon, 128, 1.0, 20.0) == k


@given(st.floats(1e-3, 20.0), st.integers(1, 256), st.floats(0.0, 50.0), st.floats(0.5, 50.0))
def test_the_fewest_bins_reach_the_target_and_one_less_does_not(
    epsilon: float, batch_size: int, l_min: float, width: float
) -> None:
    l_max = l_min + width
    k = min_bins_uniform(epsilon, batch_size, l_min, l_max)
    target = batch_size / ((l_min + l_max) / 2.0) - epsilon
    assert throughput_uniform(k, batch_size, l_min, l_max) >= target - 1e-6 * epsilon
    assert k == 1 or throughput_uniform(k - 1, batch_size, l_min, l_max) < target + 1e-6 * epsilon


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_no_number_of_bins_reaches_the_capacity_itself(epsilon: float) -> None:
    with pytest.raises(InputError, match="must be positive"):
        min_bins_uniform(epsilon, 128, 1.0, 20.0)


def test_latency_is_service_plus_the_wait_for_the_batch_to_fill() -> None:
    """Lemma 5.1 with the terms written out: 10.5 + 9.3527/2 + 2*127/(2*4)."""
    excess = (128 * 20 + 1) / 129 - 10.5
    assert latency_uniform(2, 128, 1.0, 20.0, 4.0) == pytest.approx(10.5 + excess / 2 + 2 * 127 / 8.0)


def test_the_exponential_bound_has_the_numbers_of_the_corrected_lemma() -> None:
    """ERRATA 0.5: Exp(0.1), B = 200; one bin waits for H_200 / 0.1."""
    assert exponential_service_bound(4, 0.1, 200) == pytest.approx(17.027, abs=5e-4)
    assert exponential_service_bound(1, 0.1, 200) == pytest.approx(harmonic(200) / 0.1)


@pytest.mark.parametrize("k", range(2, 9))
def test_the_exponential_bound_is_the_corrected_equation_60(k: int) -> None:
    """ERRATA 0.9: with log(L_{k-j}) the printed denominator equals equation 27 at equation 28."""
    levels = [math.nan, harmonic(200)]
    while len(levels) < k:
        levels.append(1.0 + math.log(levels[-1]))
    total, product, reached = 0.0, 1.0, 0.0
    for i in range(1, k):
        product *= levels[k - i]
        reached += math.log(levels[k - i])
        total += (levels[k - i] - 1.0) / product * reached
    total += (reached + harmonic(200)) / product
    assert exponential_service_bound(k, 1.0, 200) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("k", range(1, 9))
def test_the_exponential_bound_is_above_the_truth_by_less_than_a_percent(k: int) -> None:
    """ERRATA 0.10: at most 0.72 %."""
    sample = -np.log1p(-(np.arange(400_000) + 0.5) / 400_000)
    service = 200 / gang_throughput(exponential_edges(k, 1.0, 200), sample, 200)
    assert 0.999 < exponential_service_bound(k, 1.0, 200) / service < 1.0075


def test_the_expected_maximum_of_a_die_thrown_twice_is_161_thirty_sixths() -> None:
    assert expected_batch_max([1, 2, 3, 4, 5, 6], 2) == pytest.approx(161 / 36)


def test_bins_weigh_with_their_own_batch_sizes() -> None:
    """ERRATA 0.11: 3 of 4 requests take 1 in batches of 2, 1 of 4 takes 10 in batches of 1: 4 / (3*1/2 + 1*10/1)."""
    assert gang_throughput([0.0, 5.0, np.inf], [1, 1, 1, 10], [2, 1]) == pytest.approx(4 / 11.5)
    with pytest.raises(InputError, match="one entry per bin"):
        gang_throughput([0.0, 5.0, np.inf], [1, 10], [2])
    with pytest.raises(InputError, match="longest must be positive"):
        gang_throughput([0.0, np.inf], [0, 0], 4)


def test_a_second_bin_pays_from_the_load_that_lemma_5_1_gives() -> None:
    """ERRATA 0.13: lambda = (B - 1)/(E[max] - E[l]) = 0.947 for B = 8, 13.58 for B = 128."""
    assert bins_for_load(0.946, 8, UNIFORM) == 1
    assert bins_for_load(0.949, 8, UNIFORM) == 2
    assert bins_for_load(13.57, 128, UNIFORM) == 1
    assert bins_for_load(13.60, 128, UNIFORM) == 2
    assert bins_for_load(100.0, 8, UNIFORM) > bins_for_load(100.0, 8, UNIFORM, max_bins=4) == 4
    assert bins_for_load(100.0, 1, UNIFORM) == 1, "of batches of one"


@given(st.floats(0.01, 500.0), st.integers(2, 64))
def test_no_other_number_of_bins_has_less_latency(arrival_rate: float, batch_size: int) -> None:
    k = bins_for_load(arrival_rate, batch_size, UNIFORM[::100])
    latencies = {n: latency_uniform(n, batch_size, 1.0, 20.0, arrival_rate) for n in (max(1, k - 1), k, k + 1)}
    assert latencies[k] <= min(latencies.values()) * (1 + 1e-3)


@given(st.integers(1, 12), st.floats(0.0, 0.5))
def test_predicted_bins_stay_equiprobable_under_errors(k: int, error_probability: float) -> None:
    """ERRATA 0.14."""
    matrix = neighbour_error_matrix(k, error_probability)
    assert (matrix >= 0.0).all()
    assert matrix.sum(axis=0) == pytest.approx(np.ones(k))
    assert matrix.sum(axis=1) == pytest.approx(np.ones(k))


def test_each_neighbour_gets_the_error_probability() -> None:
    assert neighbour_error_matrix(3, 0.25).tolist() == [[0.75, 0.25, 0.0], [0.25, 0.5, 0.25], [0.0, 0.25, 0.75]]
    with pytest.raises(InputError, match="error_probability"):
        neighbour_error_matrix(3, 0.6)


@pytest.mark.parametrize(
    ("k", "error_probability", "requests_per_s"), [(2, 0.0, 8.434), (2, 0.01, 7.409), (2, 0.05, 6.658), (5, 0.5, 8.32)]
)
def test_throughput_under_errors(k: int, error_probability: float, requests_per_s: float) -> None:
    """ERRATA 0.15: B = 128, lengths 1 to 20; half of two bins' gain goes with one percent of errors."""
    found = throughput_uniform_with_errors(k, 128, 1.0, 20.0, error_probability)
    assert found == pytest.approx(requests_per_s, abs=2.1e-3)


def test_throughput_under_errors_agrees_with_drawn_batches() -> None:
    rng = np.random.default_rng(17)
    k, batch_size, matrix = 4, 16, neighbour_error_matrix(4, 0.2)
    longest = []
    for predicted in range(k):
        true = rng.choice(k, p=matrix[:, predicted], size=(20_000, batch_size))
        longest.append((1.0 + 19.0 * (true + rng.random(true.shape)) / k).max(axis=1).mean())
    drawn = batch_size / float(np.mean(longest))
    assert throughput_uniform_with_errors(k, batch_size, 1.0, 20.0, 0.2) == pytest.approx(drawn, rel=2e-3)
