"""What requests are promised, and in which order they wait: `classes` and `order`."""

from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from deployments.config.section import LiveKey, Seconds, Section
from policies.registry import Family, build_of
from policies.router.admission import ClassLimits
from policies.router.order import IdleOrder, Order
from policies.router.promise import Promise


class ClassSection(Section):
    """A service class."""

    ttft_s: LiveKey[Seconds | None] = 1.0
    """Target for the first token, from the arrival of the HTTP request; the earliest deadline starts first. None has no
    target: it goes behind those that can be in time, and before late ones."""
    tpot_s: LiveKey[Seconds | None] = None
    """Target for the time per token after the first, on average over an answer; the engine keeps to the strictest among
    what it runs. None has no target."""
    e2e_s: LiveKey[Seconds | None] = None
    """Target for the last token, from the arrival of the HTTP request: the whole answer by then, with engines of every
    kind. None has no target."""
    max_waiting: LiveKey[int] = Field(default=4096, ge=1)
    """Requests of this class that may wait; more get 429 with Retry-After."""
    when_late: LiveKey[Literal["serve", "refuse"]] = "serve"
    """What becomes of a request whose first token, or last one with `e2e_s`, is predicted to come too late when it
    arrives: `serve` lets it wait behind those that can be in time, up to router.max_wait_s; `refuse` gives it 429 with
    Retry-After."""
    max_key_share: LiveKey[float] = Field(default=0.5, gt=0, le=1)
    """How much of `max_waiting` one API key may have; more of its requests get 429 with Retry-After, and the rest stays
    for others. 1 sets no bound, and requests without a key have none."""
    fills_idle: LiveKey[bool] = False
    """It takes what the others leave: a running request gives its slot back, and goes on later where it stands, when
    one of another class waits that is due earlier."""
    order: LiveKey[IdleOrder] = "deadline"
    """With `fills_idle`, its requests among themselves: `deadline` as they came, or by prompt length those that come
    within one `ttft_s` (without one, `router.late_patience_s`), window by window. `shortest_first` ends more requests
    a second while they wait, `longest_first` brings the long ones together; a longer `ttft_s` sorts more of them."""
    own_replicas: int = Field(default=0, ge=0)
    """Replicas that serve this class alone, besides the shared ones, which it may use too."""

    @model_validator(mode="after")
    def _orders_what_fills_idle_capacity(self) -> Self:
        if self.order != "deadline" and not self.fills_idle:
            raise ValueError(f"order: {self.order} is for classes that fill idle capacity: set fills_idle: true")
        return self

    def promise(self) -> Promise:
        return Promise(ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s)

    def limits(self) -> ClassLimits:
        refuses_late = self.when_late == "refuse"
        return ClassLimits(max_waiting=self.max_waiting, refuses_late=refuses_late, max_key_share=self.max_key_share)


class OrderSection(Section):
    """Order of waiting requests: whose first token is due earlier starts earlier."""

    policy: str | None = None
    """A class of your own, `package.module:Class`, or another order of policies/registry.py by name, in the place of
    that deadline. See docs/guides/write-a-policy.md."""
    policy_args: LiveKey[dict[str, JsonValue]] = {}
    """Settings of `policy`, its keywords."""

    @model_validator(mode="after")
    def _has_one_order(self) -> Self:
        if self.policy is None and self.policy_args:
            raise ValueError("policy_args are settings of policy, and there is none")
        self.build()
        return self

    def build(self) -> Order | None:
        """None goes by what each request is promised."""
        if self.policy is None:
            return None
        order: Order = build_of(Family.ORDER, self.policy, self.policy_args)
        return order


DEFAULT_CLASSES = {
    "interactive": ClassSection(ttft_s=0.5),
    "standard": ClassSection(ttft_s=2.0),
    "offline": ClassSection(ttft_s=60.0, fills_idle=True),
}
