"""What a step may hold so that promised times per token are kept: prompt tokens, and requests.

Source: 001's b = min(b_mem, b_SLA) and its prefill-decode fusion, by the model of step times in place of a search: a
step's length is a budget. What decodes leave of the promises that can still be kept goes to prompts. A promise is on
the mean of an answer, so each request has an account: what its steps have taken too much is paid back, and what they
have left is spent where prompts are read in one step of several (``policies.engine.cycles``).

Steps that are believed too short cost promises, steps that are believed too long hardly any. So predictions are
lengthened by what they fell short of lately.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from functools import partial
from math import floor, inf
from typing import Any

import numpy as np

from policies.engine.answers import Answers
from policies.engine.cycles import best_cycle
from policies.engine.lateness import running_late
from policies.engine.plans import STANDING_STEPS, capped_plan
from policies.engine.reading_pace import ReadingPace
from policies.lengths.remaining import RemainingTokens
from policies.types import (
    BatchState,
    BoolArray,
    FloatArray,
    Limit,
    RunningRequests,
    StepPlan,
    StepResult,
    StepTimes,
    chunk_kv_tokens,
)

# Steps whose errors make the margin: a second or two of an engine with promises.
_ERROR_STEPS = 64
_ERROR_QUANTILE = 0.75  # of those errors, the one that counts
_TOLD_QUANTILES = (0.5, _ERROR_QUANTILE, 0.9)
# A promise that decodes alone break by more than this binds no step until they keep it again: to read nothing for its
# sake would help no request. The band keeps it from coming and going.
_BROKEN = 1.05
# Least tokens that a step reads of a prompt in progress: its blocks are held in vain until it has been read.
_LEAST_PROMPT_TOKENS = 16
# A prompt without a promise waits this many times as long as its images take for the accounts to have them.
_ENCODED_STEPS = 10.0
# Of what a step that reads may take, the share of which it makes do, for predictions err.
_FULL_ENOUGH = 0.98


class StepBudget:
    """Bounds steps by the strictest time per token that was promised to a running request and can still be kept.

    Attributes:
        answers: whole answers by a time.
        strictest_s: the time per token that binds; inf where none does.
    """

    def __init__(self, times: Callable[[], StepTimes | None], answers: Answers | None = None) -> None:
        """times: as learned so far; None while nothing is known."""
        self._times = times
        self.answers = answers or Answers(RemainingTokens())
        self._errors: deque[float] = deque(maxlen=_ERROR_STEPS)
        self._broken_s = 0.0  # promises up to here are given up
        self._planned_token_s: float | None = None
        self._pace = ReadingPace()
        self.strictest_s: float = inf
        self.believed_step_s: float | None = None  # the step observed last, with its margin

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds to read a prompt token: as the last plan lets steps read, or as they lately did behind a queue where
        that is slower, for slots and memory hold prompts back too. None while step times are not known."""
        return None if self._planned_token_s is None else self._pace.at_least(self._planned_token_s)

    @property
    def margin(self) -> float:
        """Share by which predictions are lengthened."""
        return max(0.0, self._error(_ERROR_QUANTILE)) if self._errors else 0.0

    def _error(self, quantile: float) -> float:
        errors = sorted(self._errors)
        return errors[floor(quantile * (len(errors) - 1))]

    def told_errors(self) -> dict[str, Any]:
        """The margin, and percentiles of the errors behind it; nothing before the first."""
        if not self._errors:
            return {}
        errors = {f"p{100 * each:g}": self._error(each) for each in _TOLD_QUANTILES}
        return {"step_margin": self.margin, "step_errors": errors}

    def plan(self, state: BatchState) -> StepPlan:
        times = self._times()
        if times is None:
            return capped_plan(state, state.slots, Limit.SLOTS)
        running = state.running
        decoding = running.prefill_tokens_left == 0
        decodes = _decodes(state.running_count - state.prefilling_count, state.draft_tokens, times)
        context = int(running.prompt_tokens[decoding].sum() + running.output_tokens[decoding].sum())
        longer = 1.0 + self.margin
        alone_s = longer * times.decode.step_s(decode_requests=decodes, kv_tokens=context) if decodes else 0.0
        begins_s = state.now_s + _in_flight_s(state, times, longer)
        promises, accounts = self._promises_s(state, decoding, begins_s, alone_s)
        kept = self._kept(promises, alone_s)
        answers_due = self.answers.look_at(running)
        promised = answers_due or bool(np.isfinite(running.tpot_s).any())
        promised |= any(min(one.tpot_s, one.ends_by_s) < inf for one in state.waiting[:1])
        # A request that gets its first token in this step binds the next one.
        steps = 1 if promised and (state.prefilling_count or state.waiting_count) else STANDING_STEPS
        head_s = state.waiting[0].tpot_s * _mean_tokens(running) if state.waiting else inf
        size = self._size(times, state, min(float(promises.min(initial=inf)), head_s) / longer)
        left, computed = _next_prompt(state)

        def step_s(tokens: int, encoder_tokens: int = 0) -> float:
            """Seconds of a step with these prompt tokens; those beyond the next prompt are taken to read no context."""
            return times.step_s(
                prefill_tokens=tokens,
                decode_requests=decodes,
                kv_tokens=context,
                prefill_kv_tokens=chunk_kv_tokens(min(tokens, left), computed),
                encoder_tokens=encoder_tokens,
            )

        full = state.max_batch_tokens
        answers_s = self.answers.step_s(state.now_s, times, longer * step_s(full)) if answers_due else inf
        self.strictest_s = float(min(promises[kept].min(initial=inf), answers_s))
        if self.strictest_s == inf:
            self._planned_token_s = longer * step_s(full) / full
            return capped_plan(state, size, Limit.SLA if size < state.slots else Limit.SLOTS, steps=steps)

        def fits(within_s: float, grain: int = 1, encoder_tokens: int = 0) -> int:
            within_s = min(within_s, answers_s) / longer
            key = partial(step_s, encoder_tokens=encoder_tokens)
            return grain * bisect_right(range(grain, full + 1, grain), within_s, key=key)

        allowed_s = float(accounts[kept].min(initial=inf))
        tokens = self._readable(state, begins_s, alone_s, allowed_s, fits)
        if tokens and state.encoder_tokens and state.cuts_prompts and not state.prefilling_count:
            beside = fits(allowed_s, encoder_tokens=state.encoder_tokens)
            waits = _can_wait(state, begins_s, longer * step_s(tokens, state.encoder_tokens))
            tokens = min(tokens, beside) if beside >= _LEAST_PROMPT_TOKENS or waits else tokens
            tokens *= tokens >= _LEAST_PROMPT_TOKENS
        plan = capped_plan(state, size, Limit.SLA, steps=steps)
        return plan._replace(max_prefill_tokens=tokens)

    def _readable(
        self, state: BatchState, begins_s: float, alone_s: float, allowed_s: float, fits: Callable[..., int]
    ) -> int:
        """Prompt tokens of the next step.

        Args:
            begins_s: when it does.
            allowed_s: what it may take by the accounts of those that decode.
            fits: as of ``best_cycle``, in grains of so many tokens.
        """
        cycle = best_cycle(
            state.unread,
            begins_s,
            promised_s=self.strictest_s,
            alone_s=alone_s,
            fits=partial(fits, grain=_LEAST_PROMPT_TOKENS),
            least_tokens=_LEAST_PROMPT_TOKENS,
        )
        self._planned_token_s = cycle.seconds_per_token
        if cycle.steps == 1:  # longer steps would gain nothing
            allowed_s = min(allowed_s, self.strictest_s)
        tokens = fits(allowed_s)
        wanted = cycle.in_time_tokens or state.unread.late_tokens
        if cycle.steps > 1 and allowed_s < _FULL_ENOUGH * cycle.longest_s and tokens < wanted:
            return 0
        return max(tokens, _LEAST_PROMPT_TOKENS) if state.prefilling_count or not state.cuts_prompts else tokens

    def _promises_s(
        self, state: BatchState, decoding: BoolArray, begins_s: float, alone_s: float
    ) -> tuple[FloatArray, FloatArray]:
        """Of requests that decode and are not late: what the promised time per token leaves to a step in the mean, and
        to the next one so that the mean so far keeps it; both of shape (promises,)."""
        running = state.running
        kept = decoding & np.isfinite(running.tpot_s)
        if kept.any():
            kept &= ~running_late(running, begins_s, alone_s)
        per_token_s = running.tpot_s[kept]
        promises_s = np.asarray(per_token_s * running.tokens_per_step[kept])
        elapsed_s = np.fmax(begins_s - running.first_token_s[kept], 0.0)
        made = np.maximum(running.output_tokens[kept], 1) - 1
        return promises_s, np.asarray(per_token_s * made + promises_s - elapsed_s)

    def _kept(self, promises_s: FloatArray, alone_s: float) -> BoolArray:
        """Which of these decodes alone do not break."""
        broken = (promises_s * _BROKEN < alone_s) | ((promises_s <= self._broken_s) & (promises_s < alone_s))
        self._broken_s = float(promises_s[broken].max(initial=0.0))
        return np.asarray(~broken)

    def _size(self, times: StepTimes, state: BatchState, target_s: float) -> int:
        """Most requests whose step of decodes stays within the target.

        It holds while decodes alone break a promise, and for the next request, so that a batch that grew without a
        promise drains to where one can be kept. A target that not even one request could keep bounds nothing.
        """
        running = state.running
        context = running.computed_tokens / len(running) if len(running) else 0.0
        each_s = times.decode.decode_s + times.decode.kv_s * context
        left_s = target_s - times.decode.overhead_s
        if left_s < each_s or left_s >= each_s * state.slots:
            return state.slots
        return floor(left_s / each_s)

    def observe(self, result: StepResult) -> None:
        self.answers.observe(result)
        self._pace.observe(result)
        if not result.tells_time or (times := self._times()) is None:
            self.believed_step_s = None
            return
        predicted_s = times.step_s(
            prefill_tokens=result.prefill_tokens,
            decode_requests=_decodes(result.decode_requests, result.draft_tokens, times),
            kv_tokens=result.kv_tokens,
            prefill_kv_tokens=result.prefill_kv_tokens,
            encoder_tokens=result.encoder_tokens,
        )
        self.believed_step_s = (1.0 + self.margin) * predicted_s
        if result.decode_requests and predicted_s > 0.0:
            self._errors.append(result.step_s / predicted_s - 1.0)


