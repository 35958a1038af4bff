"""How good is a predictor of length, next to what costs nothing?

Source: paper 000, table 1 and figure 10: accuracy in equiprobable bins, here with edges at the quantiles of the lengths
that are judged, and the share of predictions at most one bin off. What is judged is the median that a source predicts:

    checkpoint       the score, through a curve of its own for each model and set
    prompt_length    the logarithm of the prompt's length instead of the score, through such curves
    histogram        the lengths of the same model and set, whatever the prompt: what Sluice does without a predictor,
                     were every model and set a class of its own
    one_histogram    the lengths of everything together

Curves and histograms are learnt from the first `learn_requests` answers of each model and set in other files, as they
would be online; nothing of the judged files goes into them. A model and set without answers there learns from the
model's answers in all of them, as a served model's curve knows no sets.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from policies.errors import InputError
from policies.types import FloatArray, IntArray
from predictor.base import LengthPrediction
from predictor.calibration import FRACTIONS, Calibrator, CalibratorConfig, Curve, fit_curve
from predictor.samples import Sample

BIN_COUNTS = (2, 4, 8)
RESAMPLES = 1000  # a bound of the 95 % range then errs by some 2 % of its width
RANGE = (0.025, 0.975)  # the middle 95 % of the resamples
NO_PRIOR = CalibratorConfig(own_from_requests=1)  # the baselines ship no curve: theirs begins with the first answer
Score = Callable[[Sequence[str]], FloatArray]
Key = tuple[str, str]  # model and set


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Predictions of one source beside the truth, all of shape (n,), tokens; `prompt` numbers the prompt of each."""

    actual: FloatArray
    middle: FloatArray
    low: FloatArray
    high: FloatArray
    prompt: IntArray

    def chosen(self, chosen: IntArray) -> "Judgement":
        return Judgement(
            self.actual[chosen], self.middle[chosen], self.low[chosen], self.high[chosen], self.prompt[chosen]
        )


def bins_of(lengths: FloatArray, edges: FloatArray) -> IntArray:
    return np.searchsorted(edges, lengths, side="right")


def inner_edges(lengths: FloatArray, count: int) -> FloatArray:
    """Edges between `count` bins of equal probability, shape (count - 1,)."""
    return np.asarray(np.quantile(lengths, np.arange(1, count) / count), dtype=np.float64)


def confusion(judgement: Judgement, count: int) -> FloatArray:
    """The fraction of each actual bin (row) that is predicted into each bin (column); rows of empty bins are 0."""
    edges = inner_edges(judgement.actual, count)
    table = np.zeros((count, count))
    np.add.at(table, (bins_of(judgement.actual, edges), bins_of(judgement.middle, edges)), 1.0)
    return np.asarray(table / np.maximum(table.sum(axis=1, keepdims=True), 1.0))


def metrics(judgement: Judgement) -> dict[str, float]:
    """Every figure of one source on one set; fractions, tokens, nats."""
    means = {name: float(values.mean()) for name, values in _by_answer(judgement).items()}
    requests, correlation = len(judgement.actual), rank_correlation(judgement.actual, judgement.middle)
    return {"requests": float(requests)} | means | {"rank_correlation": correlation}


def ranges(judgement: Judgement) -> dict[str, tuple[float, float]]:
    """Within what other prompts of the kind would leave each mean of `metrics`: its 95 % bootstrap range.

    Prompts are drawn with replacement, each with all its answers, RESAMPLES times. Edges of bins stay where they are.
    """
    prompts, owner, answers = np.unique(judgement.prompt, return_inverse=True, return_counts=True)
    equally = np.full(len(prompts), 1.0 / len(prompts))
    drawn = np.random.default_rng(0).multinomial(len(prompts), equally, RESAMPLES)
    return {
        name: _range(drawn @ np.bincount(owner, weights=values) / (drawn @ answers))
        for name, values in _by_answer(judgement).items()
    }


def _range(values: FloatArray) -> tuple[float, float]:
    low, high = np.quantile(values, RANGE).tolist()
    return low, high


