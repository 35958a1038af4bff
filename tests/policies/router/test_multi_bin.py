"""Assigning requests to bins, and edges that follow the lengths that are seen."""

import math
import pickle
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.papers.bin_worth import bins_for_load
from policies.router.bin_edges import equal_mass_edges, exponential_edges, optimal_edges
from policies.router.multi_bin import EdgeRule, MultiBin, MultiBinConfig

EDGES = (0.0, 10.0, 20.0, 30.0, 40.0)


def make_bins(**settings: object) -> MultiBin:
    return MultiBin(MultiBinConfig(**({"initial_edges": EDGES} | settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("predicted", "bin_index"), [(0, 0), (9.99, 0), (10, 1), (19, 1), (20, 2), (39.5, 3)])
def test_a_bin_holds_its_lower_edge_and_not_its_upper(predicted: float, bin_index: int) -> None:
    assert make_bins().assign(predicted) == bin_index


@pytest.mark.parametrize(("predicted", "bin_index"), [(-5, 0), (40, 3), (1e9, 3), (math.inf, 3)])
def test_predictions_beyond_the_edges_go_to_the_outer_bins(predicted: float, bin_index: int) -> None:
    """ERRATA 0.17: as printed, l = l_max belongs to no bin."""
    assert make_bins().assign(predicted) == bin_index


@given(st.one_of(st.none(), st.floats()), st.lists(st.integers(0, 5000), max_size=40), st.sampled_from(["a", None]))
def test_every_prediction_gets_a_bin(predicted: float | None, seen: list[int], slo_class: str | None) -> None:
    bins = MultiBin(MultiBinConfig(bins=3, refit_every=5))
    for output_tokens in seen:
        bins.observe(output_tokens, slo_class="a")
    assert 0 <= bins.assign(predicted, slo_class=slo_class) < 3


def test_none_goes_to_the_median_bin_of_the_class() -> None:
    bins = make_bins(rule="fixed")
    for output_tokens in (1, 35, 36):
        bins.observe(output_tokens, slo_class="batch")
    for output_tokens in (1, 2, 3, 25):
        bins.observe(output_tokens, slo_class="chat")
    assert bins.assign(None, slo_class="batch") == 3
    assert bins.assign(None, slo_class="chat") == 0


def test_none_of_a_class_not_seen_yet_goes_to_the_median_bin_of_all() -> None:
    bins = make_bins(rule="fixed")
    for output_tokens in (25, 26, 1):
        bins.observe(output_tokens, slo_class="chat")
    assert bins.assign(None, slo_class="batch") == 2


def test_none_goes_to_a_middle_bin_before_anything_is_seen() -> None:
    assert make_bins().assign(None, slo_class="chat") == 1
    assert make_bins().assign(math.nan) == 1


def test_without_edges_the_prior_gives_those_of_lemma_a1() -> None:
    bins = MultiBin(MultiBinConfig(bins=3, batch_size=16, prior_mean_tokens=100.0))
    assert bins.edges == pytest.approx(exponential_edges(3, 0.01, 16).tolist())


def test_edges_follow_the_lengths_by_the_optimal_rule() -> None:
    bins = make_bins(rule="optimal", batch_size=8, refit_every=1000)
    lengths = np.random.default_rng(3).geometric(0.005, size=1000).tolist()
    for output_tokens in lengths[:-1]:
        bins.observe(output_tokens)
    assert bins.edges == EDGES
    bins.observe(lengths[-1])
    assert bins.edges == tuple(optimal_edges(lengths, 4, 8, resolution=256))


def test_edges_follow_the_lengths_by_equal_mass() -> None:
    bins = make_bins(rule="equal_mass")
    for output_tokens in range(100):
        bins.observe(output_tokens)
    assert bins.refit() == tuple(equal_mass_edges(range(100), 4)) == (0.0, 24.5, 49.5, 74.5, math.inf)


def test_only_the_latest_lengths_count() -> None:
    bins = make_bins(rule="equal_mass", window_requests=100)
    for output_tokens in [5000] * 300 + list(range(100)):
        bins.observe(output_tokens)
    assert bins.refit() == tuple(equal_mass_edges(range(100), 4))


def test_fixed_edges_stay_whatever_is_seen() -> None:
    bins = make_bins(rule="fixed", refit_every=10)
    for output_tokens in range(50):
        bins.observe(output_tokens)
    assert bins.refit() == EDGES


def test_a_refit_before_anything_is_seen_changes_nothing() -> None:
    assert make_bins().refit() == EDGES


@given(
    st.sampled_from(get_args(EdgeRule)),
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from(["a", "b", None])), max_size=60),
)
def test_equal_histories_give_equal_ascending_edges(rule: EdgeRule, history: list[tuple[int, str | None]]) -> None:
    config = MultiBinConfig(bins=4, rule=rule, window_requests=16, refit_every=7)
    one, other = MultiBin(config), MultiBin(config)
    for output_tokens, slo_class in history:
        one.observe(output_tokens, slo_class=slo_class)
        other = pickle.loads(pickle.dumps(other))
        other.observe(output_tokens, slo_class=slo_class)
        assert one.edges == other.edges
        assert len(one.edges) == 5
        assert all(low < high for low, high in zip(one.edges, one.edges[1:], strict=False))
        assert one.assign(None, slo_class=slo_class) == other.assign(None, slo_class=slo_class)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=80), st.integers(1, 10))
