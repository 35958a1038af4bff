"""Whole answers by a time: what running and coming ones have left, and how long steps may be for their sake.

Long steps read prompts cheaply and let every answer in progress wait; short ones end answers in time and read little.
Which promises more depends on who comes, so it is asked of those that have lately come: at a step of s seconds, with
the fixed price A of a step, the engine has 1 - A/s of each second for requests. The cheapest of them get it, and one
whose answer of o tokens has w seconds in all is in time about where o * s stays within w:

    s = argmax sum over the cheapest that fit into share * (1 - A/s) of 1 / (1 + (o * s / (0.75 * w))^3)

While all of them fit easily, steps are as long as they come: nothing has to be given up. Bounding steps by the tenth
that is pressed most kept a point or two more beside long prompts, and lost a tenth beside tool calls.
"""

from collections import deque
from math import inf

import numpy as np

from policies.lengths.remaining import RemainingTokens
from policies.types import LEAST_STEP_S, FloatArray, Left, RunningRequests, StepResult, StepTimes

_RECENT = 256  # requests that stand for those to come
_LEAST_RECENT = 16
_SPEAK_OF_LOAD = 64  # after a pause longer than these or more took to come, they say nothing of the load
_NEW = 8  # of these, after how many the answer is looked for anew
_STEPS: FloatArray = np.array([1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0])  # lengths tried, in fixed prices
# Of the time that steps leave to requests, what is planned with: arrivals come in bursts. 0.6 kept as many.
_PLANNED = 0.5
_EASY = 0.85  # of it, below which all fit easily
_IN_TIME, _SHARPNESS = 0.75, 3.0  # of its time, what an answer's steps may take; the rest is waiting and reading
_STEP_MEMORY = 0.02  # of the newest step, in the mean


class Answers:
    """Attributes:
    seconds_per_token: of an answer, in steps in which requests decode, in the mean; 0 before the first.
    """

    def __init__(self, remaining: RemainingTokens) -> None:
        self.remaining = remaining
        self.seconds_per_token = 0.0
        self._tokens_per_step = 1.0  # of a decode, in the mean
        # When each came, unread tokens, tokens of its answer in the median, and seconds in all.
        self._recent: deque[tuple[float, float, float, float]] = deque(maxlen=_RECENT)
        self._new, self._step_s = 0, inf

    def left(self, class_index: int, predicted_output_tokens: float | None, made: int = 0) -> Left:
        """Tokens that an answer has left that has made so many."""
        return self.remaining.left(class_index, predicted_output_tokens, made)

    def come(self, arrival_s: float, ends_by_s: float, unread_tokens: int, left: Left) -> None:
        """A request has come whose last token is due by then."""
        if ends_by_s > arrival_s:
            if len(self._recent) >= _SPEAK_OF_LOAD and self._follows_a_pause(arrival_s):
                self._recent.clear()
                self._step_s = inf
            self._recent.append((arrival_s, unread_tokens, left.median, ends_by_s - arrival_s))
            self._new += 1

    def _follows_a_pause(self, arrival_s: float) -> bool:
        first_s, last_s = self._recent[0][0], self._recent[-1][0]
        return arrival_s - last_s > last_s - first_s

    def observe(self, result: StepResult) -> None:
        self.remaining.observe(result)
        if result.decode_requests and result.tells_time:
            weight = _STEP_MEMORY if self.seconds_per_token else 1.0
            tokens = 1.0 + result.accepted_tokens / result.decode_requests
            self._tokens_per_step += weight * (tokens - self._tokens_per_step)
            self.seconds_per_token += weight * (result.step_s / tokens - self.seconds_per_token)

    def look_at(self, running: RunningRequests) -> bool:
        """At those that run. Returns whether any whole answer is due by a time."""
        self.remaining.refresh(running)
        return bool(np.isfinite(running.ends_by_s).any())

    def step_s(self, now_s: float, times: StepTimes, longest_s: float) -> float:
        """Seconds that steps may take.

        Args:
            longest_s: of a full one.
        """
        if len(self._recent) < _LEAST_RECENT:
            return longest_s
        if self._new >= _NEW:
            self._new, self._step_s = 0, self._best_step_s(now_s, times, longest_s)
        return min(self._step_s, longest_s)

    def _best_step_s(self, now_s: float, times: StepTimes, longest_s: float) -> float:
        arrival_s, unread, tokens, within_s = np.array(self._recent).T
        answer = tokens / self._tokens_per_step  # in steps
        law = times.mixed
        # A fit of steps that hardly differ may give a fixed price to the rest, and leave none.
        fixed_s = max(law.overhead_s, times.decode.overhead_s, LEAST_STEP_S)
        cost_s = unread * law.prefill_s + answer * (law.decode_s + law.kv_s * (unread + 0.5 * tokens))
        cheapest = cost_s.argsort()
        # Seconds of the engine that each and all before it take of a second.
        each_s = cost_s[cheapest] / max(now_s - float(arrival_s.min()), 1e-3)
        before_s = each_s.cumsum() - each_s
        if each_s.sum() <= _EASY * (1.0 - fixed_s / longest_s):
            return inf
        steps_s = np.minimum(fixed_s * _STEPS, longest_s)[:, None]
        fit = np.clip((_PLANNED * (1.0 - fixed_s / steps_s) - before_s) / np.maximum(each_s, 1e-12), 0.0, 1.0)
        pressed = answer[cheapest] * steps_s / (_IN_TIME * within_s[cheapest])
        # One that a full step binds now may be bound less by the next.
        return float(fixed_s * _STEPS[(fit / (1.0 + pressed**_SHARPNESS)).sum(axis=1).argmax()])
