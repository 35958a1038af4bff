"""What plans of engine steps have in common."""

from policies.types import BatchState, Limit, Phase, StepPlan

# Most steps that a plan is kept for: what is shown of a batch meanwhile is no older than this.
KEPT_STEPS = 16
# Share of the batch that leaves before blocks are counted again where they are short.
LEFT_SHARE = 1 / 24
# Steps whose lengths and times are learned together: the code for it is not in the processor's caches between two steps
# of an engine, and fetching it costs more than learning. Whoever decides by them reads what there is before.
READ_STEPS = 32


def capped_plan(state: BatchState, cap: int, limited_by: Limit, steps: int = 1) -> StepPlan:
    """A mixed step of at most ``cap`` requests, never less than one and never more than the slots."""
    size = max(1, min(cap, state.slots))
    room = max(0, size - state.running_count)
    return StepPlan(
        phase=Phase.MIXED,
        max_batch_size=size,
        limited_by=limited_by if size < state.slots else Limit.SLOTS,
        max_batch_tokens=state.max_batch_tokens,
        admit=tuple([request.request_id for request in state.waiting[:room]]),
        steps=steps,
    )


def mean_known_prompt_tokens(state: BatchState) -> float:
    """Mean prompt of the requests that run or could start next; 0 when there are none."""
    upcoming = state.waiting[: max(1, state.free_slots)]
    requests = state.running_count + len(upcoming)
    total = state.running.total_prompt_tokens + sum(request.prompt_tokens for request in upcoming)
    return total / requests if requests else 0.0


def unshared_fraction(state: BatchState) -> float:
    """Share of the running prompts' tokens that is not counted twice because several requests share the blocks."""
    prompts = state.running.total_prompt_tokens
    if not prompts:
        return 1.0
    shared = state.running.computed_tokens - (state.capacity_tokens - state.free_tokens)
    return min(1.0, max(0.0, 1.0 - shared / prompts))
