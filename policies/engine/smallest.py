"""001's b = min(b_mem, b_SLA), for any policies."""

from operator import attrgetter

from policies.errors import InputError
from policies.types import BatchPolicy, BatchState, Phase, StepPlan, StepResult

_cap_of = attrgetter("max_batch_size")


class Smallest:
    """001's b = min(b_mem, b_SLA), for any policies: the smallest of all caps, budgets and starts counts.

    Each policy sees the state as the ones before it left it, with their cap as the slots and whom they let start as the
    queue. So one that chooses phases belongs last: it then waits for as many requests as the others would really let
    in. Token budgets of mixed plans bind mixed steps only.
    """

    def __init__(self, *policies: BatchPolicy) -> None:
        """Raises InputError when there is no policy."""
        if not policies:
            raise InputError("Smallest needs at least one policy")
        self.policies = policies

    def plan(self, state: BatchState) -> StepPlan:
        plans = [self.policies[0].plan(state)]
        narrowed = state
        for policy in self.policies[1:]:
            narrowed = narrowed_by(narrowed, plans[-1])
            plans.append(policy.plan(narrowed))
        return joined(state, plans)

    def observe(self, result: StepResult) -> None:
        for policy in self.policies:
            policy.observe(result)


def narrowed_by(state: BatchState, plan: StepPlan) -> BatchState:
    """What is left for the policies after this plan."""
    if plan.max_batch_size >= state.slots and plan.starts >= len(state.waiting):
        return state
    waiting = state.waiting[: int(min(plan.starts, len(state.waiting)))]
    return state._replace(slots=min(state.slots, plan.max_batch_size), waiting=waiting)


def joined(state: BatchState, plans: list[StepPlan]) -> StepPlan:
    """What all of them allow."""
    tightest = min(plans, key=_cap_of)
    phases = [plan.phase for plan in plans if plan.phase is not Phase.MIXED]
    phase = phases[-1] if phases else Phase.MIXED
    starts = min([plan.starts for plan in plans])
    if phase is Phase.PREFILL and not starts and not state.prefilling_count:
        phase = Phase.DECODE  # a later cap took away what the phase was opened for
    return StepPlan(
        phase=phase,
        max_batch_size=tightest.max_batch_size,
        limited_by=tightest.limited_by,
        max_batch_tokens=min([p.max_batch_tokens for p in plans if p.phase is phase], default=state.max_batch_tokens),
        starts=0 if phase is Phase.DECODE else starts,
        steps=min([plan.steps for plan in plans]),
        departures=min([plan.departures for plan in plans]),
        max_prefill_tokens=min(
            [p.max_prefill_tokens for p in plans if p.phase is phase and p.max_prefill_tokens is not None], default=None
        ),
    )
