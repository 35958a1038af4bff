"""Settings of the engine's scheduler plug-in: `engine.scheduler` in YAML, and `sluice` in vLLM's additional_config.

    vllm serve MODEL --scheduler-cls deployments.vllm_scheduler.SluiceScheduler \\
        --additional-config '{"sluice": {"mode": "auto"}}'

vLLM makes additional_config part of its compile-cache key: what changes from hour to hour belongs in live control.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deployments.config.profile import calibrated
from policies.engine.auto import Auto, AutoConfig
from policies.errors import ConfigError
from policies.types import StepTimes

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mode = Literal["stock", "mixed", "exclusive", "auto"]

KEY = "sluice"
SCHEDULER_CLASS = "deployments.vllm_scheduler.SluiceScheduler"


class SchedulerSettings(BaseModel):
    """What each engine step may do, and who decides it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = "auto"
    """`stock` is vLLM's own scheduler, untouched. `mixed` adds admission and latency control; `exclusive` never lets
    prefill and decode share a step; `auto` chooses between these two by measured step times."""
    admission: Literal["forecast", "memory_aware", "slots"] = "forecast"
    """By survival forecast, by 001's eq. 12, or as vLLM does, until memory is full."""
    itl_target_s: Seconds | None = None
    """Mean seconds between two tokens to hold, by batch size and chunk; null is throughput alone."""
    class_itl_targets_s: dict[str, Seconds] = Field(default_factory=dict)
    """The same for service classes by name; while one of its requests runs, the strictest class counts."""
    itl_budget_s: Seconds | None = None
    """The longest gap that a refill of exclusive batching may put between two tokens."""
    class_itl_budgets_s: dict[str, Seconds] = Field(default_factory=dict)
    """The same for service classes by name; while one of its requests runs, the strictest class counts."""
    refill: int | None = Field(default=None, ge=1)
    """k, the free slots at which exclusive batching refills; null is what measurement says."""
    max_wait_s: Seconds | None = None
    """In exclusive batching: the head of the queue waits at most this long for a refill."""
    max_batch_size: int | None = Field(default=None, ge=1)
    """A fixed cap on running requests, below vLLM's own max_num_seqs."""
    overflow_probability: float = Field(default=0.05, gt=0, lt=1)
    """Chance allowed that the KV cache overflows and preempts."""
    overcommit: bool = True
    """Admit beyond the forecast while preemptions cost less than the larger batch brings."""
    prior_output_tokens: float = Field(default=256.0, gt=0, allow_inf_nan=False)
    """What an answer is taken for before any has been seen."""
    profile: Path | None = None
    """A file that `sluice calibrate` wrote for this model and hardware."""

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        self.auto_config(None)
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises ConfigError naming each wrong setting."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            lines = [f"{KEY}.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError("; ".join(lines)) from None

    @classmethod
    def of_vllm(cls, additional_config: object) -> Self:
        """Out of vLLM's additional_config; other plug-ins may have keys of their own there.

        Raises:
            ConfigError: a setting is unknown or wrong.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(values, Mapping):
            raise ConfigError(f"additional_config[{KEY!r}] must be a mapping of settings, got {values!r}")
        return cls.parse(values)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """With other values. Raises ConfigError as `parse` does."""
        return self.parse(self.model_dump() | dict(changes))

    @property
    def class_names(self) -> tuple[str | None, ...]:
        """Class of each class_index; the first is for all requests of no named class."""
        return (None, *sorted(self.class_itl_targets_s | self.class_itl_budgets_s))

    def auto_config(self, known: StepTimes | None, *, phases: bool = True, speculates: bool = False) -> AutoConfig:
        """The policy's settings; `phases` False keeps to mixed steps."""
        names = self.class_names
        targets = tuple(self.class_itl_targets_s.get(name or "", self.itl_target_s) for name in names)
        budgets = tuple(self.class_itl_budgets_s.get(name or "", self.itl_budget_s) for name in names)
        return AutoConfig(
            mode=self.mode if phases and self.mode != "stock" else "mixed",
            admission=self.admission,
            itl_targets_s=targets,
            itl_budgets_s=budgets,
            classes=len(names),
            refill=self.refill,
            max_wait_s=self.max_wait_s,
            overcommit=self.overcommit,
            overflow_probability=self.overflow_probability,
            prior_output_tokens=self.prior_output_tokens,
            step_times=known,
            speculates=speculates,
        )

    def policy(self, *, learned: Auto | None, phases: bool, speculates: bool = False) -> Auto:
        """A policy with these settings, and with what another one of the same classes has learned.

        Raises:
            ConfigError: the profile cannot be used, or there are not as many classes as were learned about.
        """
        return Auto(self.auto_config(self.known_step_times(), phases=phases, speculates=speculates), learned)

    def known_step_times(self) -> StepTimes | None:
        """Out of the profile. Raises ConfigError when it cannot be read or holds several engines."""
        return None if self.profile is None else calibrated(self.profile)
