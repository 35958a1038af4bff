"""How long answers are: sliding-window moments, survival and hazard of the output length, per class.

Source: 003's online controller (windows of lengths, empirical hazard) and the moments that 001's eq. 8 and 9 need.
Departures:

* Running requests count as at risk (censored): a window of completed answers alone is biased short while a load
  builds up, because the short answers complete first (ERRATA 3.6).
* The window is a span of decode steps, not only a list of completions: a request that was already running when the
  span began enters at its age of that moment (left truncation). Without it the running requests' early tokens would
  be counted although the completions that belong to them have left the window, and every hazard would come out low.
* The variance of prompt + output keeps 2*Cov, and the tokens resident in a slot have their own, length-biased moments
  (ERRATA 1.3, 1.4).

Ages are counted in output tokens. One decode step is one token for every decoding request; under speculative decoding
steps are not counted, and the window is treated as a plain list.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from policies.errors import ConfigError, InputError
from policies.types import FinishedRequest, FloatArray, IntArray, StepResult

# Longer answers are not told apart.
_MAX_OUTPUT_TOKENS = 32768
# A hazard of exactly 1 would make everything conditional on living longer undefined.
MAX_HAZARD = 1.0 - 1e-9
# The last tenth of the deaths speaks for ages beyond all that was seen.
_TAIL_FRACTION = 0.1


def length_grid(max_output_tokens: int, exact_up_to: int = 64, ratio: float = 1.08) -> IntArray:
    """Cell edges 0 = e_0 < e_1 < ... >= max_output_tokens: width 1 up to exact_up_to, then growing by ratio.

    Returns:
        int64, shape (cells + 1,), tokens; cell g holds the lengths in (e_g, e_g+1].

    Raises:
        ConfigError: max_output_tokens < 1, exact_up_to < 1 or ratio <= 1.
    """
    if max_output_tokens < 1 or exact_up_to < 1 or not ratio > 1.0:
        raise ConfigError(
            f"need max_output_tokens, exact_up_to >= 1 and ratio > 1, got {max_output_tokens}, {exact_up_to}, {ratio}"
        )
    edges = list(range(min(exact_up_to, max_output_tokens) + 1))
    while edges[-1] < max_output_tokens:
        edges.append(max(edges[-1] + 1, int(edges[-1] * ratio)))
    return np.asarray(edges, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class SurvivalLaw:
    """P(output length > t), kept as a cumulative hazard that is linear between edges.

    Attributes:
        edges: float64, shape (cells + 1,), tokens, edges[0] = 0.
        cumulative: float64, shape (cells + 1,), -ln P(length > edge); never decreases, cumulative[0] = 0.
        tail_hazard: nats per token beyond the last edge, > 0.
    """

    edges: FloatArray
    cumulative: FloatArray
    tail_hazard: float

    def cumulative_hazard(self, tokens: ArrayLike) -> FloatArray:
        """-ln P(length > tokens), for tokens >= 0 of any shape."""
        t = np.asarray(tokens, dtype=np.float64)
        beyond = np.maximum(t - self.edges[-1], 0.0)
        return np.asarray(np.interp(t, self.edges, self.cumulative) + self.tail_hazard * beyond)

    def survival(self, tokens: ArrayLike) -> FloatArray:
        """P(length > tokens), for tokens >= 0 of any shape."""
        return np.asarray(np.exp(-self.cumulative_hazard(tokens)))

    def alive(self, age_tokens: ArrayLike, later_tokens: ArrayLike) -> FloatArray:
        """P(length > age + later | length > age); the two shapes broadcast."""
        age = np.asarray(age_tokens, dtype=np.float64)
        later = self.cumulative_hazard(age + np.asarray(later_tokens, dtype=np.float64))
        return np.asarray(np.exp(self.cumulative_hazard(age) - later))

    def stretched(self, factor: float) -> "SurvivalLaw":
        """The law of factor * length: factor 1.1 makes every answer 10 % longer.

        Raises:
            InputError: factor is not positive.
        """
        if not factor > 0.0:
            raise InputError(f"factor must be positive, got {factor}")
        return SurvivalLaw(self.edges * factor, self.cumulative, self.tail_hazard / factor)

    def unit_survival(self, max_tokens: int) -> FloatArray:
        """P(length > t) for t = 0, 1, ..., max_tokens; shape (max_tokens + 1,)."""
        return self.survival(np.arange(max_tokens + 1))

    def quantile(self, fraction: float) -> float:
        """Tokens that a fraction of the answers does not exceed, 0 <= fraction < 1."""
        return float(self.quantiles(fraction))

    def quantiles(self, fractions: ArrayLike) -> FloatArray:
        """As ``quantile``, of any shape."""
        levels = -np.log1p(-np.asarray(fractions, dtype=np.float64))
        beyond = np.maximum(levels - self.cumulative[-1], 0.0) / self.tail_hazard
        return np.asarray(np.interp(levels, self.cumulative, self.edges) + beyond)


def geometric_law(mean_output_tokens: float) -> SurvivalLaw:
    """The law of a constant hazard 1 / mean.

    Raises:
        InputError: the mean is not above 1 token.
    """
    if not 1.0 < mean_output_tokens < inf:
        raise InputError(f"mean_output_tokens must be above 1, got {mean_output_tokens}")
    rate = -float(np.log1p(-1.0 / mean_output_tokens))
    return SurvivalLaw(np.array([0.0, 1.0]), np.array([0.0, rate]), rate)


@dataclass(frozen=True, slots=True, eq=False)
class LifeTable:
    """Ends and tokens at risk per cell of a shared grid; tables of several replicas add.

    Attributes:
        edges: int64, shape (cells + 1,), tokens.
        ended: float64, shape (cells,), answers that ended in the cell.
        exposure: float64, shape (cells,), tokens generated at those ages by answers that were under observation.
        at_risk: float64, shape (cells,), answers that could end in the cell: those under observation at its start, and
            half for each that came under observation or was last seen within it (the actuarial estimate).
    """

    edges: IntArray
    ended: FloatArray
    exposure: FloatArray
    at_risk: FloatArray

    def __add__(self, other: Self) -> Self:
        """Raises InputError when the grids differ."""
        if not np.array_equal(self.edges, other.edges):
            raise InputError("life tables on different grids do not add")
        return type(self)(
            self.edges, self.ended + other.ended, self.exposure + other.exposure, self.at_risk + other.at_risk
        )

    def constant_hazard(self) -> float | None:
        """sum(d) / sum(n): 1 / mean for a geometric length; None before the first end."""
        exposure = float(self.exposure.sum())
        return float(self.ended.sum()) / exposure if exposure and self.ended.any() else None

    def law(self, *, unseen: float = 0.0) -> SurvivalLaw | None:
        """Kaplan-Meier on the grid; None before the first end.

        S(e_g+1) = S(e_g) * (1 - d_g / n_g) with n_g the number at risk: the product-limit estimate itself at the edges,
        also where many answers have one length, such as a limit on tokens; the hazard is constant within a cell.

        Args:
            unseen: answers at risk besides in every cell, that end in none. 1 gives the upper survival function of
                nonparametric predictive inference (Coolen and Yan 2004): the most that these answers let the next one
                outlive.
        """
        if not self.ended.any():
            return None
        tail = float(-np.log1p(-self._tail_hazard()))
        steps = tail * np.diff(self.edges)
        seen = self.at_risk > 0
        steps[seen] = -np.log1p(-np.minimum(self.ended[seen] / (self.at_risk[seen] + unseen), MAX_HAZARD))
        cumulative = np.concatenate(([0.0], np.cumsum(steps)))
        return SurvivalLaw(self.edges.astype(np.float64), cumulative, tail)

    def _tail_hazard(self) -> float:
        """Hazard pooled over the cells that hold the last tenth of the ends."""
        from_here = np.cumsum(self.ended[::-1])[::-1]
        first = int(np.count_nonzero(from_here >= _TAIL_FRACTION * from_here[0])) - 1
        return min(float(self.ended[first:].sum() / self.exposure[first:].sum()), MAX_HAZARD)


def life_table(edges: IntArray, left_at: ArrayLike, ended: ArrayLike, entered_at: ArrayLike | None = None) -> LifeTable:
    """Count ends and tokens at risk.

    Args:
        edges: a ``length_grid``, shape (cells + 1,); lengths beyond it count in its last cell.
        left_at: shape (n,), tokens when a request ended or was last seen.
        ended: bool, shape (n,); False where it was only last seen (still running, aborted).
        entered_at: shape (n,), tokens at which observation began; 0 when None.
    """
    left = np.minimum(np.asarray(left_at, dtype=np.int64), edges[-1])
    died = np.asarray(ended, dtype=bool)
    cell = np.searchsorted(edges, np.maximum(left[died], 1), side="left") - 1
    counts = np.bincount(cell, minlength=len(edges) - 1).astype(np.float64)
    exposure, at_risk = _passed(np.sort(left), edges)
    at_risk -= 0.5 * _within(np.sort(left[~died]), edges)
    if entered_at is not None:
        entered = np.sort(np.minimum(np.asarray(entered_at, dtype=np.int64), left))
        exposure_before, not_yet = _passed(entered, edges)
        exposure -= exposure_before
        at_risk -= not_yet - 0.5 * _within(entered, edges)
    return LifeTable(edges, counts, np.maximum(exposure, counts), np.maximum(at_risk, counts))


def _passed(ages: IntArray, edges: IntArray) -> tuple[FloatArray, FloatArray]:
    """For each cell, the tokens that requests of these ages (sorted) have inside it, and how many requests are older
    than its start; shape (cells,) each."""
    not_older = ages.searchsorted(edges, side="right")
    older = len(ages) - not_older
    tokens = np.concatenate(([0], ages.cumsum()))[not_older] + edges * older
    return (tokens[1:] - tokens[:-1]).astype(np.float64), older[:-1].astype(np.float64)


def _within(ages: IntArray, edges: IntArray) -> IntArray:
    """How many of these ages, sorted, stand strictly between the edges of each cell; shape (cells,)."""
    return np.asarray(ages.searchsorted(edges[1:], side="left") - ages.searchsorted(edges[:-1], side="right"))


class MomentSums(NamedTuple):
    """Sums over completed requests, from which every moment follows; sums of several replicas add.

    With p prompt and o output tokens: resident and resident_sq sum (p + j) and (p + j)**2 over j = 1..o, the tokens a
    slot holds at each of the request's decode steps. Not integers: the squares of long contexts overflow 64 bits.
    """

    requests: int = 0
    prompt: float = 0.0
    output: float = 0.0
    prompt_sq: float = 0.0
    output_sq: float = 0.0
    cross: float = 0.0
    resident: float = 0.0
    resident_sq: float = 0.0

    @classmethod
    def of(cls, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> "MomentSums":
        """Sums over completed requests; both arrays have shape (n,)."""
        p = np.asarray(prompt_tokens, dtype=np.float64)
        o = np.asarray(output_tokens, dtype=np.float64)
        triangle = 0.5 * o * (o + 1.0)
        squares = triangle * (2.0 * o + 1.0) / 3.0
        cross = float(p @ o)
        return cls(
            requests=len(p),
            prompt=float(p.sum()),
            output=float(o.sum()),
            prompt_sq=float(p @ p),
            output_sq=float(o @ o),
            cross=cross,
            resident=cross + float(triangle.sum()),
            resident_sq=float((p * p) @ o + 2.0 * (p @ triangle) + squares.sum()),
        )

    def plus(self, other: "MomentSums") -> "MomentSums":
        return MomentSums(*map(operator.add, self, other))

    def moments(self) -> "LengthMoments | None":
        """None while nothing completed, or nothing with an output token."""
        if not self.output:
            return None
        mean_prompt, mean_output = self.prompt / self.requests, self.output / self.requests
        resident = self.resident / self.output
        return LengthMoments(
            requests=self.requests,
            mean_prompt_tokens=mean_prompt,
            mean_output_tokens=mean_output,
            var_prompt=max(0.0, self.prompt_sq / self.requests - mean_prompt**2),
            var_output=max(0.0, self.output_sq / self.requests - mean_output**2),
            covariance=self.cross / self.requests - mean_prompt * mean_output,
            mean_resident_tokens=resident,
            var_resident=max(0.0, self.resident_sq / self.output - resident**2),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthMoments:
    """Means in tokens, variances in tokens squared.

    mean_resident_tokens = E[O*L + O*(O+1)/2] / E[O]: what a slot holds at a random decode step, and so also the mean
    context of a decode token (ERRATA 1.4).
    """

    requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    var_prompt: float
    var_output: float
    covariance: float
    mean_resident_tokens: float
    var_resident: float

    @property
    def mean_total_tokens(self) -> float:
        return self.mean_prompt_tokens + self.mean_output_tokens

    @property
    def std_total_tokens(self) -> float:
        """sqrt(Var(in) + Var(out) + 2 Cov(in, out)) (ERRATA 1.3)."""
        return sqrt(max(0.0, self.var_prompt + self.var_output + 2.0 * self.covariance))

    @property
    def std_output_given_prompt(self) -> float:
        """sqrt(Var(out) - Cov^2 / Var(in)): what is left to chance once the prompt is known."""
        explained = self.covariance**2 / self.var_prompt if self.var_prompt else 0.0
        return sqrt(max(0.0, self.var_output - explained))

    @property
    def std_resident_tokens(self) -> float:
        return sqrt(self.var_resident)


class _Window:
    """The last ``size`` departures of one class, oldest overwritten first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._seen = 0
        self._prompt = np.zeros(size, dtype=np.int64)
        self._output = np.zeros(size, dtype=np.int64)
        self._step = np.zeros(size, dtype=np.int64)
        self._ended = np.zeros(size, dtype=bool)
        self._began_at_step: int | None = None
        self.count = 0  # of completions in the window
        self._sums: MomentSums | None = None  # of these, once somebody has asked

    def add(self, finished: FinishedRequest, step: int | None) -> None:
        row = self._seen % self.size
        if self._seen >= self.size:
            self._began_at_step = int(self._step[row])
            self.count -= bool(self._ended[row])
        self._prompt[row], self._output[row] = finished.prompt_tokens, finished.output_tokens
        self._step[row], self._ended[row] = step or 0, not finished.aborted
        self.count += not finished.aborted
        self._seen += 1
        self._sums = None

    def sums(self) -> MomentSums:
        if self._sums is None:
            self._sums = MomentSums.of(self._prompt[self._ended], self._output[self._ended])
        return self._sums

    def table(self, edges: IntArray, running_ages: IntArray, step: int | None) -> LifeTable:
        held = min(self._seen, self.size)
        left = np.concatenate((self._output[:held], running_ages))
        ended = np.concatenate((self._ended[:held], np.zeros(len(running_ages), dtype=bool)))
        if step is None or self._began_at_step is None:
            return life_table(edges, left, ended)
        seen_at = np.concatenate((self._step[:held], np.full(len(running_ages), step)))
        return life_table(edges, left, ended, np.maximum(0, left - (seen_at - self._began_at_step)))


