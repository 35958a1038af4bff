"""Seconds of an engine step, learned while serving: one linear form for prefill, decode and mixed steps each.

Source: 003's T_iter = alpha + beta * tokens. Departures:

* A form per kind of step, classified by what the step held, because the fixed costs differ; the mixed form is fitted
  to iterations, never to 1/throughput, which already holds alpha / N (ERRATA 3.12).
* The context that decodes read has its own coefficient: a decode cost calibrated at one context over-predicts
  exclusive batching at longer ones (ERRATA 3.13).
* So has the context that chunks of prompts read: far into a long prompt a token costs several times the first.
* A pure prefill right after decodes also pays for the switch; that cost lands in the prefill form's overhead.
* A step that encodes images or sounds tells what a token of those takes, and nothing else.
* Decodes are counted by their tokens, drafted ones too; what is told is the time of a decode with its drafts.

The fit is recursive least squares with exponential forgetting in information form: the sums X'X and X'y decay, a prior
does not, so nothing blows up while a steady load excites no direction. Errors are relative, because the spread of a
step's time grows with the step, and are clipped at a multiple of their running median: a stall does not bend the line,
while a lasting shift moves the median and is followed.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from policies.checks import require_at_least
from policies.errors import ConfigError, InputError
from policies.types import FloatArray, Phase, StepCoefficients, StepResult, StepTimes

# Steps are absorbed in blocks: a solve per step would cost more than the step plan. The first ones are short, so that a
# kind of step is known early; later a fit that remembers hundreds of steps does not hang on the newest few.
_BLOCK = 8
_LATER_BLOCK = 128
_SHORT_BLOCKS = 16
# Reweighted solves of a block: each clips the residuals of the one before.
_PASSES = 3
# How many steps of typical size a prior weighs.
_PRIOR_STEPS = 4.0
# Residuals are clipped at this many median absolute deviations: three standard deviations of a normal law.
_CLIP_MADS = 3.0 * 1.4826
# Least clipping bound, relative: a noiseless past must not make the fit deaf.
_FLOOR = 0.05
# Keeps a fit without a prior solvable while its steps are all alike; relative to what was seen.
_FAINT = 1e-9
# Every step also says, with this weight, that prompts read 10 million tokens of context in the time of the prior, or in
# none: where prompts are short, that time is lost in noise, which a chunk far into a prompt would magnify.
_DOUBT = 0.01

_COLUMNS = {
    Phase.PREFILL: ("overhead_s", "prefill_s", "prefill_kv_s"),
    Phase.DECODE: ("overhead_s", "decode_s", "kv_s"),
    Phase.MIXED: ("overhead_s", "prefill_s", "decode_s", "kv_s", "interference_s", "prefill_kv_s"),
}
_ENCODED_MEMORY = 0.95  # of the steps before, in what encoding takes
_TOKENS_MEMORY = 0.02  # of the newest step, in the tokens of a decode
# Typical sizes, so that the columns of a fit are of one magnitude.
_SCALE = {"overhead_s": 1.0, "prefill_s": 1e3, "decode_s": 1e2, "kv_s": 1e5, "interference_s": 1e2, "prefill_kv_s": 1e7}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeConfig:
    """How step times are learned.

    Attributes:
        prior: coefficients to start from, or None.
        forgetting: weight of a step relative to the next one; 0.998 remembers about 500 steps of a kind.
        min_steps: steps of a kind before its form counts as measured.

    Raises:
        ConfigError: a value is out of bounds.
    """

    prior: StepTimes | None = None
    forgetting: float = 0.998
    min_steps: int = 16

    def __post_init__(self) -> None:
        if not 0.5 < self.forgetting <= 1.0:
            raise ConfigError(f"forgetting must be in (0.5, 1], got {self.forgetting}")
        require_at_least(1, self, "min_steps")


def _median(values: FloatArray) -> float:
    """Median of a block of steps: numpy's own takes ten times as long on so few, within the step."""
    return float(statistics.median(values.tolist()))