def _by_answer(judgement: Judgement) -> dict[str, FloatArray]:
    """What each answer adds to the figures that are means over answers, each of shape (n,)."""
    actual, middle = judgement.actual, judgement.middle
    found: dict[str, FloatArray] = {}
    for count in BIN_COUNTS:
        edges = inner_edges(actual, count)
        off = np.abs(bins_of(actual, edges) - bins_of(middle, edges))
        found[f"accuracy_{count}"] = (off == 0).astype(np.float64)
        found[f"within_one_{count}"] = (off <= 1).astype(np.float64)
    covered = (judgement.low <= actual) & (actual <= judgement.high)
    return found | {
        "mean_absolute_error_tokens": np.abs(actual - middle),
        "mean_absolute_log_error": np.abs(np.log(actual / np.maximum(middle, 1.0))),
        "coverage_80": covered.astype(np.float64),
    }


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's, ties at their mean rank; 0 when one of them never varies."""
    x, y = _ranks(np.asarray(first)), _ranks(np.asarray(second))
    spread = float(x.std() * y.std())
    return float(((x - x.mean()) * (y - y.mean())).mean()) / spread if spread else 0.0


def _ranks(values: FloatArray) -> FloatArray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts).astype(np.float64)
    return np.asarray((last - 0.5 * (counts - 1))[place])


def evaluate(
    judged: Sequence[Sample], learn: Sequence[Sample], score: Score, prior: Curve, learn_requests: int = 300
) -> dict[str, dict[str, Judgement]]:
    """Judgements by set (and "mixed", all of them together) and source.

    Raises:
        InputError: a judged prompt is among those to learn from, or no judged model is.
    """
    sources = predictions(judged, learn, score, prior, learn_requests)
    judgements = {name: _judgement(judged, predicted) for name, predicted in sources.items()}
    return {
        part: {name: whole.chosen(rows) for name, whole in judgements.items()} for part, rows in _sets(judged).items()
    }


def predictions(
    judged: Sequence[Sample], learn: Sequence[Sample], score: Score, prior: Curve, learn_requests: int = 300
) -> dict[str, list[LengthPrediction]]:
    """What each source says of every judged answer.

    Raises:
        InputError: a judged prompt is among those to learn from, or no judged model is.
    """
    if {sample.prompt for sample in judged} & {sample.prompt for sample in learn}:
        raise InputError("some prompts are both judged and learnt from: the figures would flatter")
    _require_common_model(judged, learn)
    learnt = [sample for group in _groups(learn).values() for sample in group[:learn_requests]]
    everything = [*learnt, *judged]
    scores = _by_prompt(everything, score)
    of_prompt = {sample.prompt: log(1.0 + len(sample.prompt)) for sample in everything}
    nothing = dict.fromkeys(scores, 0.0)
    flat = fit_curve([0.0], [_median(learnt or judged)], [False], CalibratorConfig())
    return {
        "checkpoint": _predictions(judged, learnt, scores, prior, CalibratorConfig()),
        "prompt_length": _predictions(judged, learnt, of_prompt, flat, NO_PRIOR),
        "histogram": _predictions(judged, learnt, nothing, flat, NO_PRIOR),
        "one_histogram": _of_one_histogram(judged, learnt, flat),
    }


def _require_common_model(judged: Sequence[Sample], learn: Sequence[Sample]) -> None:
    if learn and not _models(judged) & _models(learn):
        raise InputError(
            f"nothing can be learnt: judged are answers of model {_listed(_models(judged))}, to learn from are answers "
            f'of {_listed(_models(learn))}; give the same "model" in both, or in neither'
        )


def remarks(judged: Sequence[Sample], learn: Sequence[Sample]) -> Iterator[str]:
    """What judged answers learn from other than those of their own model and set."""
    if not learn:
        return
    own = _groups(learn)
    others = [(model, source) for model, source in _groups(judged) if (model, source) not in own]
    if unknown := {model for model, _ in others} - _models(learn):
        yield f"nothing to learn from for model {_listed(unknown)}: its answers are judged by the curve that is shipped"
    pooled = {source for model, source in others if model not in unknown}
    if pooled and len({sample.source for sample in learn}) > 1:
        yield (
            f"{_listed(pooled)}: not every model has answers of this set to learn from, so its answers in all sets "
            "stand in (NAME_train and NAME_test are one set)"
        )


