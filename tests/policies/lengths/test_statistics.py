"""Length statistics: survival with running requests, hazards, moments, and their merging across replicas."""

from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from policies.errors import ConfigError, InputError
from policies.lengths.statistics import (
    LengthStatistics,
    LifeTable,
    MomentSums,
    SurvivalLaw,
    geometric_law,
    length_grid,
    life_table,
)
from policies.types import FinishedRequest, Phase, StepResult
from tests.policies.states import result_of

GRID = length_grid(4096)


def table_of(lengths: np.ndarray, edges: np.ndarray = GRID) -> LifeTable:
    return life_table(edges, lengths, np.ones(len(lengths), dtype=bool))


def finished(prompt: int, output: int, class_index: int = 0) -> FinishedRequest:
    return FinishedRequest(prompt_tokens=prompt, output_tokens=output, class_index=class_index)


def step(*done: FinishedRequest) -> StepResult:
    """A decode step with which these end."""
    return result_of(phase=Phase.DECODE, decode_requests=400, finished=done)


class TestGrid:
    @given(most=st.integers(1, 100_000), exact=st.integers(1, 200), ratio=st.floats(1.001, 3))
    @settings(deadline=None)
    def test_edges_rise_from_zero_to_the_longest_answer(self, most: int, exact: int, ratio: float) -> None:
        edges = length_grid(most, exact, ratio)
        assert edges[0] == 0
        assert edges[-1] >= most
        assert np.all(np.diff(edges) >= 1)


def kaplan_meier(output_tokens: ArrayLike, censored_tokens: ArrayLike = ()) -> SurvivalLaw:
    """The product-limit law: a life table with a cell for each token."""
    done, running = np.asarray(output_tokens, dtype=np.int64), np.asarray(censored_tokens, dtype=np.int64)
    left = np.concatenate((done, running))
    edges = np.arange(int(left.max()) + 1, dtype=np.int64)
    law = life_table(edges, left, np.arange(len(left)) < len(done)).law()
    assert law is not None
    return law


class TestKaplanMeier:
    def test_it_matches_the_product_limit_estimate_worked_by_hand(self) -> None:
        # 5 requests: ends at 2, 4, 6; still running after 3 and 5 tokens.
        law = kaplan_meier([2, 4, 6], [3, 5])
        assert law.survival([1, 2, 3, 4, 5]) == pytest.approx([1, 4 / 5, 4 / 5, 4 / 5 * 2 / 3, 4 / 5 * 2 / 3])

    @given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=80))
    @settings(deadline=None)
    def test_without_censoring_it_is_the_empirical_survival(self, lengths: list[int]) -> None:
        law = kaplan_meier(lengths)
        ages = np.arange(max(lengths))
        empirical = [np.mean(np.array(lengths) > age) for age in ages]
        assert law.survival(ages) == pytest.approx(empirical, abs=1e-7)

    @given(
        ended=st.lists(st.integers(1, 300), min_size=1, max_size=60),
        running=st.lists(st.integers(0, 300), max_size=60),
        factor=st.floats(1.0, 3.0),
    )
    @settings(deadline=None)
    def test_survival_falls_from_one_and_censoring_or_stretching_only_lengthens(
        self, ended: list[int], running: list[int], factor: float
    ) -> None:
        ages = np.arange(301)
        law = kaplan_meier(ended, running)
        curve = law.survival(ages)
        assert curve[0] == 1.0
        assert np.all(np.diff(curve) <= 1e-12)
        assert np.all(curve >= kaplan_meier(ended).survival(ages) - 1e-9)
        assert np.all(law.stretched(factor).survival(ages) >= curve - 1e-9)

    def test_completions_alone_are_biased_short_while_a_load_builds_up(self) -> None:
        # All 2000 requests started together and 100 steps have passed (ERRATA 3.6).
        lengths = np.random.default_rng(3).geometric(1 / 200, 2000)
        done, running = lengths[lengths <= 100], np.full(np.count_nonzero(lengths > 100), 100)
        assert kaplan_meier(done, running).survival(99.0) == pytest.approx(exp(-99 / 200), rel=0.03)
        assert kaplan_meier(done).survival(99.0) < 0.02


class TestSurvivalLaw:
    def test_a_geometric_law_forgets_its_age(self) -> None:
        law = geometric_law(50)
        alive = law.alive(np.array([0.0, 10.0, 5000.0]), 20)
        assert alive == pytest.approx([(1 - 1 / 50) ** 20] * 3)

    def test_ages_beyond_everything_seen_end_at_the_rate_of_the_last_tenth(self) -> None:
        law = table_of(np.random.default_rng(0).geometric(1 / 100, 5000)).law()
        assert law is not None
        assert law.alive(50_000, 100) == pytest.approx(exp(-1), rel=0.15)

    def test_the_quantile_inverts_the_survival(self) -> None:
        law = kaplan_meier(np.random.default_rng(0).geometric(1 / 100, 500))
        for fraction in (0.1, 0.5, 0.9, 0.9999):
            assert law.survival(law.quantile(fraction)) == pytest.approx(1 - fraction, rel=1e-6)


