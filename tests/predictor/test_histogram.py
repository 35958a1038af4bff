import pytest

from policies.errors import ConfigError
from predictor.histogram import MIN_SAMPLES, HistogramPredictor


def taught(lengths: list[int], window_requests: int = 100) -> HistogramPredictor:
    predictor = HistogramPredictor(window_requests)
    for length in lengths:
        predictor.observe("standard", length)
    return predictor


def mean(predictor: HistogramPredictor, slo_class: str = "standard") -> float | None:
    prediction = predictor.predict(slo_class)
    return None if prediction is None else prediction.mean_tokens


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5] * (MIN_SAMPLES - 1), None),
        ([5] * MIN_SAMPLES, 5.0),
        ([10, 20] * MIN_SAMPLES, 15.0),
        ([0] * MIN_SAMPLES, 0.0),
    ],
    ids=["not enough", "enough", "the mean", "empty answers"],
)
def test_it_predicts_the_mean_once_it_has_seen_enough(lengths: list[int], expected: float | None) -> None:
    assert mean(taught(lengths)) == expected


def test_classes_do_not_mix() -> None:
    predictor = taught([10] * MIN_SAMPLES)
    assert mean(predictor, "offline") is None
    for _ in range(MIN_SAMPLES):
        predictor.observe("offline", 1000)
    assert (mean(predictor), mean(predictor, "offline")) == (10.0, 1000.0)


def test_what_lies_outside_the_window_is_forgotten() -> None:
    assert mean(taught([1000] * 50 + [10] * 8, window_requests=8)) == 10.0


def test_a_window_smaller_than_what_is_enough_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_requests must be at least 8, got 7"):
        HistogramPredictor(7)
