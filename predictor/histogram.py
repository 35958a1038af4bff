"""The predictor that needs no network: each class's answers so far stand for its next one.

It cannot tell two requests of a class apart, so it sorts nothing within a class; it gives every other part of Sluice
(bins, work estimates, deadlines) honest numbers until a better predictor speaks, and when that one is late or absent.
"""

from collections import deque
from dataclasses import dataclass, field

from policies.errors import ConfigError
from predictor.base import LengthPrediction

MIN_SAMPLES = 8  # a mean of fewer answers is mostly noise


@dataclass(slots=True)
class _Window:
    lengths: deque[int] = field(default_factory=deque)
    total_tokens: int = 0


class HistogramPredictor:
    """Mean of the latest `window_requests` answers of each class."""

    def __init__(self, window_requests: int = 2048) -> None:
        if window_requests < MIN_SAMPLES:
            raise ConfigError(f"window_requests must be at least {MIN_SAMPLES}, got {window_requests}")
        self._window_requests = window_requests
        self._windows: dict[str, _Window] = {}

    def predict(self, slo_class: str) -> LengthPrediction | None:
        window = self._windows.get(slo_class)
        if window is None or len(window.lengths) < MIN_SAMPLES:
            return None
        return LengthPrediction(mean_tokens=window.total_tokens / len(window.lengths))

    def observe(self, slo_class: str, output_tokens: int) -> None:
        window = self._windows.setdefault(slo_class, _Window())
        window.lengths.append(output_tokens)
        window.total_tokens += output_tokens
        if len(window.lengths) > self._window_requests:
            window.total_tokens -= window.lengths.popleft()
