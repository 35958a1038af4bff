"""How fast prompts are read behind a queue."""

from collections import deque

from policies.types import StepResult

# Steps behind a queue that make the pace of reading: with 128 the requests in time were the same within half a point.
_PACE_STEPS = 32


class ReadingPace:
    """Seconds that the steps behind the queue of now took to read a prompt token, decodes in between included."""

    def __init__(self) -> None:
        self._read: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS)  # seconds, prompt tokens

    def at_least(self, planned_s: float) -> float:
        """What was seen lately, and at least what is planned: slots and memory hold prompts back, too."""
        tokens = sum([tokens for _, tokens in self._read])
        if len(self._read) < _PACE_STEPS // 2 or not tokens:
            return planned_s
        return max(planned_s, sum([step_s for step_s, _ in self._read]) / tokens)

    def observe(self, result: StepResult) -> None:
        if not result.waiting_count and result.running_count < result.max_batch_size:
            self._read.clear()
        elif result.tells_time:
            self._read.append((result.step_s, result.prefill_tokens))
