"""What a predictor of output length looks like to the router."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrediction:
    """Tokens that an answer is expected to have; mean_tokens >= 0.

    quantile_tokens: for some fractions, tokens that such a fraction of answers does not exceed; empty where unknown.
    """

    mean_tokens: float
    quantile_tokens: Mapping[float, float] = field(default_factory=dict)


class LengthPredictor(Protocol):
    """Never blocks: a prediction that is not at hand is None, and the caller goes on without."""

    def predict(self, slo_class: str) -> LengthPrediction | None: ...

    def observe(self, slo_class: str, output_tokens: int) -> None:
        """Take note of a finished answer's true length."""
