"""How good is a predictor of length, next to what costs nothing?

Source: paper 000, table 1 and figure 10: accuracy in equiprobable bins, here with edges at the quantiles of the lengths
that are judged, and the share of predictions at most one bin off. What is judged is the median that a source predicts:

    checkpoint       the score, through a curve of its own for each model and set
    prompt_length    the logarithm of the prompt's length instead of the score, through such curves
    histogram        the lengths of the same model and set, whatever the prompt: what Sluice does without a predictor,
                     were every model and set a class of its own
    one_histogram    the lengths of everything together

Curves and histograms are learnt from the first `learn_requests` answers of each model and set in other files, as they
would be online; nothing of the judged files goes into them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
SIMULATED_PROMPTS = 200_000
NO_PRIOR = CalibratorConfig(own_from_requests=1)  # the baselines ship no curve: theirs begins with the first answer
Score = Callable[[Sequence[str]], FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """Predictions of one source beside the truth, all of shape (n,), tokens."""

    actual: FloatArray
    middle: FloatArray
    low: FloatArray
    high: FloatArray

    def chosen(self, chosen: IntArray) -> "Judgement":
        return Judgement(self.actual[chosen], self.middle[chosen], self.low[chosen], self.high[chosen])


def bins_of(lengths: FloatArray, edges: FloatArray) -> IntArray:
    return np.searchsorted(edges, lengths, side="right")


def inner_edges(lengths: FloatArray, count: int) -> FloatArray:
    """Edges between `count` bins of equal probability, shape (count - 1,)."""
    return np.asarray(np.quantile(lengths, np.arange(1, count) / count), dtype=np.float64)


def confusion(judgement: Judgement, count: int) -> FloatArray:
    """Of each actual bin (row) the fraction predicted into each bin (column); rows of empty bins are 0."""
    edges = inner_edges(judgement.actual, count)
    table = np.zeros((count, count))
    np.add.at(table, (bins_of(judgement.actual, edges), bins_of(judgement.middle, edges)), 1.0)
    return np.asarray(table / np.maximum(table.sum(axis=1, keepdims=True), 1.0))


def metrics(judgement: Judgement) -> dict[str, float]:
    """Every figure of one source on one set; fractions, tokens, nats."""
    actual, middle = judgement.actual, judgement.middle
    found: dict[str, float] = {"requests": float(len(actual))}
    for count in BIN_COUNTS:
        edges = inner_edges(actual, count)
        off = np.abs(bins_of(actual, edges) - bins_of(middle, edges))
        found[f"accuracy_{count}"] = float((off == 0).mean())
        found[f"within_one_{count}"] = float((off <= 1).mean())
    covered = (judgement.low <= actual) & (actual <= judgement.high)
    return found | {
        "mean_absolute_error_tokens": float(np.abs(actual - middle).mean()),
        "mean_absolute_log_error": float(np.abs(np.log(actual / np.maximum(middle, 1.0))).mean()),
        "rank_correlation": rank_correlation(actual, middle),
        "coverage_80": float(covered.mean()),
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
        InputError: a judged prompt is among those to learn from.
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
        InputError: a judged prompt is among those to learn from.
    """
    if {sample.prompt for sample in judged} & {sample.prompt for sample in learn}:
        raise InputError("some prompts are both judged and learnt from: the figures would flatter")
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


def _sets(judged: Sequence[Sample]) -> dict[str, IntArray]:
    sources = np.array([sample.source for sample in judged])
    return {"mixed": np.arange(len(judged))} | {name: np.flatnonzero(sources == name) for name in np.unique(sources)}


def _groups(samples: Sequence[Sample]) -> dict[tuple[str, str], list[Sample]]:
    groups: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
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
    calibrators = {key: _learn(group, scores, prior, config) for key, group in _groups(learnt).items()}
    unknown = Calibrator(prior)
    return [calibrators.get((sample.model, sample.source), unknown).predict(scores[sample.prompt]) for sample in judged]


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
    return Judgement(actual, quantiles[:, 1], quantiles[:, 0], quantiles[:, 2])


def ceilings(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """What repeated answers of one model to one prompt leave to predict, by set; sets without repeats are left out.

    `repeats`: each answer predicted by the median of the others, which are few, so a bound from below. `known_prompt`:
    log lengths taken as normal, with the variances between and within prompts that the repeats have; what a predictor
    would reach that knew each prompt's own mean and the model. Real lengths are not normal: read it as a guide.
    """
    found: dict[str, dict[str, float]] = {}
    for name, rows in _sets(samples).items():
        groups = list(_repeats([samples[row] for row in rows.tolist()]))
        if name != "mixed" and len(groups) > 1:
            found[name] = _ceiling(groups)
    return found


def _repeats(samples: Sequence[Sample]) -> Iterator[FloatArray]:
    groups: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.model, sample.prompt].append(sample.output_tokens)
    return (np.array(group) for group in groups.values() if len(group) > 1)


def _ceiling(groups: Sequence[FloatArray]) -> dict[str, float]:
    actual = np.concatenate(groups)
    others = np.array([np.median(np.delete(group, i)) for group in groups for i in range(len(group))])
    within = sum(float(np.log(group).var(ddof=1)) * (len(group) - 1) for group in groups) / (len(actual) - len(groups))
    total = float(np.log(actual).var())
    by_repeats = metrics(Judgement(actual, others, others, others))
    known = metrics(_known_prompts(total, min(within, total)))
    names = [f"accuracy_{count}" for count in BIN_COUNTS] + ["rank_correlation"]
    figures: dict[str, float] = {"answers": float(len(actual)), "within_prompt_variance_fraction": within / total}
    return (
        figures
        | {f"repeats_{name}": by_repeats[name] for name in names}
        | {f"known_prompt_{name}": known[name] for name in names}
    )


def _known_prompts(total_variance: float, within_variance: float) -> Judgement:
    chance = np.random.default_rng(0)
    mean = chance.normal(0.0, (total_variance - within_variance) ** 0.5, SIMULATED_PROMPTS)
    actual = np.exp(6.0 + mean + chance.normal(0.0, within_variance**0.5, SIMULATED_PROMPTS))
    predicted = np.exp(6.0 + mean)
    return Judgement(actual, predicted, predicted, predicted)


def report(judgements: dict[str, dict[str, Judgement]], ceiling: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Everything as JSON."""
    sets = {part: {name: metrics(judged) for name, judged in found.items()} for part, found in judgements.items()}
    return {"sets": sets, "ceilings": ceiling}


def as_table(judgements: dict[str, dict[str, Judgement]]) -> str:
    """For people: a line for each set and source."""
    head = f"{'set':<20}{'source':<15}{'n':>6}  {'2 bins':>7}{'4 bins':>7}{'8 bins':>7}  {'±1 of 4':>7}{'±1 of 8':>8}"
    lines = [f"{head}  {'MAE':>6}{'rank':>6}{'80 %':>6}"]
    for part, found in judgements.items():
        for name, judged in found.items():
            m = metrics(judged)
            accuracy = "".join(f"{100 * m[f'accuracy_{count}']:>7.1f}" for count in BIN_COUNTS)
            near = f"{100 * m['within_one_4']:>7.1f}{100 * m['within_one_8']:>8.1f}"
            rest = f"{m['mean_absolute_error_tokens']:>6.0f}{m['rank_correlation']:>6.2f}{100 * m['coverage_80']:>6.0f}"
            lines.append(f"{part:<20}{name:<15}{m['requests']:>6.0f}  {accuracy}  {near}  {rest}")
    return "\n".join(lines)
