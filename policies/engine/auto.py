"""The engine's default policy: forecast admission, promised times per token, exclusive or mixed by cost.

A composition, not a new decision: what memory allows, then what promises allow, and the phase last, so that phases
wait for requests that the others would really let in. While a promised time per token binds steps, or a first token
could not wait for the end of a cycle, prefill and decode share steps: where the mean over a cycle would just have kept
the promise, phases cost up to two points of the requests in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from policies.checks import require_at_least, require_one_of, require_positive
from policies.engine.exclusive import ExclusiveMixed
from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.plans import joined, narrowed_by
from policies.engine.step_budget import StepBudget
from policies.engine.step_time import StepTimeConfig
from policies.engine.stock import Stock
from policies.errors import ConfigError
from policies.lengths.statistics import SurvivalLaw
from policies.papers.chunk_size import ChunkSize, ChunkSizeConfig
from policies.papers.exclusive_mixed_literal import ExclusiveMixedLiteral, ExclusiveMixedLiteralConfig
from policies.papers.memory_aware import MemoryAware, MemoryAwareConfig
from policies.papers.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.papers.smallest import Smallest
from policies.types import BatchState, StepPlan, StepResult, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """The few settings that depend on the service; the rest are the parts' defaults.

    Attributes:
        mode: "auto", "exclusive" or "mixed".
        admission: "forecast" by survival, "memory_aware" is Algorithm 1, "slots" leaves memory to the engine.
        memory_form, memory_basis: ``form`` and ``basis`` of ``MemoryAwareConfig``; go with "memory_aware".
        prior_output_tokens: mean and standard deviation that "memory_aware" takes answers to have before any has been
            seen, None is 256; goes with it.
        sla: how promised times per token are kept: "budget" by the model of step times, "search" is Algorithm 2 for one
            mean time between tokens, ``itl_target_s``.
        itl_target_s: goes with "search".
        phase_rule: as in ``ExclusiveMixedConfig``, where none is fixed by ``refill``.
        refill: requests per refill of exclusive batching; None is what the rule says.
        mode_rule, hysteresis_fraction, priority_margin_fraction: as in ``ExclusiveMixedConfig``.
        exclusive_overflow_probability: its ``overflow_probability``, epsilon of N*.
        max_wait_s: a head of the queue older than this opens a refill at once, or None.
        overcommit: let the forecast admit more while preemptions cost less than they bring
            (``policies.engine.overcommit``).
        overflow_probability: chance that admission accepts; None is its own default, as in ``ForecastAdmissionConfig``
            or ``MemoryAwareConfig``.
        classes: as in ``ForecastAdmissionConfig``.
        step_times: measured earlier on this model and GPU, or None.
        speculates: a decode step may bring a request several tokens (speculative decoding).

    Raises:
        ConfigError: a value is out of bounds, or one comes without the choice that it goes with.
    """

    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    admission: Literal["forecast", "memory_aware", "slots"] = "forecast"
    memory_form: Literal["exact", "linear"] = "exact"
    memory_basis: Literal["final", "resident"] = "final"
    prior_output_tokens: float | None = None
    sla: Literal["budget", "search"] = "budget"
    itl_target_s: float | None = None
    phase_rule: Literal["exact", "threshold", "ifr"] = "exact"
    refill: int | None = None
    max_wait_s: float | None = None
    mode_rule: Literal["measured", "crossover"] = "measured"
    hysteresis_fraction: float = 0.01
    priority_margin_fraction: float = 0.0
    exclusive_overflow_probability: float | None = None
    overcommit: bool = True
    overflow_probability: float | None = None
    classes: int = 1
    step_times: StepTimes | None = None
    speculates: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "classes")
        require_one_of(("forecast", "memory_aware", "slots"), self, "admission")
        require_one_of(("budget", "search"), self, "sla")
        require_positive(self, "itl_target_s")
        if (self.sla == "search") != (self.itl_target_s is not None):
            raise ConfigError(f'itl_target_s goes with sla "search", got {self.itl_target_s} with "{self.sla}"')
        if self.refill is not None and self.phase_rule != "exact":
            raise ConfigError(f'refill fixes what phase_rule "{self.phase_rule}" would say: leave one of them out')
        self._refuse_unheeded()
        self.memory_aware()
        self.forecast()
        self.exclusive()

    def _refuse_unheeded(self) -> None:
        """Raises ConfigError: a setting of Algorithm 1 is given, and another way of admission."""
        if self.admission == "memory_aware":
            return
        given = {"memory_form": "exact", "memory_basis": "final", "prior_output_tokens": None}
        if unheeded := [name for name, default in given.items() if getattr(self, name) != default]:
            raise ConfigError(
                f'{", ".join(unheeded)}: of admission "memory_aware", got "{self.admission}": set that or leave it out'
            )

    def memory_aware(self) -> MemoryAwareConfig:
        usual = MemoryAwareConfig()
        prior = _or(self.prior_output_tokens, usual.prior_output_tokens)
        return MemoryAwareConfig(
            overflow_probability=_or(self.overflow_probability, usual.overflow_probability),
            form=self.memory_form,
            basis=self.memory_basis,
            prior_output_tokens=prior,
            prior_output_std_tokens=prior,
        )

    def forecast(self) -> ForecastAdmissionConfig:
        return ForecastAdmissionConfig(
            overflow_probability=_or(self.overflow_probability, ForecastAdmissionConfig().overflow_probability),
            classes=self.classes,
            speculates=self.speculates,
        )

    @property
    def literal_phases(self) -> bool:
        """Whether a rule of 003 is chosen by name for the phases."""
        chosen = (self.phase_rule, self.mode_rule, self.refill, self.exclusive_overflow_probability)
        return chosen != ("exact", "measured", None, None)

    def exclusive(self) -> ExclusiveMixedLiteralConfig:
        return ExclusiveMixedLiteralConfig(
            mode=self.mode,
            phase_rule=self.phase_rule if self.refill is None else "fixed",
            refill=self.refill,
            mode_rule=self.mode_rule,
            overflow_probability=self.exclusive_overflow_probability,
            max_wait_s=self.max_wait_s,
            hysteresis_fraction=self.hysteresis_fraction,
            priority_margin_fraction=self.priority_margin_fraction,
            step_times=StepTimeConfig(prior=self.step_times),
            speculates=self.speculates,
        )


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else value


class Auto:
    """Every part at its default, composed.

    Attributes:
        admission: what memory allows.
        latency: what promised times per token allow.
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
        phases = ExclusiveMixedLiteral if config.literal_phases else ExclusiveMixed
        self.phases: ExclusiveMixed = phases(config.exclusive(), learned.phases if learned else None)
        self.admission: ForecastAdmission | MemoryAware | Stock = self._admission(learned, known_as)
        self.latency: StepBudget | Smallest = self._latency(config)

    def _admission(
        self, learned: "Auto | None", known_as: Sequence[int | None] | None
    ) -> ForecastAdmission | MemoryAware | Stock:
        if self.config.admission == "memory_aware":
            before = learned.admission if learned and isinstance(learned.admission, MemoryAware) else None
            return MemoryAware(self.config.memory_aware(), before)
        if self.config.admission == "slots":
            return Stock()
        known = learned.admission if learned and isinstance(learned.admission, ForecastAdmission) else None
        step_times = self.phases.model.recompute_times if self.config.overcommit else None
        return ForecastAdmission(self.config.forecast(), known, known_as=known_as, step_times=step_times)

    def _latency(self, config: AutoConfig) -> StepBudget | Smallest:
        if config.itl_target_s is None:
            return StepBudget(self.phases.model.times)
        return Smallest(
            SlaConstrained(SlaConstrainedConfig(itl_target_s=config.itl_target_s)),
            ChunkSize(ChunkSizeConfig(itl_target_s=config.itl_target_s)),
        )

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
        """Of reading, decodes in between included; None while that is not known."""
        return self.latency.seconds_per_token if isinstance(self.latency, StepBudget) else None

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
