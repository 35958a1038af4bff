"""Step times of one engine, measured by batches made to order: all that fit, or as many as a budget of seconds allows.

Every batch is filled once. Its decodes are measured alone, then beside prefills of several sizes. What comes next is
what lies farthest from all that was measured, so that few batches span the whole range: each is first predicted by the
fit so far, and once that succeeds well enough, there is nothing left to learn.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from policies.engine.step_time import fit_step_times
from policies.errors import InputError
from policies.types import Phase, StepCoefficients, StepResult, StepTimes

SIZES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (64, 256, 1024, 4096)
PROMPTS = (32, 128, 512, 2048)
# The first steps of each load meet what is done once for a shape.
WARM_UP_STEPS = 2
# As many batches must have been predicted, the last ones, before anything is said of the fit's error.
PREDICTED_BATCHES = 3


class Engine(Protocol):
    """An engine that is stepped by hand, under the scheduler plug-in, without prefix caching."""

    scheduler: Any
    slots: int
    max_batch_tokens: int
    max_request_tokens: int
    cache_tokens: int

    def add(self, prompt_tokens: int, output_tokens: int) -> str: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def step(self) -> None: ...

    @property
    def busy(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` requests that decode at `context` tokens, and the prompts that are read beside them; 0: none is."""

    size: int
    context: int
    prompts: tuple[int, ...]

    def distance(self, other: "Batch") -> float:
        """The distance of the logarithms of sizes and contexts."""
        return math.dist((math.log(self.size), math.log(self.context)), (math.log(other.size), math.log(other.context)))


@dataclass(slots=True)
class Measured:
    """The median step of every load, and the model fitted to them."""

    steps: list[StepResult] = field(default_factory=list)

    def add(self, steps: Sequence[StepResult]) -> None:
        """The median by duration stands for all: what else the machine does must not bend the fit."""
        if steps:
            self.steps.append(median_step(steps))

    def times(self) -> StepTimes:
        """Raises InputError when a kind of step was not measured often enough."""
        return fit_step_times(self.steps)

    def explained_fraction(self, times: StepTimes) -> float:
        """R squared of the fit over all steps."""
        seconds = np.array([step.step_s for step in self.steps])
        left = seconds - np.array([fitted_s(times, step) for step in self.steps])
        return 1.0 - float((left**2).sum() / max(((seconds - seconds.mean()) ** 2).sum(), 1e-18))


