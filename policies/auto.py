"""The engine's default policy: forecast admission, latency-bound batch and chunk, exclusive or mixed by cost.

A composition, not a new decision: ``smallest`` over ``ForecastAdmission``, with a latency target also
``SlaConstrained`` and ``ChunkSize``, and ``ExclusiveMixed`` last, so that phases wait for requests that the others
would really let in. Whoever needs other settings of the parts composes them the same way.
"""

from dataclasses import dataclass
from typing import Literal

from policies.batch_size import (
    ChunkSize,
    ChunkSizeConfig,
    MemoryAwareConfig,
    SlaConstrained,
    SlaConstrainedConfig,
    smallest,
)
from policies.checks import require_positive
from policies.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.step_time import StepTimeConfig
from policies.types import BatchPolicy, BatchState, StepPlan, StepResult, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """The few settings that depend on the service; the rest are the parts' defaults.

    Attributes:
        itl_target_s: mean time between tokens to hold, or None for throughput alone.
        itl_budget_s: longest gap that a refill of exclusive batching may put between two tokens, or None.
        mode: "auto", "exclusive" or "mixed".
        overflow_probability, length_bias, classes, max_output_tokens: as in ``ForecastAdmissionConfig``.
        prior_output_tokens, prior_output_std_tokens: what answers are taken for before any has been seen.
        step_times: measured earlier on this model and GPU, or None.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float | None = None
    itl_budget_s: float | None = None
    mode: Literal["auto", "exclusive", "mixed"] = "auto"
    overflow_probability: float = 0.05
    length_bias: float = 1.1
    classes: int = 1
    max_output_tokens: int = 32768
    prior_output_tokens: float = 256.0
    prior_output_std_tokens: float = 256.0
    step_times: StepTimes | None = None

    def __post_init__(self) -> None:
        if self.itl_target_s is not None:
            require_positive(self, "itl_target_s")
        self.forecast()
        self.exclusive()

    def forecast(self) -> ForecastAdmissionConfig:
        return ForecastAdmissionConfig(
            overflow_probability=self.overflow_probability,
            length_bias=self.length_bias,
            classes=self.classes,
            max_output_tokens=self.max_output_tokens,
            fallback=MemoryAwareConfig(
                prior_output_tokens=self.prior_output_tokens,
                prior_output_std_tokens=self.prior_output_std_tokens,
            ),
        )

    def exclusive(self) -> ExclusiveMixedConfig:
        return ExclusiveMixedConfig(
            mode=self.mode,
            itl_budget_s=self.itl_budget_s,
            max_output_tokens=self.max_output_tokens,
            step_times=StepTimeConfig(prior=self.step_times),
        )


class Auto:
    """Every part at its default, composed."""

    def __init__(self, config: AutoConfig) -> None:
        self.config = config
        self.forecast = ForecastAdmission(config.forecast())
        self.phases = ExclusiveMixed(config.exclusive())
        latency: list[BatchPolicy] = []
        if config.itl_target_s is not None:
            latency.append(SlaConstrained(SlaConstrainedConfig(itl_target_s=config.itl_target_s)))
            latency.append(ChunkSize(ChunkSizeConfig(itl_target_s=config.itl_target_s)))
        self._composed = smallest(self.forecast, *latency, self.phases)

    def plan(self, state: BatchState) -> StepPlan:
        return self._composed.plan(state)

    def observe(self, result: StepResult) -> None:
        self._composed.observe(result)
