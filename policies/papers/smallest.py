"""001's b = min(b_mem, b_SLA), for any policies."""

from policies.engine.plans import joined, narrowed_by, out_of_reach
from policies.errors import InputError
from policies.types import BatchPolicy, BatchState, StepPlan, StepResult


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

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``, of all of them."""
        return out_of_reach(self.policies)

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
