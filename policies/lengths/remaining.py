"""How many tokens answers have left, given how many they have made: by class, and by bucket of the prediction.

A prediction errs, and by how much shows in the answers that had one like it: of those in its bucket that grew as long,
the rest is what may be expected. So a prediction that is always half of the answer is as good as one that is right.
Answers that still run count as at risk, else the short ones, which end first, would speak for all.

Source: 003's survival of the output length (`policies.lengths.statistics`), here by bucket of the predicted length as
000 has its bins.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import frexp

import numpy as np

from policies.lengths.statistics import LengthStatistics, SurvivalLaw
from policies.types import BoolArray, FloatArray, IntArray, Left, RunningRequests, StepResult

_BUCKETS = 16  # powers of two of predicted tokens, and one for all of a class
_WINDOW = 512  # answers that a bucket remembers
_LEAST = 8  # below so many its prediction speaks for itself
_SHORT = 0.1  # the quantile that is called short
# Of a prediction of which nothing is known yet, what is left of a short answer: the quantile where it errs by a half.
_UNTOLD_SHORT = 0.5
# Steps between two looks at a bucket, and how much more it must have seen, as a share of what it remembers.
_REFRESH_STEPS, _REFRESH = 16, 0.1
# Ages at which it is told what is left; between two of them an answer has made a part of it.
_AGES: IntArray = np.unique((np.geomspace(1.0, 32769.0, 64) - 1.0).astype(np.int64))
_AGES_LISTED: list[int] = _AGES.tolist()


class RemainingTokens:
    """Learns from every answer that ended; asked for many at once."""

    def __init__(self, classes: int = 1, *, speculates: bool = False) -> None:
        """speculates: a decode step may bring a request several tokens."""
        self._classes = classes
        self._lengths = LengthStatistics(classes=classes * _BUCKETS, window=_WINDOW)
        if speculates:
            self._lengths.stop_counting_steps()
        self._seen: IntArray = np.zeros(classes * _BUCKETS, dtype=np.int64)
        self._learned: IntArray = np.zeros(classes * _BUCKETS, dtype=np.int64)
        self._steps = 0
        # Short, median and mean, by class and bucket, and by age; NaN where too little is known.
        self._left: FloatArray = np.full((classes * _BUCKETS, len(_AGES), 3), np.nan)

    def rearrange(self, known_as: Sequence[int | None]) -> None:
        """Go on with other classes.

        Args:
            known_as: for each class the index that it had, None for one that is new.
        """
        self._classes = len(known_as)
        rows = [None if old is None else old * _BUCKETS + bucket for old in known_as for bucket in range(_BUCKETS)]
        self._lengths.rearrange(rows)
        kept = np.array([-1 if row is None else row for row in rows])
        self._seen = np.where(kept < 0, 0, self._seen[kept])
        self._learned = np.where(kept < 0, 0, self._learned[kept])
        self._left = np.where((kept < 0)[:, None, None], np.nan, self._left[kept])

    def observe(self, result: StepResult) -> None:
        """An answer that its client cut off would have been at least as long."""
        finished = []
        for one in result.finished:
            row = self._row(one.class_index, one.predicted_output_tokens)
            for each in {row, row - row % _BUCKETS}:
                finished.append(one._replace(class_index=each))
                self._seen[each] += not one.aborted  # those alone tell nothing, and would keep others from their turn
        self._lengths.observe(result._replace(finished=tuple(finished)))

    def refresh(self, running: RunningRequests) -> None:
        """Look at one bucket that has seen much since, now and then; to be called before every step."""
        self._steps += 1
        if self._steps % _REFRESH_STEPS:
            return
        new = self._seen - self._learned
        row = int(new.argmax())
        if new[row] <= _REFRESH * self._lengths.count(row) or self._lengths.count(row) < _LEAST:
            return
        self._learned[row] = self._seen[row]
        rows = self._rows(running.class_index, running.predicted_output_tokens)
        alike = rows == row if row % _BUCKETS else rows // _BUCKETS == row // _BUCKETS
        decoding = running.prefill_tokens_left == 0
        law = self._lengths.table(row, running.output_tokens[alike & decoding]).law()
        if law is not None:
            self._left[row] = _left_by_age(law)

    def left(self, class_index: int, predicted_output_tokens: float | None, made: int = 0) -> Left:
        """Of one answer."""
        at = bisect_right(_AGES_LISTED, made) - 1
        told = self._left[self._row(class_index, predicted_output_tokens), at].tolist()
        if told[0] == told[0]:
            made -= _AGES_LISTED[at]
        else:
            expected = 2.0 * made if predicted_output_tokens is None else predicted_output_tokens
            told = [_UNTOLD_SHORT * expected, expected, expected]
        return Left(*[max(1.0, each - made) for each in told])

    def _row(self, class_index: int, predicted_output_tokens: float | None) -> int:
        """Of the tables: by powers of two, the first of its class without a prediction."""
        bucket = 0
        if predicted_output_tokens is not None:
            bucket = min(max(frexp(predicted_output_tokens)[1], 1), _BUCKETS - 1)
        return (class_index if class_index < self._classes else 0) * _BUCKETS + bucket

    def _rows(self, class_index: IntArray, predicted_output_tokens: FloatArray) -> IntArray:
        """Of many, NaN without a prediction."""
        unknown: BoolArray = np.isnan(predicted_output_tokens)
        exponents = np.frexp(np.where(unknown, 0.0, predicted_output_tokens))[1]
        buckets = np.where(unknown, 0, np.clip(exponents, 1, _BUCKETS - 1)).astype(np.int64)
        return np.where(class_index < self._classes, class_index, 0) * _BUCKETS + buckets


def _left_by_age(law: SurvivalLaw) -> FloatArray:
    """Tokens left at each age, short, median and mean; shape (ages, 3)."""
    edges = np.append(law.edges, law.edges[-1] + np.array([1.0, 4.0]) / law.tail_hazard)
    alive = law.survival(edges)
    pieces = 0.5 * (alive[1:] + alive[:-1]) * np.diff(edges)
    beyond = np.append(np.cumsum(pieces[::-1])[::-1], 0.0)
    here = np.maximum(law.survival(_AGES), 1e-12)
    # The tokens beyond an age: those beyond the next edge, and the piece up to it.
    next_edge = np.minimum(edges.searchsorted(_AGES, side="left"), len(edges) - 1)
    up_to = 0.5 * (here + alive[next_edge]) * np.maximum(edges[next_edge] - _AGES, 0.0)
    mean = (beyond[next_edge] + up_to) / here
    short, median = (law.quantiles(1.0 - (1.0 - share) * here) - _AGES for share in (_SHORT, 0.5))
    return np.stack([short, median, mean], axis=1)