def test_the_median_is_that_of_the_window(lengths: list[int], window: int) -> None:
    edges = tuple(float(edge) for edge in range(22))
    bins = MultiBin(MultiBinConfig(bins=21, initial_edges=edges, rule="fixed", window_requests=window))
    for output_tokens in lengths:
        bins.observe(output_tokens)
    latest = sorted(lengths[-window:])
    assert bins.assign(None) == latest[(len(latest) - 1) // 2]


def test_edges_fitted_elsewhere_can_be_adopted() -> None:
    bins = make_bins()
    bins.adopt([0.0, 1.0, 2.0, 3.0, math.inf])
    assert bins.assign(2.5) == 2


@pytest.mark.parametrize("edges", [[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 2.0, 3.0, 4.0], [0.0, 1.0, math.nan, 3.0, 4.0]])
def test_edges_that_do_not_fit_are_not_adopted(edges: list[float]) -> None:
    bins = make_bins()
    with pytest.raises(InputError, match="edges must be 5 ascending numbers"):
        bins.adopt(edges)
    assert bins.edges == EDGES


@pytest.mark.parametrize("output_tokens", [-1.0, math.nan, math.inf])
def test_a_length_that_is_none_is_not_observed(output_tokens: float) -> None:
    with pytest.raises(InputError, match="output_tokens"):
        make_bins().observe(output_tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {"bins": 0},
        {"batch_size": 0},
        {"window_requests": 0},
        {"refit_every": 0},
        {"rule": "median"},
        {"prior_mean_tokens": 0.0},
        {"bins": 2, "initial_edges": (0.0, 1.0)},
        {"bins": 2, "initial_edges": (0.0, 0.0, 1.0)},
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MultiBinConfig(**settings)  # type: ignore[arg-type]


def test_one_bin_takes_everything() -> None:
    bins = MultiBin(MultiBinConfig(bins=1, refit_every=2))
    for output_tokens in (1, 1000, 7):
        bins.observe(output_tokens)
    assert bins.edges == (0.0, math.inf)
    assert bins.assign(12) == bins.assign(None) == 0


def finish_at(bins: MultiBin, per_s: float, number: int, start_s: float) -> float:
    """So many requests at an even pace; returns when the last has finished."""
    for n in range(1, number + 1):
        bins.note_time(start_s + n / per_s)
        bins.observe(float(20 * (1 + n % 10)))
    return start_s + number / per_s


def test_the_number_of_bins_follows_the_load_up_and_down() -> None:
    bins = MultiBin(MultiBinConfig(bins=4, batch_size=8, seconds_per_token=0.01, refit_every=64, rule="equal_mass"))
    at_s, counts = 0.0, []
    for per_s in (1.0, 10.0, 1000.0, 1.0):
        bins.note_time(at_s)
        at_s = finish_at(bins, per_s, 256, at_s)
        counts.append(len(bins.edges) - 1)
        assert {bins.assign(float(tokens)) for tokens in range(300)} == set(range(counts[-1]))
    assert counts == [1, bins_for_load(0.1, 8, [20.0 * (1 + n % 10) for n in range(10)]), 4, 1]
    assert counts[1] in (2, 3)


@pytest.mark.parametrize("per_heartbeat", [16, 128, 640])
def test_the_load_is_that_of_all_who_are_told_of_with_a_heartbeat(per_heartbeat: int) -> None:
    bins = MultiBin(MultiBinConfig(bins=16, batch_size=8, seconds_per_token=0.002, refit_every=64, rule="equal_mass"))
    lengths = [20.0 * (1 + n % 10) for n in range(per_heartbeat)]
    for second in range(30):
        bins.note_time(float(second))
        for tokens in lengths:
            bins.observe(tokens)
    assert len(bins.edges) - 1 == bins_for_load(0.002 * per_heartbeat, 8, sorted(lengths), max_bins=16)


def test_without_a_clock_the_number_of_bins_stays() -> None:
    bins = MultiBin(MultiBinConfig(bins=3, seconds_per_token=0.01, refit_every=8))
    for n in range(32):
        bins.observe(float(n))
    assert len(bins.edges) == 4


@pytest.mark.parametrize(
    ("edges", "fits"), [([0, 1], True), ([0, 1, 2, 3], True), ([0, 1, 2, 3, 4], False), ([0], False)]
)
def test_edges_of_fewer_bins_fit_where_the_load_decides(edges: list[float], fits: bool) -> None:
    assert MultiBin(MultiBinConfig(bins=3, seconds_per_token=0.01)).fits(edges) is fits
    assert MultiBin(MultiBinConfig(bins=3)).fits(edges) is (len(edges) == 4)


def test_what_would_fit_is_said_where_the_load_decides() -> None:
    with pytest.raises(InputError, match="edges must be at most 4 ascending numbers"):
        MultiBin(MultiBinConfig(bins=3, seconds_per_token=0.01)).adopt([0, 1, 2, 3, 4])
