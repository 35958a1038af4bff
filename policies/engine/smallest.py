"""001's b = min(b_mem, b_SLA), for any policies."""

from math import inf
from operator import attrgetter

from policies.errors import InputError
from policies.types import BatchPolicy, BatchState, Phase, StepPlan, StepResult

_cap_of = attrgetter("max_batch_size")


class Smallest:
    """001's b = min(b_mem, b_SLA), for any policies: the smallest cap counts, and what all admit, in the first's order.

    Each policy sees the state as the ones before it left it, with their cap as the slots and their admissions as the
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
            narrowed = _narrowed(narrowed, plans[-1])
            plans.append(policy.plan(narrowed))
        return _joined(state, plans)

    def observe(self, result: StepResult) -> None:
        for policy in self.policies:
            policy.observe(result)


def _narrowed(state: BatchState, plan: StepPlan) -> BatchState:
    returns = state.slots_return and plan.max_served == inf
    if plan.max_batch_size >= state.slots and len(plan.admit) == len(state.waiting) and returns == state.slots_return:
        return state
    waiting, slots = state.waiting[: len(plan.admit)], min(state.slots, plan.max_batch_size)
    if [request.request_id for request in waiting] != list(plan.admit):
        admitted = set(plan.admit)
        waiting = tuple([request for request in state.waiting if request.request_id in admitted])
    return state._replace(slots=slots, waiting=waiting, slots_return=returns)


def _joined(state: BatchState, plans: list[StepPlan]) -> StepPlan:
    tightest = min(plans, key=_cap_of)
    phases = [plan.phase for plan in plans if plan.phase is not Phase.MIXED]
    phase = phases[-1] if phases else Phase.MIXED
    admit = plans[-1].admit
    if phase is Phase.PREFILL and not admit and not state.prefilling_count:
        phase = Phase.DECODE  # a later cap took away what the phase was opened for
    return StepPlan(
        phase=phase,
        max_batch_size=tightest.max_batch_size,
        limited_by=tightest.limited_by,
        max_batch_tokens=min([p.max_batch_tokens for p in plans if p.phase is phase], default=state.max_batch_tokens),
        max_prefill_tokens=min(
            [p.max_prefill_tokens for p in plans if p.phase is phase and p.max_prefill_tokens is not None], default=None
        ),
        admit=admit,
        steps=min([plan.steps for plan in plans]),
        may_leave=min([plan.may_leave for plan in plans]),
        max_served=min([plan.max_served for plan in plans]),
    )
