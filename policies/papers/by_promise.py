"""A policy with a target, for whatever times per token were promised: one policy for each promise.

What is learned of one target says little of another, so each has a policy of its own, and those of requests that run,
and of the next one, decide together. A target that nobody was promised bounds nothing.
"""

from collections import OrderedDict
from collections.abc import Callable
from math import inf

import numpy as np

from policies.engine.plans import STANDING_STEPS, capped_plan, joined, out_of_reach
from policies.types import BatchPolicy, BatchState, Limit, StepPlan, StepResult, Targeted

# Promises that are remembered, the latest ones. A class has one, and requests of their own rarely bring more.
_REMEMBERED = 16


class ByPromise:
    """Plans by the policies of all times per token that running requests and the next one were promised."""

    def __init__(self, policy_of: Callable[[float], BatchPolicy]) -> None:
        """policy_of: a new policy that holds this target, s."""
        self._policy_of = policy_of
        self._known: OrderedDict[float, BatchPolicy] = OrderedDict()
        self._present: dict[float, BatchPolicy] = {}

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``, of those that decide."""
        return out_of_reach(self._present.values())

    @property
    def strictest_s(self) -> float:
        """The least target that decides and is within reach; inf where there is none."""
        return min([target_s for target_s, policy in self._present.items() if not _lets_go(policy)], default=inf)

    def plan(self, state: BatchState) -> StepPlan:
        self._present = {target_s: self._of(target_s) for target_s in _promised(state)}
        if not self._present:
            return capped_plan(state, state.slots, Limit.SLOTS, steps=STANDING_STEPS)
        return joined(state, [policy.plan(state) for policy in self._present.values()])

    def observe(self, result: StepResult) -> None:
        for policy in self._present.values():
            policy.observe(result)

    def _of(self, target_s: float) -> BatchPolicy:
        policy = self._known.pop(target_s, None) or self._policy_of(target_s)
        self._known[target_s] = policy
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return policy


def _lets_go(policy: BatchPolicy) -> bool:
    return isinstance(policy, Targeted) and policy.out_of_reach is not None


def _promised(state: BatchState) -> list[float]:
    promises = set(np.unique(state.running.tpot_s).tolist()) | {one.tpot_s for one in state.waiting[:1]}
    return sorted(promises - {inf})
