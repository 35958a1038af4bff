"""From a service class and a customer to the limits under which a request may queue. A driver: the rules are
`policies.router.admission`'s."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from policies.checks import require_positive
from policies.router.admission import ClassLimits, Limits, Quota

SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The owner of an API key.

    Attributes:
        default_class: of its requests that name none; None takes the application's.
        classes: the ones that it may ask for; None allows all.
        requests_per_minute, tokens_per_minute: how much it may start; tokens are those of the prompt and the
            predicted answer, settled by the true one. A minute's worth may come at once.
        may_tighten: its requests may ask for closer targets than those of their class.

    Raises:
        ConfigError: a rate is not positive.
    """

    name: str
    default_class: str | None = None
    classes: frozenset[str] | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    may_tighten: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "requests_per_minute", "tokens_per_minute")

    def may_use(self, slo_class: str) -> bool:
        return self.classes is None or slo_class in self.classes

    def quotas(self, tokens: float) -> tuple[Quota, ...]:
        """What one request of `tokens` tokens takes out of its allowances."""
        requests = self._quota("requests_per_minute", self.requests_per_minute, 1.0)
        return tuple(quota for quota in (requests, self.token_quota(tokens)) if quota is not None)

    def token_quota(self, tokens: float) -> Quota | None:
        """What `tokens` tokens take out of its allowance; None where it has no limit."""
        return self._quota("tokens_per_minute", self.tokens_per_minute, tokens)

    def _quota(self, name: str, per_minute: float | None, cost: float) -> Quota | None:
        if per_minute is None:
            return None
        return Quota(name=f"{name} of {self.name}", cost=cost, per_s=per_minute / SECONDS_PER_MINUTE, burst=per_minute)


_DEFAULTS = ClassLimits()


class Door:
    """The limits of every class; a class without any has the defaults."""

    def __init__(self, classes: Mapping[str, ClassLimits]) -> None:
        self._classes = classes

    def max_waiting(self, slo_class: str) -> int:
        return self._classes.get(slo_class, _DEFAULTS).max_waiting

    def refuses_late(self, slo_class: str) -> bool:
        return self._classes.get(slo_class, _DEFAULTS).refuses_late

    def limits(self, slo_class: str, tenant: Tenant | None, tokens: float, spare_s: float = math.inf) -> Limits:
        """A request without a key has the whole queue: nothing tells its client from others.

        Args:
            spare_s: what its first token can wait and be in time.
        """
        limits = self._classes.get(slo_class, _DEFAULTS)
        return limits.of(spare_s, has_key=tenant is not None, quotas=tenant.quotas(tokens) if tenant else ())
