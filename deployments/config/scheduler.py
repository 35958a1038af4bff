"""Settings of the engine's scheduler plug-in: `engine.scheduler` in YAML, and `sluice` in vLLM's additional_config.

    vllm serve MODEL --scheduler-cls deployments.vllm_scheduler.SluiceScheduler \\
        --additional-config '{"sluice": {"mode": "auto"}}'

vLLM makes additional_config part of its compile-cache key: what changes from hour to hour belongs in `user_config` of
the routers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from deployments.config.messages import what_is_wrong
from deployments.config.profile import calibrated
from deployments.config.section import LiveKey, Seconds, Section
from policies.engine.auto import Auto, AutoConfig
from policies.errors import ConfigError
from policies.papers.auto_literal import AutoLiteralConfig, PapersConfig, auto
from policies.registry import Family, build_of
from policies.types import BatchPolicy, StepTimes

SchedulerMode = Literal["stock", "mixed", "exclusive", "auto"]

# What the driver itself obeys, and what tells requests apart: it goes with any policy.
_OF_ANY_POLICY = {
    "mode", "policy", "policy_args", "max_batch_size", "classes", "ttft_s", "tpot_s", "e2e_s", "late_patience_s",
    "profile", "kept_fraction",
}  # fmt: skip

KEY = "sluice"
SCHEDULER_CLASS = "deployments.vllm_scheduler.SluiceScheduler"


class SchedulerSection(Section):
    """What each engine step may do, and which rule decides it. Literal rules of the papers stand under `papers`."""

    mode: LiveKey[SchedulerMode] = "auto"
    """`stock` is vLLM's own scheduler, untouched. `mixed` adds admission and latency control; `exclusive` never lets
    prefill and decode share a step; `auto` chooses between these two by measured step times."""
    admission: LiveKey[Literal["forecast", "slots"]] = "forecast"
    """By survival forecast, or as vLLM does, until memory is full."""
    overflow_probability: LiveKey[float] = Field(default=AutoConfig().overflow_probability, gt=0, lt=1)
    """Chance that the forecast allows for the KV cache to overflow, which preempts."""
    overcommit: LiveKey[bool] = True
    """Admit beyond the forecast while preemptions cost less than the larger batch brings; false where answers have
    nearly equal lengths."""
    max_batch_size: LiveKey[int | None] = Field(default=None, ge=1)
    """A fixed cap on running requests, below vLLM's own max_num_seqs."""
    kept_fraction: LiveKey[float] = Field(default=0.75, ge=0, lt=1)
    """Share of the KV cache that is given up last where it holds what sessions had computed that will come back; see
    docs/guides/sessions.md. It is free for requests all the same. 0 gives up what was used least recently, as vLLM."""
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
        if self.policy is None:
            if self.policy_args:
                raise ValueError("policy_args are settings of policy, and there is none")
            return self
        if unheeded := sorted(set(self.model_dump(exclude_defaults=True)) - _OF_ANY_POLICY):
            raise ValueError(f"{', '.join(unheeded)}: policy {self.policy} decides, give it policy_args")
        if self.mode not in ("auto", "stock"):
            raise ValueError(f"mode {self.mode}: policy {self.policy} decides, leave mode out")
        self.chosen_policy(self.policy)
        return self

    def chosen_policy(self, name: str) -> BatchPolicy:
        """A new policy of that name or class. Raises ConfigError: there is none, or it refuses `policy_args`."""
        policy: BatchPolicy = build_of(Family.BATCH, name, self.policy_args)
        return policy


class SchedulerSettings(SchedulerSection):
    """What an engine's plug-in is told: `engine.scheduler`, and what else it needs of the application."""

    classes: LiveKey[tuple[str, ...]] = ()
    """Service classes whose lengths are learned apart, by name."""
    ttft_s: LiveKey[Seconds | None] = None
    """Seconds until the first token, promised to requests that bring no promise of their own, as under plain
    `vllm serve`."""
    tpot_s: LiveKey[Seconds | None] = None
    """Mean seconds of a token after the first, promised likewise."""
    e2e_s: LiveKey[Seconds | None] = None
    """Seconds until the last token, promised likewise."""
    late_patience_s: LiveKey[Seconds] = 60.0
    """See `router.late_patience_s`."""
    profile: LiveKey[Path | None] = None
    """A file that `sluice calibrate` wrote for this model and hardware."""
    papers: LiveKey[PapersConfig] = PapersConfig()
    """Literal rules of the papers in the place of Sluice's."""

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

    def auto_config(
        self, known: StepTimes | None, *, phases: bool = True, speculates: bool = False
    ) -> AutoLiteralConfig:
        """The policy's settings; `phases` False keeps to mixed steps."""
        return AutoLiteralConfig(
            mode=self.mode if phases and self.mode != "stock" else "mixed",
            admission=self.admission,
            overflow_probability=self.overflow_probability,
            overcommit=self.overcommit,
            classes=len(self.class_names),
            step_times=known,
            speculates=speculates,
            papers=self.papers,
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
            return auto(config)
        assert isinstance(learned, Auto)
        index = {name: at for at, name in enumerate(before.class_names)}
        return auto(config, learned, known_as=[index.get(name) for name in self.class_names])

    def known_step_times(self) -> StepTimes | None:
        """Out of the profile. Raises ConfigError when it cannot be read or holds several engines."""
        return None if self.profile is None else calibrated(self.profile)
