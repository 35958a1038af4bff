"""The engine's default policy: forecast admission, promised times per token, exclusive or mixed by cost.

A composition, not a new decision: what memory allows, then what promises allow, and the phase last, so that phases
wait for requests that the others would really let in. While a promised time per token binds steps, or a first token
could not wait for the end of a cycle, prefill and decode share steps: where the mean over a cycle would just have kept
the promise, phases cost up to two points of the requests in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from policies.checks import require_at_least, require_one_of
from policies.engine.answers import Answers
from policies.engine.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.plans import joined, narrowed_by, out_of_reach
from policies.engine.step_budget import StepBudget
from policies.engine.step_time import StepTimeConfig
from policies.engine.stock import Stock
from policies.errors import ConfigError
from policies.lengths.remaining import RemainingTokens
from policies.lengths.statistics import SurvivalLaw
from policies.types import BatchPolicy, BatchState, StepPlan, StepResult, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """The few settings that depend on the service; the rest are the parts' defaults.

    Attributes:
        mode: as in ``ExclusiveMixedConfig``.
        admission: "forecast" by survival, "slots" leaves memory to the engine.
        overflow_probability: of the forecast, as in ``ForecastAdmissionConfig``.
        overcommit: let the forecast admit more while preemptions cost less than they bring
            (``policies.engine.overcommit``).
        classes: as in ``ForecastAdmissionConfig``.
        step_times: measured earlier on this model and GPU, or None.
        speculates: a decode step may bring a request several tokens (speculative decoding).

    Raises:
        ConfigError: a value is out of bounds.
    """

    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    admission: Literal["forecast", "slots"] = "forecast"
    overflow_probability: float = ForecastAdmissionConfig().overflow_probability
    overcommit: bool = True
    classes: int = 1
    step_times: StepTimes | None = None
    speculates: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "classes")
        require_one_of(("forecast", "slots"), self, "admission")
        self.forecast()
        self.phases()

    def forecast(self) -> ForecastAdmissionConfig:
        return ForecastAdmissionConfig(
            overflow_probability=self.overflow_probability, classes=self.classes, speculates=self.speculates
        )

    def phases(self) -> ExclusiveMixedConfig:
        return ExclusiveMixedConfig(**self.of_phases())

    def of_phases(self) -> dict[str, Any]:
        """Keywords of ``ExclusiveMixedConfig``."""
        prior = StepTimeConfig(prior=self.step_times)
        return {"mode": self.mode, "step_times": prior, "speculates": self.speculates}


class Auto:
    """Every part at its default, composed.

    Attributes:
        admission: what memory allows.
        latency: what promised times per token allow.
        answers: what whole answers that are due by a time have left.
        phases: exclusive or mixed; its model of step times and its lengths are what others ask for.
    """

    def __init__(
        self, config: AutoConfig, learned: "Auto | None" = None, *, known_as: Sequence[int | None] | None = None
    ) -> None:
        """
        Args:
            learned: a policy whose statistics this one takes over; it must not be used any more.
            known_as: for each class its index in ``learned``, None for one that is new; None where all are the same.

        Raises:
            ConfigError: there are not as many classes as are known.
        """
        known = len(known_as) if known_as is not None else learned.config.classes if learned else config.classes
        if known != config.classes:
            raise ConfigError(f"of {config.classes} classes {known} are known: say with known_as what each was before")
        self.config: AutoConfig = config
        self.phases: ExclusiveMixed = self._phases(learned.phases if learned else None)
        self.admission: BatchPolicy = self._admission(learned.admission if learned else None, known_as)
        self.answers: Answers = self._answers(learned, known_as)
        self.latency: BatchPolicy = self._latency()

    def _phases(self, learned: ExclusiveMixed | None) -> ExclusiveMixed:
        return ExclusiveMixed(self.config.phases(), learned)

    def _admission(self, learned: BatchPolicy | None, known_as: Sequence[int | None] | None) -> BatchPolicy:
        if self.config.admission == "slots":
            return Stock()
        known = learned if isinstance(learned, ForecastAdmission) else None
        step_times = self.phases.model.recompute_times if self.config.overcommit else None
        return ForecastAdmission(self.config.forecast(), known, known_as=known_as, step_times=step_times)

    def _latency(self) -> BatchPolicy:
        return StepBudget(self.phases.model.times, self.answers)

    def _answers(self, learned: "Auto | None", known_as: Sequence[int | None] | None) -> Answers:
        if learned is None:
            return Answers(RemainingTokens(self.config.classes, speculates=self.config.speculates))
        if known_as is not None:
            learned.answers.remaining.rearrange(known_as)
        return learned.answers

    @property
    def law(self) -> SurvivalLaw | None:
        """Output lengths as they have been seen, of all classes; None before the first."""
        return self.phases.law()

    @property
    def overcommit(self) -> float:
        """Share admitted beyond the forecast; below 0 less than it."""
        return self.admission.overcommit.share if isinstance(self.admission, ForecastAdmission) else 0.0

    @property
    def strictest_s(self) -> float:
        """The promised time per token that binds steps; inf where none does."""
        return self.latency.strictest_s if isinstance(self.latency, StepBudget) else inf

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """Seconds of reading one prompt token, decodes in between included; None while not known."""
        return self.latency.seconds_per_token if isinstance(self.latency, StepBudget) else None

    def decode_price(self, kv_tokens: float) -> tuple[float, float] | None:
        """Seconds of a step of decodes besides their tokens, at that context in sum, and of each token of theirs,
        drafted or not; None while not known."""
        if (times := self.phases.model.times()) is None:
            return None
        decode = times.decode
        return decode.overhead_s + decode.kv_s * kv_tokens, decode.decode_s / decode.decode_tokens

    @property
    def media_price(self) -> float:
        """As of ``Encoding``."""
        times = self.phases.model.times()
        return 0.0 if times is None else times.media_price

    def answer_price(self, context_tokens: float) -> float:
        """As of ``Paced``: beside other requests."""
        times = self.phases.model.times()
        if times is None or times.mixed.prefill_s <= 0.0:
            return 0.0
        return (times.mixed.decode_s + times.mixed.kv_s * context_tokens) / times.mixed.prefill_s

    @property
    def believed_step_s(self) -> float | None:
        """Seconds that the step observed last was planned to take; None where nothing was believed of it."""
        return self.latency.believed_step_s if isinstance(self.latency, StepBudget) else None

    @property
    def step_errors(self) -> dict[str, Any]:
        """Of steps beside promises: shares by which they took longer than predicted, and what is added for it."""
        return self.latency.told_errors() if isinstance(self.latency, StepBudget) else {}

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``. A promise of a request that cannot be kept binds nothing either, and counts as missed."""
        return out_of_reach((self.admission, self.latency, self.phases))

    def plan(self, state: BatchState) -> StepPlan:
        plans = [self.admission.plan(state)]
        narrowed = narrowed_by(state, plans[0])
        plans.append(self.latency.plan(narrowed))
        if self._may_take_turns(state):
            plans.append(self.phases.plan(narrowed_by(narrowed, plans[1])))
        return joined(state, plans)

    def _may_take_turns(self, state: BatchState) -> bool:
        """Whether no time per token binds, and the next request can wait for the end of a cycle."""
        waits_s = state.waiting[0].deadline_s - state.now_s if state.waiting else inf
        return self.strictest_s == inf and not 0.0 <= waits_s < self.phases.cycle_s

    def observe(self, result: StepResult) -> None:
        self.latency.observe(result)
        self.admission.observe(result)
        self.phases.observe(result)