class TestLifeTable:
    @given(
        first=st.lists(st.integers(1, 4096), max_size=50),
        second=st.lists(st.integers(1, 4096), max_size=50),
    )
    @settings(deadline=None)
    def test_tables_of_two_replicas_add_up_to_the_table_of_both(self, first: list[int], second: list[int]) -> None:
        both = table_of(np.array(first + second, dtype=np.int64))
        added = table_of(np.array(first, dtype=np.int64)) + table_of(np.array(second, dtype=np.int64))
        assert np.array_equal(added.ended, both.ended)
        assert np.array_equal(added.exposure, both.exposure)
        assert np.array_equal(added.at_risk, both.at_risk)

    @given(
        values=st.lists(st.integers(1, 4096), min_size=1, max_size=3),
        count=st.integers(2, 60),
    )
    def test_without_censoring_the_law_is_empirical_at_every_edge(self, values: list[int], count: int) -> None:
        lengths = np.resize(np.array(values), count)
        law = table_of(lengths).law()
        assert law is not None
        for edge in GRID[: np.searchsorted(GRID, lengths.max())]:
            assert law.survival(edge) == pytest.approx(np.mean(lengths > edge), abs=1e-6)

    def test_before_the_first_end_there_is_no_hazard_and_no_law(self) -> None:
        table = life_table(GRID, [10, 20], [False, False])
        assert table.constant_hazard() is None
        assert table.law() is None


class TestMoments:
    def test_the_variance_of_the_total_keeps_the_covariance(self) -> None:
        rng = np.random.default_rng(7)
        prompts = rng.integers(1, 1000, 500)
        outputs = prompts + rng.integers(1, 100, 500)
        moments = MomentSums.of(prompts, outputs).moments()
        assert moments is not None
        assert moments.std_total_tokens == pytest.approx(np.std(prompts + outputs))
        assert moments.std_output_given_prompt == pytest.approx(
            np.std(outputs) * sqrt(1 - np.corrcoef(prompts, outputs)[0, 1] ** 2), rel=1e-6
        )

    @pytest.mark.parametrize(("cv", "ratio"), [(0.31, 0.55), (1.33, 1.38), (1.78, 2.09)])
    def test_what_a_slot_holds_grows_with_the_spread_of_the_outputs(self, cv: float, ratio: float) -> None:
        # ERRATA 1.4: (1 + cv^2) / 2 of the mean output, to the sampling error of 1 %.
        rng = np.random.default_rng(8)
        outputs = np.maximum(1, rng.gamma(1 / cv**2, 1000 * cv**2, 40_000)).astype(int)
        moments = MomentSums.of(np.zeros_like(outputs), outputs).moments()
        assert moments is not None
        assert moments.mean_resident_tokens / moments.mean_output_tokens == pytest.approx(ratio, rel=0.03)

    @given(pairs=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=20))
    @settings(deadline=None)
    def test_resident_moments_are_those_of_every_decode_step(self, pairs: list[tuple[int, int]]) -> None:
        held = np.concatenate([p + np.arange(1, o + 1) for p, o in pairs])
        moments = MomentSums.of(*zip(*pairs, strict=True)).moments()
        assert moments is not None
        assert moments.mean_resident_tokens == pytest.approx(held.mean())
        assert moments.std_resident_tokens == pytest.approx(held.std(), abs=1e-3)


class TestLengthStatistics:
    def test_only_the_window_is_remembered(self) -> None:
        statistics = LengthStatistics(window=10)
        statistics.observe(step(*[finished(1, 1000)] * 50))
        statistics.observe(step(*[finished(5, 10)] * 10))
        moments = statistics.moments()
        assert moments is not None
        assert (moments.requests, moments.mean_output_tokens, moments.var_output) == (10, 10.0, 0.0)

    def test_classes_are_kept_apart_and_pooled_on_demand(self) -> None:
        statistics = LengthStatistics(classes=2)
        statistics.observe(step(finished(1, 10, 0), finished(1, 30, 1), finished(1, 30, 1)))
        assert (statistics.count(0), statistics.count(1), statistics.completed) == (1, 2, 3)
        assert statistics.pooled_table([]).ended.sum() == 3
        assert statistics.table(1).constant_hazard() == pytest.approx(1 / 30)

    def test_aborted_requests_only_say_that_they_would_have_been_longer(self) -> None:
        statistics = LengthStatistics()
        statistics.observe(step(FinishedRequest(prompt_tokens=1, output_tokens=50, aborted=True), finished(1, 100)))
        table = statistics.table(0)
        assert statistics.completed == 1
        assert table.constant_hazard() == pytest.approx(1 / 150)

    def test_a_steady_engine_with_a_short_window_is_estimated_without_bias(self) -> None:
        # 400 slots, 300 completions remembered: exposure before the window must not count.
        rng = np.random.default_rng(9)
        statistics = LengthStatistics(window=300)
        left = rng.geometric(1 / 100, 400)
        length = left.copy()
        for _ in range(1500):
            left -= 1
            ended = np.flatnonzero(left == 0)
            statistics.observe(step(*(finished(1, int(length[slot])) for slot in ended)))
            length[ended] = left[ended] = rng.geometric(1 / 100, len(ended))
        ages = length - left
        truncated = statistics.table(0, ages).constant_hazard()
        statistics.stop_counting_steps()
        plain = statistics.table(0, ages).constant_hazard()
        assert truncated == pytest.approx(1 / 100, rel=0.12)
        assert plain is not None
        assert plain < 0.75 / 100

    def test_sums_of_replicas_add(self) -> None:
        replicas = [LengthStatistics() for _ in range(2)]
        for replica, outputs in zip(replicas, ((10, 20), (60,)), strict=True):
            replica.observe(step(*(finished(100, output) for output in outputs)))
        moments = replicas[0].sums().plus(replicas[1].sums()).moments()
        assert moments is not None
        assert (moments.requests, moments.mean_output_tokens) == (3, 30.0)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="ratio"):
        length_grid(100, ratio=1.0)
    with pytest.raises(InputError, match="factor"):
        geometric_law(10).stretched(0)
    with pytest.raises(InputError, match="different grids"):
        table_of(np.array([5])) + table_of(np.array([5]), length_grid(100))
    with pytest.raises(InputError, match="class_index"):
        LengthStatistics(classes=2).observe(step(finished(1, 10, 2)))
