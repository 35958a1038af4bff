import numpy as np
import pytest

from policies.errors import InputError
from predictor.calibration import CalibratorConfig, fit_curve
from predictor.evaluation import Judgement, as_table, ceilings, confusion, evaluate, metrics, rank_correlation
from predictor.samples import Sample

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds


def judged(actual: list[float], predicted: list[float]) -> Judgement:
    a, p = np.array(actual), np.array(predicted)
    return Judgement(a, p, 0.5 * p, 2.0 * p)


def sample(prompt: str, tokens: float, model: str = "m", source: str = "s") -> Sample:
    return Sample(prompt=prompt, output_tokens=tokens, model=model, source=source, is_cut=False)


def traffic(start: int, count: int, model: str = "m", factor: float = 1.0) -> list[Sample]:
    """Prompts that are numbers, with answers as long."""
    return [sample(str(n), factor * (10.0 + n % 97), model) for n in range(start, start + count)]


def score(prompts: list[str]) -> np.ndarray:
    return np.array([float(int(prompt) % 97) for prompt in prompts])


FLAT = fit_curve([0.0], [50.0], [False], CalibratorConfig())


def test_a_perfect_prediction_is_perfect_in_every_figure() -> None:
    lengths = [float(n) for n in range(1, 81)]
    found = metrics(judged(lengths, lengths))
    for name in ("accuracy_2", "accuracy_4", "accuracy_8", "within_one_8", "coverage_80"):
        assert found[name] == 1.0
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert (found["mean_absolute_error_tokens"], found["mean_absolute_log_error"]) == (0.0, 0.0)


def test_predicting_one_length_hits_one_bin() -> None:
    found = metrics(judged([float(n) for n in range(1, 81)], [40.0] * 80))
    assert (found["accuracy_2"], found["accuracy_4"], found["accuracy_8"]) == (0.5, 0.25, 0.125)
    assert found["within_one_4"] == 0.75
    assert found["rank_correlation"] == 0.0


def test_the_rows_of_a_confusion_matrix_are_the_actual_bins() -> None:
    table = confusion(judged([1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 3.0, 4.0]), 2)
    assert table.tolist() == [[0.5, 0.5], [0.0, 1.0]]


def test_rank_correlation_looks_at_order_only() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 100, 1000, 10000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)


def test_the_checkpoint_is_judged_through_a_curve_of_each_model() -> None:
    learn = traffic(0, 300) + traffic(1000, 300, "long-winded", factor=10.0)
    unseen = traffic(5000, 100) + traffic(6000, 100, "long-winded", factor=10.0)
    found = evaluate(unseen, learn, score, FLAT)
    for_all = {name: metrics(judgement) for name, judgement in found["mixed"].items()}
    assert for_all["checkpoint"]["accuracy_4"] > 0.85
    assert for_all["checkpoint"]["accuracy_4"] > for_all["histogram"]["accuracy_4"] > 0.3
    assert for_all["one_histogram"]["accuracy_4"] == pytest.approx(0.25, abs=0.05)
    assert "long" not in as_table(found)
    assert "checkpoint" in as_table(found)


def test_a_prompt_that_was_learnt_from_may_not_be_judged() -> None:
    with pytest.raises(InputError, match="both judged and learnt from"):
        evaluate(traffic(0, 10), traffic(5, 10), score, FLAT)


def test_without_anything_to_learn_from_the_shipped_curve_is_judged() -> None:
    curve = fit_curve([0.0, 96.0], [10.0, 106.0], [False, False], CalibratorConfig(cell_requests=1))
    found = evaluate(traffic(0, 97), [], score, curve)
    assert metrics(found["mixed"]["checkpoint"])["accuracy_8"] > 0.9


def test_repeated_answers_bound_what_can_be_known() -> None:
    chance = np.random.default_rng(0)
    means = chance.normal(5.0, 0.9, 400)
    repeated = [
        sample(str(n), float(np.exp(mean + 0.3 * z))) for n, mean in enumerate(means) for z in chance.normal(size=3)
    ]
    (found,) = ceilings(repeated).values()
    assert found["within_prompt_variance_fraction"] == pytest.approx(0.1, abs=0.02)
    assert found["repeats_accuracy_4"] < found["known_prompt_accuracy_4"] < 1.0
    assert found["known_prompt_rank_correlation"] == pytest.approx(0.95, abs=0.02)


def test_without_repeats_there_is_no_ceiling() -> None:
    assert ceilings(traffic(0, 50)) == {}