def _models(samples: Iterable[Sample]) -> set[str]:
    return {sample.model for sample in samples}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _sets(judged: Sequence[Sample]) -> dict[str, IntArray]:
    sources = np.array([sample.source for sample in judged])
    return {"mixed": np.arange(len(judged))} | {name: np.flatnonzero(sources == name) for name in np.unique(sources)}


def _groups(samples: Sequence[Sample]) -> dict[Key, list[Sample]]:
    groups: defaultdict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.model, sample.source].append(sample)
    return groups


def _by_prompt(samples: Sequence[Sample], score: Score) -> dict[str, float]:
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    return dict(zip(prompts, score(prompts).tolist(), strict=True))


def _predictions(
    judged: Sequence[Sample],
    learnt: Sequence[Sample],
    scores: dict[str, float],
    prior: Curve,
    config: CalibratorConfig,
) -> list[LengthPrediction]:
    own = _groups(learnt)
    calibrators = {
        key: _learn(own.get(key) or [sample for sample in learnt if sample.model == key[0]], scores, prior, config)
        for key in _groups(judged)
    }
    return [calibrators[sample.model, sample.source].predict(scores[sample.prompt]) for sample in judged]


def _learn(samples: Sequence[Sample], scores: dict[str, float], prior: Curve, config: CalibratorConfig) -> Calibrator:
    calibrator = Calibrator(prior, config)
    calibrator.observe_all((scores[sample.prompt], sample.output_tokens, sample.is_cut) for sample in samples)
    return calibrator


def _of_one_histogram(judged: Sequence[Sample], learnt: Sequence[Sample], flat: Curve) -> list[LengthPrediction]:
    prediction = flat.predict(0.0)
    if learnt:
        tokens, is_cut = [sample.output_tokens for sample in learnt], [sample.is_cut for sample in learnt]
        prediction = fit_curve([0.0] * len(learnt), tokens, is_cut, CalibratorConfig(max_cells=1)).predict(0.0)
    return [prediction] * len(judged)


def _median(samples: Sequence[Sample]) -> float:
    return float(np.median([sample.output_tokens for sample in samples]))


def _judgement(judged: Sequence[Sample], predictions: Sequence[LengthPrediction]) -> Judgement:
    quantiles = np.array([[p.quantile_tokens[f] for f in FRACTIONS] for p in predictions])
    actual = np.array([sample.output_tokens for sample in judged])
    _, prompt = np.unique([sample.prompt for sample in judged], return_inverse=True)
    return Judgement(actual, quantiles[:, 1], quantiles[:, 0], quantiles[:, 2], prompt)


def report(judgements: dict[str, dict[str, Judgement]]) -> dict[str, Any]:
    """Everything as JSON; `ranges` are at 95 %."""
    sets = {
        part: {name: {**metrics(judged), "ranges": ranges(judged)} for name, judged in found.items()}
        for part, found in judgements.items()
    }
    return {"sets": sets}


def as_table(judgements: dict[str, dict[str, Judgement]]) -> str:
    """For people: a line for each set and source, accuracies in percent with their 95 % ranges."""
    bins = "".join(f"{f'{count} bins':>17}" for count in BIN_COUNTS)
    head = f"{'set':<20}{'source':<14}{'n':>5}{bins}{'±1 of 4':>9}{'±1 of 8':>8}{'MAE':>6}{'rank':>6}{'80 %':>5}"
    return "\n".join(
        [head, *(_line(part, name, judged) for part, found in judgements.items() for name, judged in found.items())]
    )


def _line(part: str, source: str, judged: Judgement) -> str:
    found, likely = metrics(judged), ranges(judged)
    percent = {name: 100 * value for name, value in found.items()}
    cells = [f"{part:<20}{source:<14}{found['requests']:>5.0f}"]
    for name in (f"accuracy_{count}" for count in BIN_COUNTS):
        low, high = likely[name]
        cells.append(f"{f'{percent[name]:.1f} [{100 * low:.0f}, {100 * high:.0f}]':>17}")
    cells.append(f"{percent['within_one_4']:>9.1f}{percent['within_one_8']:>8.1f}")
    cells.append(f"{found['mean_absolute_error_tokens']:>6.0f}{found['rank_correlation']:>6.2f}")
    cells.append(f"{percent['coverage_80']:>5.0f}")
    return "".join(cells)
