import numpy as np
import pytest

from policies.errors import InputError
from predictor.calibration import CalibratorConfig, fit_curve
from predictor.evaluation import (
    Judgement,
    as_table,
    confusion,
    evaluate,
    metrics,
    ranges,
    rank_correlation,
    remarks,
    report,
)
from predictor.samples import Sample

pytestmark = pytest.mark.slow  # loading torch and a model takes seconds


def judged(actual: list[float], predicted: list[float]) -> Judgement:
    a, p = np.array(actual), np.array(predicted)
    return Judgement(a, p, 0.5 * p, 2.0 * p, np.arange(len(a)))


def sample(prompt: str, tokens: float, model: str = "m", source: str = "s") -> Sample:
    return Sample(prompt=prompt, output_tokens=tokens, model=model, source=source, is_cut=False)


def traffic(start: int, count: int, model: str = "m", factor: float = 1.0, source: str = "s") -> list[Sample]:
    """Prompts that are numbers, with answers as long."""
    return [sample(str(n), factor * (10.0 + n % 97), model, source) for n in range(start, start + count)]


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


def test_files_of_other_names_teach_their_models_as_much() -> None:
    judged = traffic(5000, 100, source="test")
    of_name = evaluate(judged, traffic(0, 300, source="test"), score, FLAT)
    of_model = evaluate(judged, traffic(0, 300, source="train"), score, FLAT)
    for name in ("checkpoint", "prompt_length", "histogram", "one_histogram"):
        assert metrics(of_model["mixed"][name]) == metrics(of_name["mixed"][name])
    assert metrics(of_model["mixed"]["checkpoint"])["accuracy_4"] > 0.85
    assert list(remarks(judged, traffic(0, 300, source="train"))) == []


def test_a_set_of_its_own_is_learnt_from_before_the_others_of_the_model() -> None:
    learn = traffic(0, 300, source="here") + traffic(1000, 300, factor=10.0, source="there")
    found = evaluate(traffic(5000, 97, source="here"), learn, score, FLAT)
    assert metrics(found["mixed"]["checkpoint"])["accuracy_4"] > 0.85
    assert list(remarks(traffic(5000, 97, source="here"), learn)) == []


def test_answers_that_learn_from_other_sets_or_not_at_all_are_named() -> None:
    learn = traffic(0, 10, source="a") + traffic(100, 10, source="b")
    pooled, unknown = traffic(5000, 10, source="c"), traffic(6000, 10, "new", source="a")
    (remark,) = remarks(pooled, learn)
    assert remark.startswith("'c': not every model has answers of this set to learn from")
    (remark,) = remarks(unknown, learn)
    assert remark.startswith("nothing to learn from for model 'new'")
    assert len(list(remarks(pooled + unknown, learn))) == 2
    assert list(remarks(unknown, [])) == []


def test_files_without_a_model_in_common_are_refused() -> None:
    learn = [one for number in range(7) for one in traffic(10 * number, 10, f"m{number}")]
    with pytest.raises(InputError, match="judged are answers of model 'other', to learn from .*'m6'; give"):
        evaluate(traffic(5000, 10, "other"), learn, score, FLAT)


def test_without_anything_to_learn_from_the_shipped_curve_is_judged() -> None:
    curve = fit_curve([0.0, 96.0], [10.0, 106.0], [False, False], CalibratorConfig(cell_requests=1))
    found = evaluate(traffic(0, 97), [], score, curve)
    assert metrics(found["mixed"]["checkpoint"])["accuracy_8"] > 0.9


def test_a_range_holds_the_figure_and_narrows_with_the_root_of_the_prompts() -> None:
    chance = np.random.default_rng(0)
    widths = []
    for count in (100, 1600):
        actual = chance.lognormal(5.0, 1.0, count)
        judgement = judged(actual.tolist(), (actual * chance.lognormal(0.0, 1.0, count)).tolist())
        low, high = ranges(judgement)["accuracy_4"]
        figure = metrics(judgement)["accuracy_4"]
        assert low < figure < high
        widths.append((high - low) / (figure * (1.0 - figure)) ** 0.5)
    assert widths[0] == pytest.approx(2 * 1.96 / 10, rel=0.15)  # the normal law's range of a share of 100
    assert widths[1] == pytest.approx(2 * 1.96 / 40, rel=0.15)


def test_repeated_answers_to_a_prompt_make_a_range_no_narrower() -> None:
    chance = np.random.default_rng(0)
    actual = chance.lognormal(5.0, 1.0, 200)
    once = judged(actual.tolist(), (actual * chance.lognormal(0.0, 1.0, 200)).tolist())
    repeated = once.chosen(np.repeat(np.arange(200), 9))
    for name, (low, high) in ranges(once).items():
        repeated_low, repeated_high = ranges(repeated)[name]
        assert repeated_high - repeated_low == pytest.approx(high - low, rel=0.05), name


def test_table_and_json_show_ranges() -> None:
    found = evaluate(traffic(0, 97), [], score, FLAT)
    low, high = ranges(found["mixed"]["histogram"])["accuracy_2"]
    assert report(found)["sets"]["mixed"]["histogram"]["ranges"]["accuracy_2"] == (low, high)
    assert f"[{100 * low:.0f}, {100 * high:.0f}]" in as_table(found)