def _decodes(requests: int, draft_tokens: int | None, times: StepTimes) -> float:
    """As many decodes with the mean of drafted tokens as take the time of these."""
    return requests if draft_tokens is None else (requests + draft_tokens) / times.decode.decode_tokens


def _mean_tokens(running: RunningRequests) -> float:
    """That a decode brings."""
    return float(running.tokens_per_step.mean()) if len(running) else 1.0


def _in_flight_s(state: BatchState, times: StepTimes, longer: float) -> float:
    """Seconds that steps in flight take yet; their tokens are made, as far as the state shows."""
    left_s = (
        longer
        * times.step_s(
            prefill_tokens=one.prefill_tokens,
            decode_requests=_decodes(one.decode_requests, one.draft_tokens, times),
            kv_tokens=one.kv_tokens,
            prefill_kv_tokens=one.prefill_kv_tokens,
            encoder_tokens=one.encoder_tokens,
        )
        - one.step_s
        for one in state.in_flight
    )
    return sum(max(0.0, each) for each in left_s)


def _can_wait(state: BatchState, begins_s: float, step_s: float) -> bool:
    """Whether the next prompt, whose images take a step of so many seconds, can wait until the accounts of those that
    decode have them: until its first token is due, and without one for as long as some such steps."""
    head = state.waiting[0]
    until_s = head.deadline_s if head.deadline_s < inf else head.arrival_s + _ENCODED_STEPS * step_s
    return begins_s + step_s < until_s


def _next_prompt(state: BatchState) -> tuple[int, int]:
    """Tokens of the prompt that is read next: those left to read, and those computed."""
    running = state.running
    if state.prefilling_count:
        row = int((running.prefill_tokens_left > 0).argmax())
        left = int(running.prefill_tokens_left[row])
        return left, int(running.prompt_tokens[row] + running.output_tokens[row]) - left
    head = state.waiting[0] if state.waiting else None
    return (head.prefill_tokens, head.cached_tokens) if head else (0, 0)
