"""Settings of the engine's scheduler plug-in: `engine.scheduler` in YAML, and `sluice` in vLLM's additional_config.

    vllm serve MODEL --scheduler-cls deployments.vllm_scheduler.SluiceScheduler \\
        --additional-config '{"sluice": {"mode": "auto"}}'

vLLM makes additional_config part of its compile-cache key: what changes from hour to hour belongs in `user_config` of
the routers, or live control.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from deployments.config.messages import what_is_wrong
from deployments.config.profile import calibrated
from deployments.config.section import Live, Seconds, Section
from policies.engine.auto import Auto, AutoConfig
from policies.errors import ConfigError
from policies.registry import Family, build_of
from policies.types import BatchPolicy, StepTimes

SchedulerMode = Literal["stock", "mixed", "exclusive", "auto"]

# What the driver itself obeys, and what tells classes apart: it goes with any policy.
_OF_ANY_POLICY = {"mode", "policy", "policy_args", "max_batch_size", "classes", "ttft_s", "tpot_s"}

KEY = "sluice"
SCHEDULER_CLASS = "deployments.vllm_scheduler.SluiceScheduler"


class SchedulerSettings(Section):
    """What each engine step may do, and which rule decides it."""

    mode: Live[SchedulerMode] = "auto"
    """`stock` is vLLM's own scheduler, untouched. `mixed` adds admission and latency control; `exclusive` never lets
    prefill and decode share a step; `auto` chooses between these two by measured step times."""
    admission: Live[Literal["forecast", "memory_aware", "slots"]] = "forecast"
    """By survival forecast, by 001's Algorithm 1, or as vLLM does, until memory is full."""
    memory_form: Live[Literal["exact", "linear"]] = "exact"
    """Of `admission: memory_aware`: eq. 12, or eq. 14 with the buffer L0 of eq. 13."""
    memory_basis: Live[Literal["final", "resident"]] = "final"
    """Of `admission: memory_aware`: a request counts as it is at its end, or at a random step of it, which is safer
    where the lengths of answers scatter more than geometric ones."""
    prior_output_tokens: Live[float | None] = Field(default=None, gt=0, allow_inf_nan=False)
    """Of `admission: memory_aware`: what an answer is taken for before any has been seen; null is 256."""
    ttft_s: Live[Seconds | None] = None
    """Seconds until the first token, promised to requests that bring no promise of their own, as under plain
    `vllm serve`."""
    tpot_s: Live[Seconds | None] = None
    """Mean seconds of a token after the first, promised likewise."""
    sla: Live[Literal["budget", "search"]] = "budget"
    """How times per token are kept: by the model of step times, or by 001's Algorithm 2 for one mean time between
    tokens, `itl_target_s`."""
    itl_target_s: Live[Seconds | None] = None
    """What `sla: search` holds."""
    classes: Live[tuple[str, ...]] = ()
    """Service classes whose lengths are learned apart, by name; the application fills it in."""
    refill: Live[int | None] = Field(default=None, ge=1)
    """k, the free slots at which exclusive batching refills; null is what `phase_rule` says."""
    phase_rule: Live[Literal["exact", "threshold", "ifr"]] = "exact"
    """How long exclusive batching decodes between refills: the best length for the lengths of answers as measured, or
    003's theta0 for geometric ones, or that with its correction for a rising hazard."""
    mode_rule: Live[Literal["measured", "crossover"]] = "measured"
    """What `mode: auto` goes by: costs of steps with and without a prefill, or 003's eq. 8, which takes every mixed
    step to hold one."""
    hysteresis_fraction: Live[float] = Field(default=0.01, ge=0, allow_inf_nan=False)
    """How much cheaper a token must be in the other mode before `mode: auto` changes to it."""
    priority_margin_fraction: Live[float] = Field(default=0.0, allow_inf_nan=False)
    """003's delta: how much cheaper a token must be in exclusive batching than in mixed besides. Above 0 favours a
    short time to the first token, below 0 a short time per token."""
    exclusive_overflow_probability: Live[float | None] = Field(default=None, gt=0, lt=1)
    """With it 003's N* bounds the batch of exclusive batching: the chance that this outgrows the KV cache."""
    max_wait_s: Live[Seconds | None] = None
    """In exclusive batching: the head of the queue waits at most this long for a refill."""
    max_batch_size: Live[int | None] = Field(default=None, ge=1)
    """A fixed cap on running requests, below vLLM's own max_num_seqs."""
    overflow_probability: Live[float | None] = Field(default=None, gt=0, lt=1)
    """Chance allowed that the KV cache overflows and preempts; null is 0.05 by forecast and 0.01 by Algorithm 1."""
    overcommit: Live[bool] = True
    """Admit beyond the forecast while preemptions cost less than the larger batch brings."""
    profile: Live[Path | None] = None
    """A file that `sluice calibrate` wrote for this model and hardware."""
    measure_s: float = Field(default=10.0, ge=0, le=600, allow_inf_nan=False)
    """Most seconds at an engine's start, before it takes requests, to measure what steps cost, for `mode: auto` without
    a profile; 0 leaves it out, and `auto` then stays with mixed steps until it has seen what prefills cost alone."""
    policy: str | None = None
    """A class of your own that plans every step, `package.module:Class`, or another of policies/registry.py by name;
    null is Sluice's. See docs/guides/write-a-policy.md."""
    policy_args: dict[str, JsonValue] = {}
    """Settings of `policy`, its keywords."""

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        self.auto_config(None)
        if self.policy is None and self.policy_args:
            raise ValueError("policy_args are settings of policy, and there is none")
        if self.policy is not None:
            if unheeded := sorted(self._differing() - _OF_ANY_POLICY):
                raise ValueError(f"{', '.join(unheeded)}: policy {self.policy} decides, give it policy_args")
            if self.mode not in ("auto", "stock"):
                raise ValueError(f"mode {self.mode}: policy {self.policy} decides, leave mode out")
            self.chosen_policy(self.policy)
        return self

    def _differing(self) -> set[str]:
        """Names of settings that are not as they are by default."""
        return set(self.model_dump(exclude_defaults=True))

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Raises ConfigError naming each wrong setting."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError("; ".join(f"{KEY}.{wrong}" for wrong in what_is_wrong(error, cls))) from None

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
    def measures(self) -> bool:
        """Whether a new engine is measured: where the mode follows from it, and no file has told."""
        return self.mode == "auto" and self.policy is None and self.profile is None and self.measure_s > 0.0

    @property
    def class_names(self) -> tuple[str | None, ...]:
        """Class of each class_index; the first is for all requests of no named class."""
        return (None, *sorted(set(self.classes)))

    def auto_config(self, known: StepTimes | None, *, phases: bool = True, speculates: bool = False) -> AutoConfig:
        """The policy's settings; `phases` False keeps to mixed steps."""
        return AutoConfig(
            mode=self.mode if phases and self.mode != "stock" else "mixed",
            admission=self.admission,
            memory_form=self.memory_form,
            memory_basis=self.memory_basis,
            prior_output_tokens=self.prior_output_tokens,
            sla=self.sla,
            itl_target_s=self.itl_target_s,
            classes=len(self.class_names),
            phase_rule=self.phase_rule,
            refill=self.refill,
            mode_rule=self.mode_rule,
            hysteresis_fraction=self.hysteresis_fraction,
            priority_margin_fraction=self.priority_margin_fraction,
            exclusive_overflow_probability=self.exclusive_overflow_probability,
            max_wait_s=self.max_wait_s,
            overcommit=self.overcommit,
            overflow_probability=self.overflow_probability,
            step_times=known,
            speculates=speculates,
        )

    def build_policy(
        self, *, learned: BatchPolicy | None, before: Self, phases: bool, speculates: bool = False
    ) -> BatchPolicy:
        """A policy with these settings, and with what `learned`, one of the same `policy` by the settings of before,
        has learned of each class.

        Raises:
            ConfigError: the profile cannot be used.
        """
        if self.policy is not None:
            return self.chosen_policy(self.policy) if learned is None else learned
        config = self.auto_config(self.known_step_times(), phases=phases, speculates=speculates)
        if learned is None:
            return Auto(config)
        assert isinstance(learned, Auto)
        index = {name: at for at, name in enumerate(before.class_names)}
        return Auto(config, learned, known_as=[index.get(name) for name in self.class_names])

    def chosen_policy(self, name: str) -> BatchPolicy:
        """A new policy of that name or class. Raises ConfigError: there is none, or it refuses `policy_args`."""
        policy: BatchPolicy = build_of(Family.BATCH, name, self.policy_args)
        return policy

    def known_step_times(self) -> StepTimes | None:
        """Out of the profile. Raises ConfigError when it cannot be read or holds several engines."""
        return None if self.profile is None else calibrated(self.profile)
