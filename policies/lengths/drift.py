"""Is a source of length predictions better than the one it would replace? Judged by finished requests, with patience.

Not in the papers: paper 000 section 6.2 shows what wrong bins cost, nothing says when to stop using a predictor. Each
finished request gives one paired difference of errors,

    d = |ln(predicted / actual)| of the challenger - the same of the reference,

on one and the same request, so that hard requests count against both. A source is turned off when the mean of d over
the window stays above `margin` for `patience` requests, and on when it stays below -`margin` for as long; in between
everything stays as it is, so chance does not toggle it. A source that is off must still be asked now and then, or it
could never return.

The same rule serves the learned predictor against the histogram of the class, and a client's own hint against whatever
would have been used without it (which starts off: a hint must first prove right).
"""

from collections import deque
from dataclasses import dataclass
from math import log, nan

from policies.checks import require_at_least, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftConfig:
    """Attributes: window_requests that the mean is over; margin in nats; patience in requests; starts_on."""

    window_requests: int = 256
    margin: float = 0.02
    patience: int = 64
    starts_on: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "window_requests", "patience")
        require_positive(self, "margin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One finished request: tokens that were predicted and that came, and the bins that they fall into.

    low_tokens and high_tokens bound the interval that should hold coverage_fraction of answers; None where unknown.
    """

    actual_tokens: float
    challenger_tokens: float
    reference_tokens: float
    actual_bin: int
    challenger_bin: int
    reference_bin: int
    low_tokens: float | None = None
    high_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Over the window; nan while there is nothing to average.

    Attributes:
        hit_fraction, reference_hit_fraction: requests put into the right bin.
        bias: mean ln(predicted / actual); positive is too long.
        advantage: mean error of the reference minus that of the challenger, nats; positive is better.
        coverage_fraction: answers within their interval.
    """

    requests: int
    hit_fraction: float
    reference_hit_fraction: float
    bias: float
    advantage: float
    coverage_fraction: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    hit: bool
    reference_hit: bool
    bias: float
    advantage: float
    covered: bool | None


class DriftSwitch:
    """One challenger for one key, such as a model and a class."""

    def __init__(self, config: DriftConfig | None = None) -> None:
        self._config = config or DriftConfig()
        self._outcomes: deque[_Outcome] = deque(maxlen=self._config.window_requests)
        self._advantage_sum = 0.0
        self._contrary = 0
        self.is_on = self._config.starts_on

    def observe(self, judged: Judged) -> None:
        if len(self._outcomes) == self._config.window_requests:
            self._advantage_sum -= self._outcomes[0].advantage
        outcome = _outcome(judged)
        self._outcomes.append(outcome)
        self._advantage_sum += outcome.advantage
        self._decide(self._advantage_sum / len(self._outcomes))

    def _decide(self, advantage: float) -> None:
        """Toggle when the window has spoken against the present state for `patience` requests in a row."""
        speaks_against = advantage < -self._config.margin if self.is_on else advantage > self._config.margin
        self._contrary = self._contrary + 1 if speaks_against else 0
        if self._contrary >= self._config.patience:
            self.is_on, self._contrary = not self.is_on, 0

    def accuracy(self) -> Accuracy:
        covered = [outcome.covered for outcome in self._outcomes if outcome.covered is not None]
        return Accuracy(
            requests=len(self._outcomes),
            hit_fraction=_mean([outcome.hit for outcome in self._outcomes]),
            reference_hit_fraction=_mean([outcome.reference_hit for outcome in self._outcomes]),
            bias=_mean([outcome.bias for outcome in self._outcomes]),
            advantage=_mean([outcome.advantage for outcome in self._outcomes]),
            coverage_fraction=_mean(covered),
        )


def _outcome(judged: Judged) -> _Outcome:
    bias = _log_ratio(judged.challenger_tokens, judged.actual_tokens)
    low, high = judged.low_tokens, judged.high_tokens
    return _Outcome(
        hit=judged.challenger_bin == judged.actual_bin,
        reference_hit=judged.reference_bin == judged.actual_bin,
        bias=bias,
        advantage=abs(_log_ratio(judged.reference_tokens, judged.actual_tokens)) - abs(bias),
        covered=None if low is None or high is None else low <= judged.actual_tokens <= high,
    )


def _log_ratio(predicted_tokens: float, actual_tokens: float) -> float:
    return log(max(predicted_tokens, 1.0) / max(actual_tokens, 1.0))


def _mean(values: list[bool] | list[float]) -> float:
    return sum(values) / len(values) if values else nan
