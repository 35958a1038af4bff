"""Groups of replicas that follow the load."""

from typing import Literal, Protocol, Self

from pydantic import Field, model_validator

from deployments.config.section import Seconds, Section


class ScalingSection(Section):
    """The least and the most replicas, and how long a need must last before their number changes."""

    min_replicas: int = Field(default=1, ge=1)
    """The least replicas, also without traffic: the need is reported by replicas, so none would never become one."""
    max_replicas: int = Field(ge=1)
    """The most replicas."""
    upscale_delay_s: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How long more replicas must be needed before they start."""
    downscale_delay_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    """How long fewer replicas must be needed before some end. Set it above the time that loading the model takes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is below min_replicas ({self.min_replicas})")
        return self


class AutoscalingSection(ScalingSection):
    """Shared engine replicas follow the predicted work, or what was promised."""

    min_replicas: int = Field(default=1, ge=0)
    """The least replicas. With 0 the last one ends where no request comes, and one starts when a request comes, which
    waits for it; one starts with the application too."""
    downscale_to_zero_delay_s: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    """With `min_replicas: 0`: how long no request must come before the last replica ends."""
    by: Literal["work", "promises"] = "work"
    """What tells how many are enough: `work`, slots in use and seconds that wait, or `promises`, which starts replicas
    before promises would break by the forecast of the traffic."""
    slot_use: float = Field(default=0.8, gt=0, lt=1)
    """The fraction of all slots that should be in use."""
    max_queue_s: Seconds = 5.0
    """The longest time that the requests in the queue should take, by prediction."""
    most_ratio: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """By `promises`, what the 90th percentile of predicted over promised times of a minute may be, in the class that is
    worst off."""

    @model_validator(mode="after")
    def _sets_what_it_goes_by(self) -> Self:
        unheeded = {"most_ratio"} if self.by == "work" else {"slot_use", "max_queue_s"}
        if found := sorted(unheeded & self.model_fields_set):
            raise ValueError(f"{', '.join(found)} does not count by: {self.by}: leave it out")
        if self.by == "promises" and self.min_replicas == 0:
            raise ValueError("by: promises keeps one replica at least: it tells by requests how many are enough")
        return self


class RouterAutoscalingSection(ScalingSection):
    """Routers follow the CPU that they use, and how late their event loops are."""

    cpu_use: float = Field(default=0.6, gt=0, lt=1)
    """Cores that a router should use on average; it cannot use much more than one."""
    max_lag_s: Seconds = 0.02
    """What the event loops of routers may be late in the mean, which every token waits for: beyond it one more router
    is needed than there are."""


class Scaled(Protocol):
    """A group of replicas, of a fixed number or of one that follows the load."""

    @property
    def replicas(self) -> int: ...

    @property
    def autoscaling(self) -> ScalingSection | None: ...


def least_replicas(group: Scaled) -> int:
    """How many there are at the start, and at any later time but while a group that is scaled has none."""
    return max(1, group.autoscaling.min_replicas) if group.autoscaling else group.replicas


def may_be_none(group: Scaled) -> bool:
    """Whether its last replica ends where no request comes."""
    return group.autoscaling is not None and group.autoscaling.min_replicas == 0