class _Form:
    """One linear form under forgetting; columns are scaled to one magnitude inside."""

    def __init__(self, phase: Phase, prior: StepCoefficients | None, config: StepTimeConfig) -> None:
        self._names = _COLUMNS[phase]
        self._scale = np.array([_SCALE[name] for name in self._names])
        self._bounded = np.array([name != "interference_s" for name in self._names])
        self._config = config
        self.steps = 0
        self._spread: float | None = None
        self._rows: list[tuple[float, ...]] = []
        self._seconds: list[float] = []
        self._known = prior is not None
        start = np.array([getattr(prior, name) if prior else 0.0 for name in self._names]) * self._scale
        strength = _PRIOR_STEPS / max(float(start.sum()), 1e-9) ** 2 if prior else _FAINT
        self._unit = np.eye(len(self._names))
        self._ridge = strength * self._unit
        self._start, self._doubt = start, np.array([_DOUBT * (name == "prefill_kv_s") for name in self._names])
        self._anchor: FloatArray = strength * start
        self._information = np.zeros_like(self._ridge)
        self._moment = np.zeros(len(self._names))
        self._solution: FloatArray | None = None  # of these sums, once somebody has asked
        self._fitted: StepCoefficients | None = None

    def add(self, row: tuple[float, ...], step_s: float) -> None:
        self.steps += 1
        self._rows.append(row)
        self._seconds.append(step_s)
        if len(self._rows) == (_BLOCK if self.steps <= _SHORT_BLOCKS * _BLOCK else _LATER_BLOCK):
            self._absorb(np.array(self._rows) / self._scale, np.array(self._seconds))
            self._rows.clear()
            self._seconds.clear()

    def _absorb(self, x: FloatArray, y: FloatArray) -> None:
        """x: scaled rows, shape (steps, columns); y: seconds, shape (steps,)."""
        decay = self._config.forgetting ** len(y)
        old_information, old_moment = decay * self._information, decay * self._moment
        fitted = x @ self._scaled() if self._known else y
        floor_s = _FLOOR * _median(y)  # keeps one absurdly short step from outweighing all others
        for _ in range(_PASSES):
            unit = np.maximum(fitted, floor_s)
            row = x / unit[:, None]
            information = old_information + row.T @ row
            moment = old_moment + row.T @ (fitted / unit + self._clipped((y - fitted) / unit))
            solution = self._solve(information, moment)
            fitted = x @ solution
        self._spread = self._blended_spread((y - fitted) / unit)
        self._become(information, moment)
        self._solution = solution

    def _become(self, information: FloatArray, moment: FloatArray) -> None:
        self._information, self._moment, self._known = information, moment, True
        self._solution = self._fitted = None

    def take_all(self, x: FloatArray, y: FloatArray) -> None:
        """Fit to these steps alone, each with the same relative weight; x: rows, shape (steps, columns)."""
        row = x / self._scale / y[:, None]
        self.steps = len(y)
        self._become(row.T @ row, row.sum(axis=0))

    def _clipped(self, residual: FloatArray) -> FloatArray:
        bound = max(_CLIP_MADS * self._blended_spread(residual), _FLOOR)
        return np.asarray(np.minimum(np.maximum(residual, -bound), bound))

    def _blended_spread(self, residual: FloatArray) -> float:
        """Median absolute deviation of the relative residuals: this block's, blended into what was seen before."""
        now = _median(np.abs(residual))
        return now if self._spread is None else 0.8 * self._spread + 0.2 * now

    def _solve(self, information: FloatArray, moment: FloatArray) -> FloatArray:
        """Scaled coefficients under the constraint that only interference_s may be negative. A step that the fit gave
        no time at all, or less, would outweigh all others and then be clipped to what the fit said."""
        doubt = float(information[0, 0]) * self._doubt  # the overhead's column is 1 in every step
        a, b = self._regular(information) + np.diag(doubt), moment + self._anchor + doubt * self._start
        theta = np.asarray(np.linalg.solve(a, b), dtype=np.float64)
        keep = np.ones(len(theta), dtype=bool)
        while (bounded := np.where(self._bounded, theta, 0.0)).min() < 0.0:
            keep[int(bounded.argmin())] = False
            theta = np.zeros(len(keep))
            theta[keep] = np.linalg.solve(a[np.ix_(keep, keep)], b[keep])
        return theta

    def _scaled(self) -> FloatArray:
        """Scaled coefficients of the fit so far."""
        if self._solution is None:
            self._solution = self._solve(self._information, self._moment)
        return self._solution

    def _regular(self, information: FloatArray) -> FloatArray:
        """The sums with the prior and a trace of ridge, which keeps them invertible at any magnitude."""
        faint = _FAINT * float(information.trace()) / len(information)
        return np.asarray(information + self._ridge + faint * self._unit)

    def coefficients(self) -> StepCoefficients:
        """The fit so far."""
        if self._fitted is None:
            theta = self._scaled() / self._scale
            self._fitted = StepCoefficients(**dict(zip(self._names, theta.tolist(), strict=True)))
        return self._fitted


