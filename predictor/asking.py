"""Ask a scorer, but never wait longer than the deadline: late, saturated or dead, the caller goes on without.

A request waits for its prediction as long as its promise makes worth while (`worth_waiting_s`): where cores are busy a
prediction takes tens of milliseconds, which is nothing of a whole answer's time. After some failures in a row the
scorer is left alone for a moment, so that a stalled one does not cost every request its whole deadline. Each outcome is
counted by its name.
"""

import asyncio
import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from policies.checks import require_at_least, require_positive
from policies.errors import AdmissionError, PredictorError
from policies.router.promise import NO_PROMISE, Promise

logger = logging.getLogger(__name__)

LEAST_S, MOST_S = 0.015, 0.5
OF_ANSWER, OF_FIRST_TOKEN = 0.03, 0.05  # shares of the promised times


def worth_waiting_s(promise: Promise) -> float:
    """How long a request waits for its prediction: where a whole answer is promised, for which predictions count, a
    small share of that time and of the first token's, else LEAST_S; at most MOST_S."""
    if promise.e2e_s is None:
        return LEAST_S
    shares_s = [OF_ANSWER * promise.e2e_s, MOST_S]
    if promise.ttft_s is not None:
        shares_s.append(OF_FIRST_TOKEN * promise.ttft_s)
    return max(LEAST_S, min(shares_s))


class Scorer(Protocol):
    async def score(self, prompt: str) -> float:
        """The prompt's rank of length.

        Raises:
            AdmissionError: too many prompts wait already.
            SluiceError: it cannot be had.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingConfig:
    """Attributes: deadline_s of a question, None for what its promise is worth; failures in a row that lead to a pause
    of pause_s; questions at a time."""

    deadline_s: float | None = None
    failures_before_pause: int = 16
    pause_s: float = 0.25
    max_in_flight: int = 512

    def __post_init__(self) -> None:
        require_positive(self, "pause_s", *(() if self.deadline_s is None else ("deadline_s",)))
        require_at_least(1, self, "failures_before_pause", "max_in_flight")


class Asking:
    """Outcomes: answered, late, saturated, dead, paused."""

    def __init__(self, scorer: Scorer, config: AskingConfig | None = None) -> None:
        self._scorer, self._config = scorer, config or AskingConfig()
        self.outcomes: Counter[str] = Counter()
        self._failures = self._in_flight = 0
        self._paused_until_s = 0.0

    async def score(self, prompt: str, promise: Promise = NO_PROMISE) -> float | None:
        """Takes the deadline at most, give or take a turn of the event loop."""
        if (obstacle := self._obstacle()) is not None:
            self.outcomes[obstacle] += 1
            return None
        self._in_flight += 1
        try:
            async with asyncio.timeout(self._config.deadline_s or worth_waiting_s(promise)):
                score = await self._scorer.score(prompt)
            if not math.isfinite(score):
                raise PredictorError(f"the score is {score}: is the checkpoint whole?")
        except Exception as error:  # of any kind: no request fails for want of its prediction
            self._note_failure(error)
            return None
        finally:
            self._in_flight -= 1
        self._failures = 0
        self.outcomes["answered"] += 1
        return score

    def _obstacle(self) -> str | None:
        """Why the scorer is not even asked."""
        if asyncio.get_running_loop().time() < self._paused_until_s:
            return "paused"
        return "saturated" if self._in_flight >= self._config.max_in_flight else None

    def _note_failure(self, error: Exception) -> None:
        self.outcomes[_outcome(error)] += 1
        self._failures += 1
        if self._failures >= self._config.failures_before_pause:
            logger.warning("the length predictor is left alone for %g s: %r", self._config.pause_s, error)
            self._failures = 0
            self._paused_until_s = asyncio.get_running_loop().time() + self._config.pause_s


def _outcome(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "late"
    return "saturated" if isinstance(error, AdmissionError) else "dead"
