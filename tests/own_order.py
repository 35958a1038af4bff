"""A user's own order, with settings."""

from collections.abc import Mapping


class ByClass:
    """By arrival, plus the seconds that its class can wait."""

    def __init__(self, targets_s: Mapping[str, float] | None = None, default_s: float = 1.0) -> None:
        self._targets_s, self._default_s = targets_s or {}, default_s

    def key(self, arrival_s: float, slo_class: str | None, estimated_work_s: float, prompt_tokens: int) -> float:
        return arrival_s + self._targets_s.get(slo_class or "", self._default_s)
