"""From a score to tokens: a monotone curve for each served model, learnt from its finished requests.

Not in the papers: paper 000 trains one predictor for one model. A score ranks prompts; how many tokens a rank is worth
depends on the model, its system prompt and its sampling, and is learnt online. The latest requests are sorted by score
into cells of equal count. In each cell the lengths' law is the product-limit (Kaplan-Meier) estimate, so that answers
cut at a limit count as longer than that; its mean and its quantiles become the curve's values at the cell's median
score, and pool-adjacent-violators (isotonic regression) keeps each of them from falling. Cells of one median score are
one cell, for a score has one value. Between cells the curve is a line, outside it is flat. The longest answer of a cell
counts as ended even if it was cut (Efron's convention): means behind a limit are therefore at most that limit.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.checks import require_at_least
from policies.errors import ConfigError, InputError
from policies.types import FloatArray
from predictor.base import LengthPrediction

DAY_0 = Path(__file__).with_name("day_0")
CALIBRATION_FILE = "calibration.json"
LOW, _, HIGH = FRACTIONS = (0.1, 0.5, 0.9)  # of the answers, whose quantiles a curve keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratorConfig:
    """How a curve follows the requests.

    Attributes:
        window_requests: the latest requests that count.
        refit_every: requests between two fits.
        cell_requests: requests in a cell, at least.
        max_cells: values along the curve, at most.
        own_from_requests: below this the shipped curve is used, scaled to the mean seen so far. It is steeper than one
            served model's own: measured on real answers, even a flat curve of 24 requests errs less.
    """

    window_requests: int = 2048
    refit_every: int = 16
    cell_requests: int = 24
    max_cells: int = 16
    own_from_requests: int = 24

    def __post_init__(self) -> None:
        require_at_least(1, self, "refit_every", "cell_requests", "max_cells", "own_from_requests")
        require_at_least(self.own_from_requests, self, "window_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Tokens along the score; every column ascends.

    Attributes:
        scores: k ascending scores. means: k mean lengths. quantiles: for each of `fractions` k lengths.
    """

    scores: tuple[float, ...]
    means: tuple[float, ...]
    fractions: tuple[float, ...]
    quantiles: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        columns = (self.means, *self.quantiles)
        if not self.scores or any(len(column) != len(self.scores) for column in columns):
            raise ConfigError(f"a curve needs one value for each of its {len(self.scores)} scores, at least one")
        if len(self.fractions) != len(self.quantiles):
            raise ConfigError(f"a curve needs one column for each of fractions {self.fractions}")
        if any(list(column) != sorted(column) for column in (self.scores, *columns)):
            raise ConfigError("a curve must not fall")

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Curve":
        """Raises ConfigError for what `to_dict` did not write."""
        try:
            return cls(
                scores=tuple(fields["scores"]),
                means=tuple(fields["means"]),
                fractions=tuple(fields["fractions"]),
                quantiles=tuple(tuple(column) for column in fields["quantiles"]),
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"not a calibration curve: {error!r}") from error

    @classmethod
    def read(cls, folder: Path) -> "Curve":
        """The curve of a checkpoint, without anything else of it. Raises ConfigError."""
        try:
            return cls.from_dict(json.loads((folder / CALIBRATION_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder} holds no predictor checkpoint: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def predict(self, score: float) -> LengthPrediction:
        values = [float(np.interp(score, self.scores, column)) for column in (self.means, *self.quantiles)]
        return LengthPrediction(
            mean_tokens=values[0], quantile_tokens=dict(zip(self.fractions, values[1:], strict=True))
        )

    def mean_tokens(self, scores: ArrayLike) -> FloatArray:
        return np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.means)

    def scaled(self, factor: float) -> "Curve":
        return Curve(
            scores=self.scores,
            means=tuple(factor * mean for mean in self.means),
            fractions=self.fractions,
            quantiles=tuple(tuple(factor * value for value in column) for column in self.quantiles),
        )


def fit_curve(
    scores: Sequence[float], output_tokens: Sequence[float], is_cut: Sequence[bool], config: CalibratorConfig
) -> Curve:
    """The curve of finished requests; a cut one has been longer than its output_tokens.

    Raises:
        InputError: there is no request.
    """
    if not scores:
        raise InputError("a curve needs at least one finished request")
    order = np.argsort(scores, kind="stable")
    score, tokens, cut = np.asarray(scores, float), np.asarray(output_tokens, float), np.asarray(is_cut, bool)
    equal_counts = np.array_split(order, min(config.max_cells, max(1, len(order) // config.cell_requests)))
    cells = [
        np.concatenate(list(same)) for _, same in groupby(equal_counts, lambda cell: float(np.median(score[cell])))
    ]
    laws = [_mean_and_quantiles(tokens[cell], cut[cell]) for cell in cells]
    counts = np.array([len(cell) for cell in cells], dtype=np.float64)
    columns = [tuple(never_falling(column, counts).tolist()) for column in np.array(laws).T]
    middles = tuple(float(np.median(score[cell])) for cell in cells)
    return Curve(scores=middles, means=columns[0], fractions=FRACTIONS, quantiles=tuple(columns[1:]))


def _mean_and_quantiles(tokens: FloatArray, is_cut: NDArray[np.bool_]) -> list[float]:
    """Mean and the quantiles at FRACTIONS of the product-limit law, the longest counted as ended."""
    order = np.lexsort((is_cut, tokens))
    tokens, ends = tokens[order], ~is_cut[order]
    ends[-1] = True
    at_risk = np.arange(len(tokens), 0, -1)
    survival = np.cumprod(np.where(ends, 1.0 - 1.0 / at_risk, 1.0))
    mass = -np.diff(survival, prepend=1.0)
    reached = np.searchsorted(1.0 - survival, np.asarray(FRACTIONS) - 1e-12)
    return [float(mass @ tokens), *tokens[np.minimum(reached, len(tokens) - 1)].tolist()]


def never_falling(values: ArrayLike, weights: ArrayLike) -> FloatArray:
    """The closest never-falling values in weighted least squares: pool adjacent violators."""
    pooled: list[tuple[float, float, int]] = []
    for value, weight in zip(np.asarray(values).tolist(), np.asarray(weights).tolist(), strict=True):
        count = 1
        while pooled and pooled[-1][0] > value:
            last, last_weight, last_count = pooled.pop()
            value = (last * last_weight + value * weight) / (last_weight + weight)
            weight, count = weight + last_weight, count + last_count
        pooled.append((value, weight, count))
    return np.repeat([value for value, _, _ in pooled], [count for _, _, count in pooled])


class Calibrator:
    """One served model's curve, or one of its system prompts'."""

    def __init__(self, prior: Curve, config: CalibratorConfig | None = None) -> None:
        self._config = config or CalibratorConfig()
        self._prior = self.curve = prior
        self._finished: deque[tuple[float, float, bool]] = deque(maxlen=self._config.window_requests)
        self._unfitted = 0

    def __len__(self) -> int:
        return len(self._finished)

    @property
    def has_own_curve(self) -> bool:
        return len(self._finished) >= self._config.own_from_requests

    def predict(self, score: float) -> LengthPrediction:
        return self.curve.predict(score)

    def observe(self, finished: Iterable[tuple[float, float, bool]]) -> None:
        """Take note of finished requests, as (score, output_tokens, is_cut); a cut one would have been longer.

        However many they are, they lead to one fit at most.
        """
        for one in finished:
            self._finished.append(one)
            self._unfitted += 1
        if self._unfitted >= self._config.refit_every:
            self._refit()

    def observe_all(self, finished: Iterable[tuple[float, float, bool]]) -> None:
        """The same, with a fit at the end in any case."""
        self._finished.extend(finished)
        self._refit()

    def _refit(self) -> None:
        self._unfitted = 0
        if self._finished:
            self.curve = self._fit()

    def _fit(self) -> Curve:
        scores, tokens, is_cut = zip(*self._finished, strict=True)
        if self.has_own_curve:
            return fit_curve(scores, tokens, is_cut, self._config)
        mean, *_ = _mean_and_quantiles(np.array(tokens, dtype=np.float64), np.array(is_cut))
        return self._prior.scaled(mean / max(float(self._prior.mean_tokens(scores).mean()), 1e-6))
