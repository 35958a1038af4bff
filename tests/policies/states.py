"""What engine policies see, built from the few values that a test is about."""

from typing import Any

from policies.types import (
    BatchState,
    FinishedRequest,
    Phase,
    RequestView,
    RunningRequests,
    StepCoefficients,
    StepResult,
    StepTimes,
)


def state_of(*, waiting: tuple[RequestView, ...] = (), **fields: Any) -> BatchState:
    """An idle engine with room for everybody."""
    state = BatchState(
        now_s=0.0,
        running=RunningRequests.empty(),
        waiting=waiting,
        waiting_count=len(waiting),
        slots=256,
        free_blocks=10_000,
        total_blocks=20_000,
        block_size=16,
        max_batch_tokens=8192,
        departed=0,
    )
    return state._replace(**fields)


def batch_of(*, decoding: int = 0, reading: int = 0, prompt_tokens: int = 100, unread: int = 50) -> RunningRequests:
    """Requests that decode, after ten tokens, and behind them some whose prompts are in progress."""
    return RunningRequests.of(
        prompt_tokens=[prompt_tokens] * (decoding + reading),
        output_tokens=[10] * decoding + [0] * reading,
        prefill_tokens_left=[0] * decoding + [unread] * reading,
    )


def queue_of(count: int, prompt_tokens: int = 100, **fields: Any) -> tuple[RequestView, ...]:
    told = {"arrival_s": 0.0, "prompt_tokens": prompt_tokens, **fields}
    return tuple(RequestView(f"w{n}", **told) for n in range(count))


def result_of(*, prefill_tokens: int = 0, decode_requests: int = 0, **fields: Any) -> StepResult:
    """A step in which all that run decode, in 10 ms."""
    result = StepResult(
        now_s=0.0,
        step_s=0.01,
        phase=Phase.MIXED,
        prefill_tokens=prefill_tokens,
        prefill_requests=int(prefill_tokens > 0),
        decode_requests=decode_requests,
        kv_tokens=0,
        max_batch_size=256,
        running_count=decode_requests,
        waiting_count=0,
    )
    return result._replace(**fields)


def answers_of(*output_tokens: int, prompt_tokens: int = 10, class_index: int = 0) -> tuple[FinishedRequest, ...]:
    return tuple(FinishedRequest(prompt_tokens, tokens, class_index) for tokens in output_tokens)


def same_times(**coefficients: float) -> StepTimes:
    """One form for every kind of step."""
    form = StepCoefficients(**coefficients)
    return StepTimes(prefill=form, decode=form, mixed=form)
