"""Plain vLLM: the baseline that everything is compared with."""

from math import ceil

from policies.engine.plans import STANDING_STEPS, capped_plan, mean_known_prompt_tokens, unshared_fraction
from policies.types import BatchState, Limit, StepPlan, StepResult


class Stock:
    """The engine's own behaviour: fill the slots, mix prefill and decode. The baseline everything is compared with."""

    def plan(self, state: BatchState) -> StepPlan:
        return capped_plan(state, state.slots, Limit.SLOTS, steps=STANDING_STEPS)

    def batch_size(self, state: BatchState) -> int:
        """Requests that may run at once as things stand: the engine starts those whose prompts fit now."""
        tokens = unshared_fraction(state) * mean_known_prompt_tokens(state)
        return min(state.slots, state.running_count + state.free_blocks // max(1, ceil(tokens / state.block_size)))

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""