class LengthStatistics:
    """Windows of one engine, one for each class. Memory is bounded by classes * window."""

    def __init__(self, *, classes: int = 1, window: int = 1000) -> None:
        """
        Args:
            classes: number of length classes; requests carry an index below it. With 1, any index counts as the one.
            window: departures remembered per class; 1000 keeps the relative error of a mean near 3 % at cv 1.
        """
        self._edges = length_grid(_MAX_OUTPUT_TOKENS)
        self._windows = tuple(_Window(window) for _ in range(classes))
        self._completed = 0
        self._step: int | None = 0

    @property
    def completed(self) -> int:
        """Completions in all windows."""
        return self._completed

    def stop_counting_steps(self) -> None:
        """For good: a decode step may bring a request several tokens, so windows are plain lists from now on."""
        self._step = None

    def rearrange(self, known_as: Sequence[int | None]) -> None:
        """Go on with other classes.

        Args:
            known_as: for each class the index that it had, None for one that is new. A class that is not among them is
                forgotten.
        """
        size = self._windows[0].size
        self._windows = tuple(_Window(size) if index is None else self._windows[index] for index in known_as)
        self._completed = sum(window.count for window in self._windows)

    def observe(self, result: StepResult) -> None:
        """Remember which requests departed with a step, and count them.

        Raises:
            InputError: a class_index is not below the number of classes.
        """
        for request in result.finished:
            window = self._window(request.class_index)
            before = window.count
            window.add(request, self._step)
            self._completed += window.count - before
        if self._step is not None:
            self._step += result.decode_requests > 0

    def count(self, class_index: int) -> int:
        return self._window(class_index).count

    def sums(self) -> MomentSums:
        """Over all classes."""
        total = MomentSums()
        for window in self._windows:
            total = total.plus(window.sums())
        return total

    def moments(self) -> LengthMoments | None:
        return self.sums().moments()

    def table(self, class_index: int, running_ages: ArrayLike | None = None) -> LifeTable:
        """Ends and exposure of one class in its window.

        Args:
            running_ages: output tokens of the requests of this class that run now, shape (n,); None takes those that
                departed alone, each from its first token.
        """
        window = self._window(class_index)
        if running_ages is None:
            return window.table(self._edges, np.empty(0, dtype=np.int64), None)
        return window.table(self._edges, np.asarray(running_ages, dtype=np.int64), self._step)

    def pooled_table(self, running_ages: ArrayLike) -> LifeTable:
        """All classes together; ``running_ages`` may hold requests of any class."""
        table = self.table(0, running_ages)
        for class_index in range(1, len(self._windows)):
            table = table + self.table(class_index)
        return table

    def _window(self, class_index: int) -> _Window:
        if len(self._windows) == 1:
            return self._windows[0]
        if not 0 <= class_index < len(self._windows):
            raise InputError(f"class_index must be in [0, {len(self._windows)}), got {class_index}")
        return self._windows[class_index]
