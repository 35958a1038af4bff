import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from predictor.calibration import Calibrator, CalibratorConfig, Curve, fit_curve, never_falling

PRIOR = Curve(
    scores=(0.0, 1.0), means=(10.0, 30.0), fractions=(0.1, 0.5, 0.9), quantiles=((1.0, 3.0), (10.0, 30.0), (20.0, 60.0))
)
REQUESTS = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 10_000), st.booleans()), min_size=1, max_size=200)


def taught(calibrator: Calibrator, factor: float, seed: int, requests: int, cap: float = np.inf) -> None:
    """Answers of factor * exp(score) tokens, spread by a third, cut at `cap`."""
    chance = np.random.default_rng(seed)
    for score in chance.uniform(2.0, 6.0, requests):
        tokens = factor * np.exp(score + 0.3 * chance.normal())
        calibrator.observe([(float(score), float(min(tokens, cap)), bool(tokens > cap))])


@settings(deadline=None)
@given(REQUESTS)
def test_no_curve_ever_falls_whatever_was_seen(requests: list[tuple[float, int, bool]]) -> None:
    calibrator = Calibrator(PRIOR, CalibratorConfig(cell_requests=3, own_from_requests=5, refit_every=1))
    for request in requests:
        calibrator.observe([request])
    predictions = [calibrator.predict(score) for score in np.linspace(-6, 6, 50)]
    means = [prediction.mean_tokens for prediction in predictions]
    assert means == sorted(means)
    for fraction in (0.1, 0.5, 0.9):
        column = [prediction.quantile_tokens[fraction] for prediction in predictions]
        assert column == sorted(column)
    for prediction in predictions:
        assert list(prediction.quantile_tokens.values()) == sorted(prediction.quantile_tokens.values())


def test_before_anything_was_seen_the_shipped_curve_speaks() -> None:
    prediction = Calibrator(PRIOR).predict(0.5)
    assert prediction.mean_tokens == 20.0
    assert prediction.quantile_tokens == {0.1: 2.0, 0.5: 20.0, 0.9: 40.0}


def test_after_a_few_requests_the_shipped_curve_is_scaled_to_them() -> None:
    calibrator = Calibrator(PRIOR, CalibratorConfig(refit_every=8))
    for _ in range(8):
        calibrator.observe([(0.5, 200.0, False)])
    assert calibrator.predict(0.5).mean_tokens == pytest.approx(200.0)
    assert calibrator.predict(0.0).mean_tokens == pytest.approx(100.0)


def test_it_converges_on_the_served_model_within_a_few_hundred_requests() -> None:
    calibrator = Calibrator(PRIOR)
    taught(calibrator, factor=1.0, seed=0, requests=400)
    for score in (2.5, 4.0, 5.5):
        assert calibrator.predict(score).quantile_tokens[0.5] == pytest.approx(np.exp(score), rel=0.25)


def test_it_follows_a_shift_of_the_lengths() -> None:
    calibrator = Calibrator(PRIOR, CalibratorConfig(window_requests=512))
    taught(calibrator, factor=1.0, seed=1, requests=600)
    before = calibrator.predict(4.0).quantile_tokens[0.5]
    taught(calibrator, factor=4.0, seed=2, requests=600)
    assert calibrator.predict(4.0).quantile_tokens[0.5] == pytest.approx(4.0 * before, rel=0.25)


def test_its_intervals_cover_what_they_say() -> None:
    calibrator = Calibrator(PRIOR)
    taught(calibrator, factor=1.0, seed=3, requests=2000)
    chance = np.random.default_rng(4)
    scores = chance.uniform(2.2, 5.8, 2000)
    tokens = np.exp(scores + 0.3 * chance.normal(size=2000))
    quantiles = [calibrator.predict(score).quantile_tokens for score in scores]
    covered = np.mean([q[0.1] <= t <= q[0.9] for q, t in zip(quantiles, tokens, strict=True)])
    assert covered == pytest.approx(0.8, abs=0.05)


def test_answers_cut_at_a_limit_count_as_longer() -> None:
    # The true median at score 5 is 148 tokens. Cut at 160, nearly half of the answers there are cut.
    heeding, ignoring = Calibrator(PRIOR), Calibrator(PRIOR)
    chance = np.random.default_rng(5)
    for score in chance.uniform(2.0, 6.0, 2000):
        tokens = np.exp(score + 0.6 * chance.normal())
        limit = chance.choice([40.0, 160.0, 2000.0])
        heeding.observe([(score, min(tokens, limit), tokens > limit)])
        ignoring.observe([(score, min(tokens, limit), False)])
    truth = np.exp(5.0)
    assert heeding.predict(5.0).quantile_tokens[0.5] == pytest.approx(truth, rel=0.25)
    assert ignoring.predict(5.0).quantile_tokens[0.5] < 0.7 * truth


def test_equal_scores_have_one_law_that_of_all_their_requests() -> None:
    tokens = np.random.default_rng(6).lognormal(5.0, 1.0, 400).round()
    curve = fit_curve([0.0] * 400, tokens.tolist(), [False] * 400, CalibratorConfig())
    assert curve.scores == (0.0,)
    prediction = curve.predict(0.0)
    assert prediction.mean_tokens == pytest.approx(tokens.mean())
    ascending = sorted(tokens)
    assert prediction.quantile_tokens == {0.1: ascending[39], 0.5: ascending[199], 0.9: ascending[359]}


def test_a_prompt_that_many_ask_has_the_mean_of_its_answers() -> None:
    chance = np.random.default_rng(7)
    scores = np.concatenate([chance.normal(5.0, 0.5, 1200), np.full(800, 5.0)])
    tokens = np.exp(scores + chance.normal(0.0, 1.0, 2000))
    order = chance.permutation(2000)
    curve = fit_curve(scores[order].tolist(), tokens[order].tolist(), [False] * 2000, CalibratorConfig())
    assert curve.predict(5.0).mean_tokens == pytest.approx(tokens[scores == 5.0].mean(), rel=0.05)


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0] * 3, [1.0, 2.0, 3.0]),
        ([3.0, 2.0, 1.0], [1.0] * 3, [2.0, 2.0, 2.0]),
        ([1.0, 4.0, 2.0, 5.0], [1.0, 1.0, 3.0, 1.0], [1.0, 2.5, 2.5, 5.0]),
        ([], [], []),
    ],
)
def test_adjacent_violators_are_pooled(values: list[float], weights: list[float], expected: list[float]) -> None:
    assert never_falling(values, weights).tolist() == pytest.approx(expected)


def test_a_curve_survives_json() -> None:
    assert Curve.from_dict(json.loads(json.dumps(PRIOR.to_dict()))) == PRIOR


@pytest.mark.parametrize(
    ("curve", "why"),
    [
        ({"means": (2.0, 1.0)}, "must not fall"),
        ({"means": (2.0,)}, "one value for each of its 2 scores"),
        ({"fractions": (0.5,)}, "one column for each"),
    ],
)
def test_curves_that_are_none_are_refused(curve: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Curve(**{"scores": (0.0, 1.0), "means": (1.0, 2.0), "fractions": (), "quantiles": (), **curve})
    with pytest.raises(ConfigError, match="not a calibration curve"):
        Curve.from_dict({"scores": [1.0]})
    with pytest.raises(InputError, match="at least one finished request"):
        fit_curve([], [], [], CalibratorConfig())
    with pytest.raises(ConfigError, match="window_requests"):
        CalibratorConfig(window_requests=10)
