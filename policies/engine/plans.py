"""What plans of engine steps have in common."""

from math import inf

from policies.types import BatchState, Limit, Phase, StepPlan

# A plan where nothing presses stands for 16 steps or until one in 24 has left: on a toy engine with eight loads that
# gave 0.9985 to 1.0034 of the throughput of planning at every step, and asks in a fifth to a third of the steps.
STANDING_STEPS = 16
STANDING_SHARE = 1 / 24


def capped_plan(state: BatchState, cap: int, limited_by: Limit, *, steps: int = 1, departures: float = inf) -> StepPlan:
    """A plan of mixed steps with at most ``cap`` running requests.

    Args:
        state: the engine before the step.
        cap: requests that may run at once; at least one and at most ``state.slots`` are planned.
        limited_by: which limit gave ``cap``; SLOTS is reported where the slots are the smaller limit.
        steps: as in ``StepPlan``.
        departures: as in ``StepPlan``.
    """
    size = max(1, min(cap, state.slots))
    binds = size < state.slots
    return StepPlan(
        phase=Phase.MIXED,
        max_batch_size=size,
        limited_by=limited_by if binds else Limit.SLOTS,
        max_batch_tokens=state.max_batch_tokens,
        starts=max(0, size - state.running_count) if binds else inf,
        steps=steps,
        departures=departures,
    )


def mean_known_prompt_tokens(state: BatchState) -> float:
    """Mean prompt length in tokens of the requests that run or could start next; 0 when there are none."""
    upcoming = state.waiting[: max(1, state.free_slots)]
    requests = state.running_count + len(upcoming)
    total = state.running.total_prompt_tokens + sum(request.prompt_tokens for request in upcoming)
    return total / requests if requests else 0.0


def unshared_fraction(state: BatchState) -> float:
    """Fraction of the running requests' prompt tokens that have KV blocks of their own.

    Requests with a common prefix share its blocks, so the blocks in use hold fewer tokens than the requests have.
    1.0 where none are shared.
    """
    prompts = state.running.total_prompt_tokens
    if not prompts:
        return 1.0
    shared = state.running.computed_tokens - (state.capacity_tokens - state.free_tokens)
    return min(1.0, max(0.0, 1.0 - shared / prompts))