class StepTimeModel:
    """Step times of one engine: a prior, what was observed, or both. Memory does not grow.

    Attributes:
        tokens_per_decode: that a decode takes into a step in the mean, drafts included.
        encoder_s: seconds of encoding a token of images or sounds; 0 before any was.
    """

    def __init__(self, config: StepTimeConfig | None = None) -> None:
        self.config = config or StepTimeConfig()
        self.tokens_per_decode = 1.0
        self._encoded_s = self._encoded_tokens = 0.0
        prior = self.config.prior
        self._forms = {
            phase: _Form(phase, getattr(prior, phase.value) if prior else None, self.config) for phase in Phase
        }

    def observe(self, result: StepResult) -> None:
        """Learn from one step, unless it says nothing (``StepResult.tells_time``)."""
        if not result.tells_time:
            return
        if result.encoder_tokens:
            self._note_encoded(result)
            return
        kind, row = _row(result)
        self._forms[kind].add(row, result.step_s)
        if result.draft_tokens or self.tokens_per_decode != 1.0 and result.decode_requests:
            now = result.decode_tokens / result.decode_requests
            self.tokens_per_decode += _TOKENS_MEMORY * (now - self.tokens_per_decode)

    @property
    def encoder_s(self) -> float:
        return self._encoded_s / self._encoded_tokens if self._encoded_tokens else 0.0

    def _note_encoded(self, result: StepResult) -> None:
        """What the step took beyond what it would have without."""
        if (times := self.times()) is None:
            return
        without_s = times.step_s(
            prefill_tokens=result.prefill_tokens,
            decode_requests=result.decode_tokens / self.tokens_per_decode,
            kv_tokens=result.kv_tokens,
            prefill_kv_tokens=result.prefill_kv_tokens,
        )
        self._encoded_s = _ENCODED_MEMORY * self._encoded_s + max(0.0, result.step_s - without_s)
        self._encoded_tokens = _ENCODED_MEMORY * self._encoded_tokens + result.encoder_tokens

    def measured(self, kind: Phase) -> bool:
        """Whether it has seen enough steps that held only prefill, only decodes, or both."""
        return self._forms[kind].steps >= self.config.min_steps

    def recompute_times(self) -> StepTimes | None:
        """As ``times``, but None while it is not known what a prompt costs: before enough steps have held one."""
        known = self.config.prior is not None or self.measured(Phase.PREFILL) or self.measured(Phase.MIXED)
        return self.times() if known else None

    def times(self) -> StepTimes | None:
        """The three forms as they stand; None while there is neither a prior nor one measured kind.

        A kind not measured yet keeps the prior, or borrows: prefill and decode their part of the mixed form, mixed the
        larger overhead and the slopes of the two.
        """
        known = {phase: form.coefficients() for phase, form in self._forms.items() if self.measured(phase)}
        prior = self.config.prior
        if prior:
            known = {phase: known.get(phase, getattr(prior, phase.value)) for phase in Phase}
        if not known:
            return None
        times = _complete(known)
        if self.tokens_per_decode != 1.0:
            times = _of_decodes(times, self.tokens_per_decode)
        return replace(times, encoder_s=self.encoder_s) if self._encoded_tokens else times


def _of_decodes(times: StepTimes, tokens: float) -> StepTimes:
    """Of decodes that take so many tokens each."""
    decode, mixed = (
        replace(form, decode_s=tokens * form.decode_s, decode_tokens=tokens) for form in (times.decode, times.mixed)
    )
    return StepTimes(prefill=times.prefill, decode=decode, mixed=mixed)


def _row(result: StepResult) -> tuple[Phase, tuple[float, ...]]:
    """What kind of step it was, and its row in that kind's form."""
    p, d, kv = float(result.prefill_tokens), float(result.decode_tokens), float(result.kv_tokens)
    read = float(result.prefill_kv_tokens)
    if not d:
        return Phase.PREFILL, (1.0, p, read)
    if not p:
        return Phase.DECODE, (1.0, d, kv)
    return Phase.MIXED, (1.0, p, d, kv, p * d / (p + d), read)


def fit_step_times(results: Sequence[StepResult]) -> StepTimes:
    """Least squares of relative errors over all results at once: for measurements made on purpose, not while serving.

    Raises:
        InputError: there are not at least 3 steps that took time of pure prefill and of pure decode.
    """
    rows: dict[Phase, list[tuple[float, ...]]] = {phase: [] for phase in Phase}
    seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
    for result in results:
        if result.tells_time:
            kind, row = _row(result)
            rows[kind].append(row)
            seconds[kind].append(result.step_s)
    if min(len(seconds[Phase.PREFILL]), len(seconds[Phase.DECODE])) < 3:
        raise InputError("a fit needs at least 3 prefill steps and 3 decode steps")
    known: dict[Phase, StepCoefficients] = {}
    for kind in Phase:
        if len(seconds[kind]) >= 3:
            form = _Form(kind, None, StepTimeConfig())
            form.take_all(np.array(rows[kind]), np.array(seconds[kind]))
            known[kind] = form.coefficients()
    return _complete(known)


def _complete(known: dict[Phase, StepCoefficients]) -> StepTimes:
    mixed = known.get(Phase.MIXED) or joined(known.get(Phase.PREFILL), known.get(Phase.DECODE))
    prefill = known.get(Phase.PREFILL) or StepCoefficients(
        overhead_s=mixed.overhead_s, prefill_s=mixed.prefill_s, prefill_kv_s=mixed.prefill_kv_s
    )
    decode = known.get(Phase.DECODE) or StepCoefficients(
        overhead_s=mixed.overhead_s, decode_s=mixed.decode_s, kv_s=mixed.kv_s
    )
    return StepTimes(prefill=prefill, decode=decode, mixed=mixed)


def joined(prefill: StepCoefficients | None, decode: StepCoefficients | None) -> StepCoefficients:
    """The mixed form where none was measured: both slopes, and the larger overhead."""
    p, d = prefill or StepCoefficients(overhead_s=0.0), decode or StepCoefficients(overhead_s=0.0)
    return StepCoefficients(
        overhead_s=max(p.overhead_s, d.overhead_s),
        prefill_s=p.prefill_s,
        decode_s=d.decode_s,
        kv_s=d.kv_s,
        prefill_kv_s=p.prefill_kv_s,
    )
