"""Admission by forecast: start a request only if the tokens held are safe at every horizon.

Source: 001's chance constraint (eq. 2) on the tokens held, with 003's survival curve of the output length in place of
the steady-state sum of final sizes (eq. 7). For every horizon tau on a grid, in decode steps,

    sum_i P_i(tau) m_i(tau) + z sqrt(sum_i P_i(tau) (1 - P_i(tau)) m_i(tau)^2) <= capacity

with P_i(tau) the probability that request i, at its age, still runs tau steps later and m_i(tau) = prompt + age + tau
the tokens it then holds. The sum runs over the batch and over the candidates, in queue order. Departures:

* Left of the sign stands at most what would be held if none ended, sum_i m_i(tau). The bound by mean and variance
  puts it higher at the first horizons where few run, for so few are far from normal: with a dozen it kept twice the
  reserve that was needed, and not where it was needed.
* Prompts are known at admission: they enter with their own length and carry no variance (ERRATA 1.3).
* What is resident follows from ages and survival, so no steady state is assumed: eq. 8 is unsafe for a coefficient of
  variation above 1 and wasteful below (ERRATA 1.4), and sizes measured on a young batch over-admit (1.8).
* Laws are estimates. Each cell of one has an answer more at risk, which outlives it, so that what was not seen in n
  answers is taken for one in n + 1; and the spread grows by sqrt(1 + b/n), for the mean of n answers errs as much as
  they scatter, and by the same for all b requests. Both vanish as answers come. Without, a cache for 20 requests
  overflowed at the worst horizon with up to 0.088 where 0.05 was accepted, and with up to 0.041 at 0.01.
* Laws are stretched by ``length_bias``: too long an estimate costs little, one half too short collapses.
* Without enough samples all are taken to live 24 steps longer: eq. 12 on a prior four times too long was measured to
  leave half of a small cache empty.
* Blocks shared through a prefix cache are held once: prompts of the batch are scaled so that the tokens it holds now
  are those the block pool reports, and prompts that come are taken to share as much. What the pool reports beyond the
  batch's own is no capacity, but for what a candidate holds already.
* A cap that binds stands for twelve steps, or until one in 24 has left the batch, and slots that come free stay empty
  so long: that loses next to nothing (docs/measurements/scheduler.md).
* A plan without a cap stands for as many steps as the cache has room for, even if every slot is filled.

Limits: requests admitted later are not foreseen (each is checked when its turn comes), lengths are taken for
independent, and a cap that is not filled at once serves the head of the queue while it stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from policies.checks import require_at_least, require_positive, require_probability
from policies.engine.overcommit import Overcommit
from policies.engine.plans import (
    STANDING_SHARE,
    STANDING_STEPS,
    capped_plan,
    unshared_fraction,
)
from policies.errors import InputError
from policies.lengths.statistics import LengthStatistics, SurvivalLaw
from policies.types import (
    BatchState,
    BoolArray,
    FloatArray,
    IntArray,
    Limit,
    RequestView,
    StepPlan,
    StepResult,
    StepTimes,
)

# Cells of ages: an age is told within some 3 %, less than a law is known by.
_AGE_CELLS = 64
# Steps for which a cap that binds stands: fewer than other plans, for slots of those that leave stay empty meanwhile.
_REVIEW_STEPS = 12
# Steps that every request is taken to live on while nothing is known of lengths: admitting all that fits preempts at
# once, and a prior of whole answers leaves half of a small cache empty.
_UNKNOWN_STEPS = 24
# The horizons end where a law has ended but for this share: later horizons never bind.
_LONGEST = 0.999


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastAdmissionConfig:
    """Survival-forecast admission.

    Attributes:
        overflow_probability: chance allowed per horizon that the tokens held exceed the capacity. In simulation 0.05
            preempts 1 request in 20 at the least cache and none at a larger one, and 0.01 costs 3 % of throughput.
        length_bias: factor on every length law, 1 is unbiased.
        classes: number of length classes; with 1, indices are ignored.
        min_samples: completions, over all classes, below which no law is used. Few will do, for the law has those that
            still run in it, with what they have generated.
        min_class_samples: completions of a class below which it has the law of all classes.
        window: departures remembered per class.
        horizons: points of the horizon grid.
        refresh_steps: most steps between two refreshes of a class's law, fewer while fewer completions are known; one
            class is refreshed at a time.
        speculates: a decode step may bring a request several tokens: lengths are then learned without counting steps.

    Raises:
        ConfigError: a value is out of bounds.
    """

    overflow_probability: float = 0.05
    length_bias: float = 1.1
    classes: int = 1
    min_samples: int = 8
    min_class_samples: int = 32
    window: int = 1000
    horizons: int = 28
    refresh_steps: int = 128
    speculates: bool = False

    def __post_init__(self) -> None:
        require_probability(self, "overflow_probability")
        require_positive(self, "length_bias")
        require_at_least(1, self, "classes", "min_samples", "min_class_samples", "window", "refresh_steps")
        require_at_least(2, self, "horizons")


class ForecastAdmission:
    """Admits the longest prefix of the queue that is safe at every horizon. Never holds back the only request."""

    def __init__(
        self,
        config: ForecastAdmissionConfig,
        learned: "ForecastAdmission | None" = None,
        *,
        known_as: Sequence[int | None] | None = None,
        step_times: Callable[[], StepTimes | None] | None = None,
    ) -> None:
        """With ``step_times``, what preemptions cost and bring is weighed up (``Overcommit``); it gives None while it
        is not known what a prompt costs. learned: one whose lengths this one takes over; it must not be used any more.
        known_as: for each class its index there, None for one that is new; None where its classes are the same.
        """
        self.config = config
        self._step_times = step_times
        self.overcommit: Overcommit = learned.overcommit if learned and step_times else Overcommit()
        self._held_back = False
        self._lengths: LengthStatistics = (
            learned._lengths if learned else LengthStatistics(classes=config.classes, window=config.window)
        )
        if learned and known_as is not None:
            self._lengths.rearrange(known_as)
        if config.speculates:
            self._lengths.stop_counting_steps()
        self._survival = _SurvivalTable(config.classes, config.horizons)
        self._safety_factor = NormalDist().inv_cdf(1.0 - config.overflow_probability)
        self._refreshes = 0
        self._steps_to_refresh = 0

    @property
    def uses_forecast(self) -> bool:
        """False while there are too few samples."""
        return self._lengths.completed >= self.config.min_samples

    def plan(self, state: BatchState) -> StepPlan:
        if self.uses_forecast:
            self._refresh(state)
        elsewhere = _held_elsewhere(state)
        if steps := self._steps_of_room(state, elsewhere):
            return capped_plan(state, state.slots, Limit.SLOTS, steps=steps)
        candidates = state.waiting[: state.free_slots]
        safe, next_fits = self._fitting(state, candidates, elsewhere) if candidates else (0, False)
        self._held_back |= next_fits
        if safe == len(candidates):
            return capped_plan(state, state.slots, Limit.SLOTS)
        cap = state.running_count + safe
        departures = max(0, floor(STANDING_SHARE * cap) - 1)
        return capped_plan(state, cap, Limit.MEMORY, steps=_REVIEW_STEPS, departures=departures)

    def _steps_of_room(self, state: BatchState, elsewhere: int) -> int:
        """Steps in which any request could start: a step computes no more tokens than its budget, as
        many come from the cache, and one prompt may be begun that is computed later."""
        if state.max_model_len is None or not self.uses_forecast:
            return 0
        budget = state.max_batch_tokens
        room = state.capacity_tokens - elsewhere - state.max_model_len - budget
        if room < state.running.total_tokens + budget:
            return 0
        return max(0, min(STANDING_STEPS, int(room - self._largest_load(state)) // budget))

    def _largest_load(self, state: BatchState) -> float:
        """Tokens that are not exceeded at any horizon by the batch and what as many as there are slots generate
        besides, at the accepted chance."""
        load = self._load(state, 1.0)
        later = load.plus(self._survival.growth().times(state.slots))
        return float(self._likely(later).max()) + state.slots * state.block_size

    def observe(self, result: StepResult) -> None:
        self._steps_to_refresh -= 1
        self._lengths.observe(result)
        if self._step_times is not None and self.uses_forecast:
            self._weigh(result, self._step_times)

    def _weigh(self, result: StepResult, step_times: Callable[[], StepTimes | None]) -> None:
        self.overcommit.observe(result)
        if self.overcommit.due:
            self.overcommit.move(step_times(), binding=self._held_back)
            self._held_back = False

    def _refresh(self, state: BatchState) -> None:
        """Rebuild what is due: every class at first, afterwards one class at a time."""
        if self._refreshes and self._steps_to_refresh > 0:
            return
        classes = self.config.classes
        for class_index in (self._refreshes % classes,) if self._refreshes else range(classes):
            self._learn(state, class_index)
        self._refreshes += 1
        self._steps_to_refresh = max(1, min(self.config.refresh_steps, self._lengths.completed) // classes)

    def _learn(self, state: BatchState, class_index: int) -> None:
        running = state.running
        if self._lengths.count(class_index) >= self.config.min_class_samples:
            mine = running.class_index == class_index if self.config.classes > 1 else slice(None)
            ages = running.output_tokens[mine]
            table = self._lengths.table(class_index, ages)
        else:
            table = self._lengths.pooled_table(running.output_tokens)
        seen, coming = table.law(), table.law(unseen=1.0)
        if seen is not None and coming is not None:
            bias = self.config.length_bias
            longest = bias * min(seen.quantile(_LONGEST), seen.edges[-1])
            self._survival.learn(class_index, coming.stretched(bias), longest)

    def _fitting(self, state: BatchState, candidates: Sequence[RequestView], elsewhere: int) -> tuple[int, bool]:
        """How many candidates, from the head of the queue, are within the capacity at every horizon, and whether the
        next one would fit now. elsewhere: tokens in blocks that no request of the batch holds."""
        unshared = unshared_fraction(state)
        alone = self._survival.loads(*_columns(candidates), self._held(candidates, unshared, state.block_size))
        load = self._load(state, unshared).plus(alone.added_up())
        # A cache that has come before its request starts is among those elsewhere until then.
        cached = np.cumsum([candidate.cached_tokens for candidate in candidates])
        capacity = state.capacity_tokens - np.maximum(0.0, elsewhere - cached)
        fits = self._fit(load, capacity)
        safe = len(candidates) if fits.all() else int(fits.argmin())
        return safe, safe < len(candidates) and bool(load.mean[safe, 0] <= capacity[safe])

    def _load(self, state: BatchState, unshared: float) -> "_Load":
        """What the batch holds; half a block of each request is not filled."""
        running = state.running
        held = unshared * running.prompt_tokens + (running.output_tokens + 0.5 * state.block_size)
        return self._survival.load(running.class_index, running.output_tokens, held)

    def _held(self, candidates: Sequence[RequestView], unshared: float, block_size: int) -> FloatArray:
        """Tokens that each holds once its prompt is computed, shape (candidates,)."""
        return np.array([unshared * one.prompt_tokens + one.output_tokens + 0.5 * block_size for one in candidates])

    def _fit(self, loads: "_Load", capacity_tokens: FloatArray) -> BoolArray:
        """Whether each load is within its capacity now, when there is no more than there is, and within it and what is
        admitted beyond it at every horizon; shape (loads,)."""
        most = np.minimum(self._likely(loads), loads.at_most(self._survival.horizons)).max(axis=1)
        within = most <= capacity_tokens * (1.0 + self.overcommit.share)
        return np.asarray(within & (loads.mean[:, 0] <= capacity_tokens))

    def _likely(self, loads: "_Load") -> FloatArray:
        """Tokens that each load exceeds at each horizon with the accepted chance, shape (loads, horizons)."""
        doubt = 1.0 + loads.requests / max(1, self._lengths.completed)
        return np.asarray(loads.mean + self._safety_factor * np.sqrt(doubt * loads.variance))


def _columns(candidates: Sequence[RequestView]) -> tuple[IntArray, IntArray]:
    """Class and age of each."""
    return (
        np.array([one.class_index for one in candidates], dtype=np.int64),
        np.array([one.output_tokens for one in candidates], dtype=np.int64),
    )


def _held_elsewhere(state: BatchState) -> int:
    """Tokens in blocks that no request of the batch holds: of sessions that wait for their next input, of caches on
    their way here or to be fetched from here, of answers whose last token is in flight. They are taken to stay."""
    counted = state.running.computed_tokens + state.running_count * state.block_size // 2
    return max(0, state.capacity_tokens - state.free_tokens - counted)


class _Load(NamedTuple):
    """Tokens that groups of requests hold at each horizon.

    Attributes:
        mean, variance: shape (groups, horizons) each.
        requests: how many are in each group, shape (groups, 1).
    """

    mean: FloatArray
    variance: FloatArray
    requests: FloatArray

    def plus(self, other: "_Load") -> "_Load":
        return _Load(self.mean + other.mean, self.variance + other.variance, self.requests + other.requests)

    def times(self, count: int) -> "_Load":
        return _Load(count * self.mean, count * self.variance, count * self.requests)

    def added_up(self) -> "_Load":
        """Cumulative sums over the groups: the first, the first two, and so on."""
        return _Load(*(np.cumsum(part, axis=0) for part in self))

    def at_most(self, steps: FloatArray) -> FloatArray:
        """Tokens that they hold after these steps if no request ends."""
        return np.asarray(self.mean[:, :1] + self.requests * steps)


class _SurvivalTable:
    """P = P(alive at a horizon | age) per class, precomputed on a grid of ages and horizons.

    Layout: row class * ages + age cell; columns P at every horizon, then P * (1 - P) at every horizon. Both grids end
    where the longest law has all but ended. Ages are quadratic, dense where answers are young, and rounded down to
    their cell, beyond the grid to its last one. Horizons are denser still at their start: there a batch of some 80
    peaks, within the few steps in which it may be that none ends.
    """

    def __init__(self, classes: int, horizons: int) -> None:
        self._laws: list[SurvivalLaw | None] = [None] * classes
        self._longest = [0.0] * classes
        self._points = horizons
        self._lay_grids(_UNKNOWN_STEPS)

    @property
    def end(self) -> int:
        """The last horizon, decode steps."""
        return self._end

    @property
    def horizons(self) -> FloatArray:
        """Decode steps from now, the first 0."""
        return self._horizons

    def learn(self, class_index: int, law: SurvivalLaw, longest_tokens: float) -> None:
        """Take a class's law, and where answers have all but ended; the grids follow when the longest has become much
        longer or shorter."""
        self._laws[class_index], self._longest[class_index] = law, longest_tokens
        longest = max(self._longest)
        if not 0.8 * self._end <= longest <= self._end:
            self._lay_grids(ceil(1.1 * longest))
        else:
            self._fill(class_index, law)

    def _lay_grids(self, end: int) -> None:
        self._end = end
        self._horizons = end * np.linspace(0.0, 1.0, self._points) ** 2.5
        self._ages = np.unique((end * np.linspace(0.0, 1.0, _AGE_CELLS) ** 2).astype(np.int64))
        self._cell = np.searchsorted(self._ages, np.arange(end + 1), side="right") - 1
        self._table = np.zeros((len(self._laws) * len(self._ages), 2 * self._points))
        self._table[:, : self._points] = 1.0
        for class_index, law in enumerate(self._laws):
            if law is not None:
                self._fill(class_index, law)

    def _fill(self, class_index: int, law: SurvivalLaw) -> None:
        alive = law.alive(self._ages[:, None], self._horizons[None, :])
        first = class_index * len(self._ages)
        self._table[first : first + len(self._ages)] = np.hstack((alive, alive * (1.0 - alive)))

    def load(self, class_index: IntArray, ages: IntArray, held: FloatArray) -> _Load:
        """Tokens that a batch holds at each horizon.

        Args:
            class_index, ages, held: of each request, shape (n,); held: tokens it holds now.

        Raises:
            InputError: a class_index is not below the number of classes.
        """
        row, rows = self._row(class_index, ages), len(self._table)
        # Requests of one row differ in what they hold alone, so the table is gone through once and not for each.
        powers = np.array([np.bincount(row, power, rows) for power in (None, held, held * held)]) @ self._table
        tau, n = self._horizons, len(self._horizons)
        doubt = powers[:, n:]
        mean, variance = powers[1, :n] + tau * powers[0, :n], doubt[2] + tau * (2.0 * doubt[1] + tau * doubt[0])
        return _Load(mean[None], variance[None], np.full((1, 1), float(len(ages))))

    def loads(self, class_index: IntArray, ages: IntArray, held: FloatArray) -> _Load:
        """As ``load``, of each request by itself: a group of one."""
        rows, n = self._table[self._row(class_index, ages)], len(self._horizons)
        later = held[:, None] + self._horizons
        return _Load(rows[:, :n] * later, rows[:, n:] * later * later, np.ones((len(ages), 1)))

    def _row(self, class_index: IntArray, ages: IntArray) -> IntArray:
        cell = self._cell.take(ages, mode="clip")
        if len(self._laws) == 1:
            return cell
        if class_index.max(initial=0) >= len(self._laws):
            raise InputError(f"class_index must be below {len(self._laws)}, got {class_index.max()}")
        return np.asarray(cell + class_index * len(self._ages))

    def growth(self) -> _Load:
        """Tokens of its answer that a request which starts now holds; of the classes the one where that is most."""
        young, tau, n = self._table[:: len(self._ages)].max(axis=0, keepdims=True), self._horizons, len(self._horizons)
        return _Load(young[:, :n] * tau, young[:, n:] * tau * tau, np.ones((1, 1)))
