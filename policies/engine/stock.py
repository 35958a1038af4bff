"""Plain vLLM: the baseline that everything is compared with."""

from policies.engine.plans import STANDING_STEPS, capped_plan
from policies.types import BatchState, Limit, StepPlan, StepResult


class Stock:
    """The engine's own behaviour: fill the slots, mix prefill and decode. The baseline everything is compared with."""

    def plan(self, state: BatchState) -> StepPlan:
        return capped_plan(state, state.slots, Limit.SLOTS, steps=STANDING_STEPS)

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