def median_step(steps: Sequence[StepResult]) -> StepResult:
    """The lower one of an even number: stalls make steps longer, nothing makes them shorter."""
    return sorted(steps, key=lambda step: step.step_s)[(len(steps) - 1) // 2]


def fitted_s(times: StepTimes, step: StepResult) -> float:
    return times.step_s(
        prefill_tokens=step.prefill_tokens, decode_requests=step.decode_requests, kv_tokens=step.kv_tokens
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a calibration after a batch.

    Attributes:
        batch: the one just measured; the first has no requests that decode.
        total: batches that would be measured if none could be left out.
        left_s: until the end, at most, as far as the fit tells.
        times: the fit so far, once there is one.
        error_fraction: the mean relative error of predicted steps in the last few batches, of the kind of step for
            which it is greatest; None until there are as many.
    """

    batch: Batch
    done: int
    total: int
    took_s: float
    left_s: float
    times: StepTimes | None
    error_fraction: float | None


class _TimeIsUp(Exception):
    pass


class Calibration:
    """Measures one engine, which must be idle; `measured` grows with every load."""

    def __init__(self, engine: Engine, *, steps: int, seconds: float = math.inf, most_batch: int | None = None) -> None:
        """steps: measured of each load. seconds: budget for everything; only a step that runs is not cut off."""
        self.measured = Measured()
        self.batches: list[Batch] = []
        self._engine, self._steps, self._seconds = engine, steps, seconds
        self._todo = self._grid(most_batch)
        self._total = 1 + len(self._todo)
        self._recent_s: deque[float] = deque(maxlen=16)  # the longest of these says how long the next step may take
        self._added: list[str] = []  # ids of the requests of the batch that runs
        self._times: StepTimes | None = None
        self._errors: deque[dict[Phase, list[float]]] = deque(maxlen=PREDICTED_BATCHES)
        self._began_s = self._now_s()

    @property
    def contexts(self) -> list[int]:
        """The contexts at which decodes were measured."""
        return sorted({batch.context for batch in self.batches if batch.size})

    def run(self, error_fraction: float) -> Iterator[Progress]:
        """Until all is measured, the time is up, or steps are predicted within error_fraction."""
        self._began_s = self._now_s()
        batch: Batch | None = Batch(0, 0, self._prompts())
        while batch is not None:
            try:
                self._measure(batch)
            except _TimeIsUp:
                return
            self._fit()
            progress = self._progress(batch)
            yield progress
            if progress.error_fraction is not None and progress.error_fraction <= error_fraction:
                return
            batch = self._next()

    # What is measured

    def _grid(self, most_batch: int | None) -> list[Batch]:
        """All sizes and contexts, as far as slots, cache and the model's length go."""
        most = min(self._engine.slots - 1, most_batch or self._engine.slots)
        pairs = [(size, context) for size in SIZES if size <= most for context in CONTEXTS]
        return [
            Batch(size, context, (0, *self._prompts(size))) for size, context in pairs if self._has_room(size, context)
        ]

    def _prompts(self, beside: int = 0) -> tuple[int, ...]:
        """The sizes of prompts that fit into one step beside this many decodes."""
        most = min(self._engine.max_batch_tokens - beside, self._engine.max_request_tokens - 1)
        return tuple(prompt for prompt in PROMPTS if prompt <= most)

    def _has_room(self, size: int, context: int) -> bool:
        """For the tokens, too, that requests get while others are still read and while steps are measured."""
        filling = math.ceil(size * context / self._engine.max_batch_tokens)
        longest = context + filling + (1 + len(PROMPTS)) * (self._steps + WARM_UP_STEPS)
        # Blocks at the ends of contexts are part empty, and a full cache would preempt: so four fifths of it.
        fits = size * longest + PROMPTS[-1] <= 0.8 * self._engine.cache_tokens
        return fits and longest < self._engine.max_request_tokens

    def _next(self) -> Batch | None:
        """The one farthest from all that were measured, of those for which there is time."""
        left_s = self._left_s()
        share_s = left_s / 4  # at most for one batch: the least that can be fitted are three of different shape
        expected_s = {batch: self._expected_s(batch) for batch in self._todo}
        cheapest = min(self._todo, key=expected_s.__getitem__, default=None)
        if cheapest is None or expected_s[cheapest] > left_s:
            return None
        known = [batch for batch in self.batches if batch.size]
        fitting = [batch for batch in self._todo if expected_s[batch] <= share_s]
        chosen = cheapest
        if known and fitting:
            chosen = max(fitting, key=lambda batch: min(batch.distance(other) for other in known))
        self._todo.remove(chosen)
        return chosen

    # Measuring

    def _measure(self, batch: Batch) -> None:
        """Raises _TimeIsUp; loads that were measured to their end count."""
        engine, errors = self._engine, dict[Phase, list[float]]()
        output_tokens = engine.max_request_tokens - batch.context
        self.batches.append(batch)
        try:
            for _ in range(batch.size):
                self._add(batch.context, output_tokens)
            while engine.scheduler.waiting or engine.scheduler._inflight_prefills:
                self._step()
            for prompt in batch.prompts:
                self._compare(steps := self._load(batch.size, prompt), errors)
                self.measured.add(steps)
        finally:
            engine.abort(self._added)
            self._added.clear()
            while engine.busy:
                engine.step()
        if errors:
            self._errors.append(errors)

    def _load(self, size: int, prompt: int) -> list[StepResult]:
        """Steps with exactly this load.

        The plug-in estimates the context that decodes read, which is good enough while requests stay for many steps;
        here a prompt stays for one, so it is counted. What prompts of one step read of themselves would say little of
        chunks far into a long one: that is learned while serving.
        """
        scheduler, seen, kv_tokens = self._engine.scheduler, list[StepResult](), list[int]()
        decoding = [scheduler.requests[request_id] for request_id in self._added[:size]]
        scheduler.report()
        scheduler.on_step = seen.append
        try:
            for _ in range(WARM_UP_STEPS + self._steps):
                if prompt:
                    self._add(prompt, 1)
                kv_tokens.append(sum(request.num_computed_tokens for request in decoding))
                self._step()
            scheduler.report()
        finally:
            scheduler.on_step = None
        steps = [step._replace(kv_tokens=held, prefill_kv_tokens=0) for step, held in zip(seen, kv_tokens, strict=True)]
        return [step for step in steps[WARM_UP_STEPS:] if (step.prefill_tokens, step.decode_requests) == (prompt, size)]

    def _add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._added.append(self._engine.add(prompt_tokens, output_tokens))

    def _step(self) -> None:
        """Raises _TimeIsUp where one more step might pass the end."""
        began_s = self._now_s()
        if self._left_s() < max(self._recent_s, default=0.0):
            raise _TimeIsUp
        self._engine.step()
        self._recent_s.append(self._now_s() - began_s)

    def _compare(self, steps: Sequence[StepResult], errors: dict[Phase, list[float]]) -> None:
        """With what the fit so far would have said."""
        if self._times is None or not steps:
            return
        step = median_step(steps)
        kind = Phase.MIXED if step.prefill_tokens else Phase.DECODE
        errors.setdefault(kind, []).append(abs(fitted_s(self._times, step) / step.step_s - 1.0))

    # How it stands

    def _fit(self) -> None:
        try:
            self._times = self.measured.times()
        except InputError:  # not yet
            self._times = None

    def _progress(self, batch: Batch) -> Progress:
        return Progress(
            batch=batch,
            done=len(self.batches),
            total=self._total,
            took_s=self._now_s() - self._began_s,
            left_s=min(self._left_s(), sum(self._expected_s(each) for each in self._todo)),
            times=self._times,
            error_fraction=self._error_fraction(),
        )

    def _error_fraction(self) -> float | None:
        if len(self._errors) < PREDICTED_BATCHES:
            return None
        kinds = set(itertools.chain.from_iterable(self._errors))
        by_kind = ([error for batch in self._errors for error in batch.get(kind, ())] for kind in kinds)
        return max(float(np.mean(errors)) for errors in by_kind)

    def _expected_s(self, batch: Batch) -> float:
        """The time to fill and measure a batch, by the fit, or by prefills alone while there is none."""
        times = self._times or self._by_prefills()
        tokens, chunk = batch.size * batch.context, self._engine.max_batch_tokens
        filling_s = tokens / chunk * times.step_s(prefill_tokens=chunk)
        a_step_of_each_s = sum(
            times.step_s(prefill_tokens=prompt, decode_requests=batch.size, kv_tokens=tokens)
            for prompt in batch.prompts
        )
        return filling_s + (WARM_UP_STEPS + self._steps) * a_step_of_each_s

    def _by_prefills(self) -> StepTimes:
        """A decode is taken to cost no more than a token of a prompt."""
        alone = [step for step in self.measured.steps if not step.decode_requests]
        slope_s = overhead_s = 0.0
        if len(alone) > 1:
            fitted = np.polyfit([s.prefill_tokens for s in alone], [s.step_s for s in alone], deg=1)
            slope_s, overhead_s = np.maximum(fitted, 0.0).tolist()
        form = StepCoefficients(overhead_s=overhead_s, prefill_s=slope_s, decode_s=slope_s)
        return StepTimes(prefill=form, decode=form, mixed=form)

    def _now_s(self) -> float:
        return float(self._engine.scheduler.clock.now())

    def _left_s(self) -> float:
        return self._began_s + self._seconds - self._now_s()
