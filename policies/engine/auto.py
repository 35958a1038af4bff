"""The engine's default policy: forecast admission, latency-bound batch and chunk, exclusive or mixed by cost.

A composition, not a new decision: ``Smallest`` over the admission, with latency targets also ``ClassTargets``
(Algorithm 2 and the chunk under the strictest class's target), and ``ExclusiveMixed`` last, so that phases wait for
requests that the others would really let in. Whoever needs other settings of the parts composes them the same way.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from policies.checks import require_at_least, require_one_of
from policies.engine.class_targets import ClassTargets, ClassTargetsConfig
from policies.engine.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.smallest import Smallest
from policies.engine.step_time import StepTimeConfig
from policies.engine.stock import Stock
from policies.errors import ConfigError
from policies.lengths.statistics import SurvivalLaw
from policies.papers.memory_aware import MemoryAware, MemoryAwareConfig
from policies.types import BatchState, StepPlan, StepResult, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """The few settings that depend on the service; the rest are the parts' defaults.

    Attributes:
        itl_targets_s: mean time between tokens to hold, by class_index, None for throughput alone; one for each class,
            or empty for none.
        itl_budgets_s: longest gap that a refill of exclusive batching may put between two tokens; likewise. mode:
        "auto", "exclusive" or "mixed". admission: "forecast" by survival, "memory_aware" is eq. 12, "slots" leaves
        memory to the engine. refill: requests per refill of exclusive batching; None is the exact phase length.
        max_wait_s: a head of the queue older than this opens a refill at once, or None. overcommit: let the forecast
        admit more while preemptions cost less than they bring (``policies.engine.overcommit``). overflow_probability,
        classes: as in ``ForecastAdmissionConfig``. prior_output_tokens: mean and standard deviation that answers are
        taken to have before any has been seen. step_times: measured earlier on this model and GPU, or None. speculates:
        a decode step may bring a request several tokens (speculative decoding).

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_targets_s: tuple[float | None, ...] = ()
    itl_budgets_s: tuple[float | None, ...] = ()
    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    admission: Literal["forecast", "memory_aware", "slots"] = "forecast"
    refill: int | None = None
    max_wait_s: float | None = None
    overcommit: bool = True
    overflow_probability: float = 0.05
    classes: int = 1
    prior_output_tokens: float = 256.0
    step_times: StepTimes | None = None
    speculates: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "classes")
        require_one_of(("forecast", "memory_aware", "slots"), self, "admission")
        for name in ("itl_targets_s", "itl_budgets_s"):
            if (given := getattr(self, name)) and len(given) != self.classes:
                raise ConfigError(f"{name} must hold {self.classes} values, got {given}")
        self.targets()
        self.forecast()
        self.exclusive()

    def targets(self) -> ClassTargetsConfig | None:
        """None where no class has a target."""
        if all(target is None for target in self.itl_targets_s):
            return None
        return ClassTargetsConfig(itl_targets_s=self.itl_targets_s)

    def memory_aware(self) -> MemoryAwareConfig:
        return MemoryAwareConfig(
            prior_output_tokens=self.prior_output_tokens,
            prior_output_std_tokens=self.prior_output_tokens,
        )

    def forecast(self) -> ForecastAdmissionConfig:
        return ForecastAdmissionConfig(
            overflow_probability=self.overflow_probability,
            classes=self.classes,
            fallback=self.memory_aware(),
            speculates=self.speculates,
        )

    def exclusive(self) -> ExclusiveMixedConfig:
        return ExclusiveMixedConfig(
            mode=self.mode,
            phase_rule="exact" if self.refill is None else "fixed",
            refill=self.refill,
            itl_budgets_s=self.itl_budgets_s,
            max_wait_s=self.max_wait_s,
            step_times=StepTimeConfig(prior=self.step_times),
            speculates=self.speculates,
        )


class Auto:
    """Every part at its default, composed."""

    def __init__(self, config: AutoConfig, learned: "Auto | None" = None) -> None:
        """``learned``: a policy whose statistics this one takes over; it must not be used any more.

        Raises:
            ConfigError: ``learned`` has another number of classes.
        """
        if learned is not None and learned.config.classes != config.classes:
            raise ConfigError(f"the number of classes cannot change, from {learned.config.classes} to {config.classes}")
        self.config: AutoConfig = config
        self.phases: ExclusiveMixed = ExclusiveMixed(config.exclusive(), learned.phases if learned else None)
        self.admission: ForecastAdmission | MemoryAware | Stock = self._admission(learned)
        targets = config.targets()
        self.targets: ClassTargets | None = (
            ClassTargets(targets, learned.targets if learned else None) if targets else None
        )
        self._composed = Smallest(self.admission, *([self.targets] if self.targets else []), self.phases)

    def _admission(self, learned: "Auto | None") -> ForecastAdmission | MemoryAware | Stock:
        if self.config.admission == "memory_aware":
            return MemoryAware(self.config.memory_aware())
        if self.config.admission == "slots":
            return Stock()
        known = learned.admission if learned and isinstance(learned.admission, ForecastAdmission) else None
        step_times = self.phases.recompute_times if self.config.overcommit else None
        return ForecastAdmission(self.config.forecast(), known, step_times=step_times)

    @property
    def law(self) -> SurvivalLaw | None:
        """Output lengths as they have been seen, of all classes; None before the first."""
        return self.phases.law()

    @property
    def overcommit(self) -> float:
        """Share admitted beyond the forecast; below 0 less than it."""
        return self.admission.overcommit.share if isinstance(self.admission, ForecastAdmission) else 0.0

    def plan(self, state: BatchState) -> StepPlan:
        return self._composed.plan(state)

    def observe(self, result: StepResult) -> None:
        self._composed.observe(result)

    def batch_size(self, state: BatchState, joining: int = 0) -> int:
        """Requests that may be in the engine at once as things stand: what a replica can offer without a queue.

        Unlike a plan's cap, which binds only what waits, this supposes that requests like the present ones came in
        every free slot. Changes nothing.

        joining: requests besides that have their memory and will be in a batch: the bound on latency is for them too.
        """
        memory = self.admission.batch_size(state)
        latency = inf
        if self.targets:  # of all of them, who need no slot of these
            latency = self.targets.batch_size(state._replace(slots=state.slots + joining)) - joining
        return max(0 if joining else 1, int(min(state.slots, memory, latency)))
