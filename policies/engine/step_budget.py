"""What a step may hold so that promised times per token are kept: prompt tokens, and requests.

Source: 001's b = min(b_mem, b_SLA) and its prefill-decode fusion, by the model of step times in place of a search: a
step's length is a budget. What decodes leave of the strictest promise that can still be kept goes to prompts. Nothing
is banked for later and no gaps are capped besides: neither gave more requests in time.

Steps that are believed a fifth too short cost a fifth of the requests in time, a quarter too long hardly any. So
predictions are lengthened by what they fell short of lately.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from math import floor, inf

import numpy as np

from policies.engine.lateness import running_late
from policies.engine.plans import STANDING_STEPS, capped_plan
from policies.types import BatchState, BoolArray, FloatArray, Limit, StepPlan, StepResult, StepTimes, chunk_kv_tokens

# Steps whose errors make the margin: a second or two of an engine with promises.
_ERROR_STEPS = 64
# Steps behind a queue that make the pace of reading: with 128 the requests in time were the same within half a point.
_PACE_STEPS = 32
# Of those errors, the one that counts, and the most that is believed of it.
_ERROR_QUANTILE, _MOST_MARGIN = 0.75, 0.25
# A promise that decodes alone break by more than this binds no step until they keep it again: to read nothing for its
# sake would help no request. The band keeps it from coming and going.
_BROKEN = 1.05
# Least tokens that a step reads of a prompt in progress: its blocks are held in vain until it has been read.
_LEAST_PROMPT_TOKENS = 16


class StepBudget:
    """Bounds steps by the strictest time per token that was promised to a running request and can still be kept."""

    def __init__(self, times: Callable[[], StepTimes | None]) -> None:
        """times: as learned so far; None while nothing is known."""
        self._times = times
        self._errors: deque[float] = deque(maxlen=_ERROR_STEPS)
        self._broken_s = 0.0  # promises up to here are given up
        self._planned_token_s: float | None = None
        self._read: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS)  # seconds, prompt tokens
        self.strictest_s: float = inf  # what binds

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds to read a prompt token: as the last plan lets steps read, or as they lately did behind a queue where
        that is slower, for slots and memory hold prompts back too. None while step times are not known."""
        planned = self._planned_token_s
        if planned is None or len(self._read) < _PACE_STEPS // 2:
            return planned
        tokens = sum([tokens for _, tokens in self._read])
        return max(planned, sum([step_s for step_s, _ in self._read]) / tokens) if tokens else planned

    @property
    def margin(self) -> float:
        """Share by which predictions are lengthened."""
        if not self._errors:
            return 0.0
        errors = sorted(self._errors)
        return min(max(0.0, errors[floor(_ERROR_QUANTILE * (len(errors) - 1))]), _MOST_MARGIN)

    def plan(self, state: BatchState) -> StepPlan:
        times = self._times()
        if times is None:
            return capped_plan(state, state.slots, Limit.SLOTS)
        running = state.running
        decoding = running.prefill_tokens_left == 0
        decodes = state.running_count - state.prefilling_count
        context = int(running.prompt_tokens[decoding].sum() + running.output_tokens[decoding].sum())
        longer = 1.0 + self.margin
        alone_s = longer * times.decode.step_s(decode_requests=decodes, kv_tokens=context) if decodes else 0.0
        promises = self._promises_s(state, decoding, alone_s)
        self.strictest_s = self._kept(promises, alone_s)
        promised = bool(np.isfinite(running.tpot_s).any()) or any(one.tpot_s < inf for one in state.waiting[:1])
        # A request that gets its first token in this step binds the next one.
        steps = 1 if promised and (state.prefilling_count or state.waiting_count) else STANDING_STEPS
        head_s = state.waiting[0].tpot_s if state.waiting else inf
        size = self._size(times, state, min(float(promises.min(initial=inf)), head_s) / longer)
        left, computed = _next_prompt(state)

        def step_s(tokens: int) -> float:
            """Seconds of a step with these prompt tokens; those beyond the next prompt are taken to read no context."""
            return times.step_s(
                prefill_tokens=tokens,
                decode_requests=decodes,
                kv_tokens=context,
                prefill_kv_tokens=chunk_kv_tokens(min(tokens, left), computed),
            )

        full = state.max_batch_tokens
        if self.strictest_s == inf:
            self._planned_token_s = longer * step_s(full) / full
            return capped_plan(state, size, Limit.SLA if size < state.slots else Limit.SLOTS, steps=steps)
        tokens = bisect_right(range(1, full + 1), self.strictest_s / longer, key=step_s)
        if state.prefilling_count or not state.cuts_prompts:
            tokens = max(tokens, _LEAST_PROMPT_TOKENS)
        self._planned_token_s = self.strictest_s / max(tokens, _LEAST_PROMPT_TOKENS)
        plan = capped_plan(state, size, Limit.SLA, steps=steps)
        return plan._replace(max_prefill_tokens=tokens)

    def _promises_s(self, state: BatchState, decoding: BoolArray, alone_s: float) -> FloatArray:
        """Times per token promised to requests that decode and are not late, shape (promises,)."""
        kept = decoding & np.isfinite(state.running.tpot_s)
        if kept.any():
            kept &= ~running_late(state.running, state.now_s, alone_s)
        return np.asarray(state.running.tpot_s[kept])

    def _kept(self, promises_s: FloatArray, alone_s: float) -> float:
        """The shortest of these that decodes alone do not break; inf where there is none."""
        broken = (promises_s * _BROKEN < alone_s) | ((promises_s <= self._broken_s) & (promises_s < alone_s))
        self._broken_s = float(promises_s[broken].max(initial=0.0))
        return float(promises_s[~broken].min(initial=inf))

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
        if not result.waiting_count and result.running_count < result.max_batch_size:
            self._read.clear()
        elif result.tells_time:
            self._read.append((result.step_s, result.prefill_tokens))
        if not result.decode_requests or not result.tells_time or (times := self._times()) is None:
            return
        predicted_s = times.step_s(
            prefill_tokens=result.prefill_tokens,
            decode_requests=result.decode_requests,
            kv_tokens=result.kv_tokens,
            prefill_kv_tokens=result.prefill_kv_tokens,
        )
        if predicted_s > 0.0:
            self._errors.append(result.step_s / predicted_s - 1.0)


def _next_prompt(state: BatchState) -> tuple[int, int]:
    """Tokens of the prompt that is read next: those left to read, and those computed."""
    running = state.running
    if state.prefilling_count:
        row = int((running.prefill_tokens_left > 0).argmax())
        left = int(running.prefill_tokens_left[row])
        return left, int(running.prompt_tokens[row] + running.output_tokens[row]) - left
    head = state.waiting[0] if state.waiting else None
    return (head.prefill_tokens, head.cached_tokens) if head else (0, 0)
