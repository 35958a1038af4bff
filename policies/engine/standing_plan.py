"""When a driver asks its policy again: the one rule, for all drivers.

A plan stands for a bounded number of steps and of departures, which it names itself. It falls at once when something
happens that no plan reckons with: a preemption, a step that could hold nothing, a prompt in progress beside a phase,
a request that comes while a prompt is in progress that may be held back for it, and a request that comes while no other
waits, where phases leave slots free on purpose or it was promised a time: it would start within a budget of tokens that
was made for the promises of others.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from policies.types import BatchState, Phase, StepPlan

T = TypeVar("T")


class StandingPlan(Generic[T]):
    """A plan, and how much of it is left.

    Attributes:
        held: prompts in progress that its steps leave out.
    """

    def __init__(self, plan: StepPlan, state: BatchState, in_the_way: Sequence[T] = ()) -> None:
        """Its first step is about to be taken.

        Args:
            state: what it was planned for.
            in_the_way: prompts in progress that had better wait for others, as the queue found.
        """
        self.plan = plan
        self.held: Sequence[T] = in_the_way if in_the_way and _head_fits(state, plan) else ()
        self._steps_left = 0 if self.held else plan.steps - 1  # whether requests wait for them is judged anew
        self._starts_left = plan.starts
        self._departures = state.departed + plan.departures
        # In a phase of decodes a lone arrival is read at once, one more behind a queue changes nothing.
        self._starts_next = state.waiting_count <= state.free_slots
        self._awaits_arrivals = (plan.phase is Phase.DECODE and self._starts_next) or state.prefilling_count > 0

    def stands(self, *, departed: int, prompts_in_progress: bool) -> bool:
        """Whether another step may be taken by it; if so, that step is counted.

        departed: as in ``BatchState``.
        """
        disturbed = prompts_in_progress and self.plan.phase is not Phase.MIXED
        if self._steps_left < 1 or disturbed or departed > self._departures:
            return False
        self._steps_left -= 1
        return True

    def cap(self, running: int) -> int:
        """Most requests that may run in the next step, given how many run now."""
        if self.plan.phase is Phase.DECODE:
            return 0
        return int(min(self.plan.max_batch_size, running + self._starts_left))

    def arrived(self, *, promised: bool = False) -> None:
        """A request has come to the queue.

        Args:
            promised: whether it was promised a first token or a time per token.
        """
        if self._awaits_arrivals or (promised and self._starts_next):
            self._steps_left = 0

    def taken(self, *, started: int, preempted: bool, empty: bool) -> None:
        """A step has been scheduled: how many requests it started, whether it preempted any, whether it was empty."""
        self._starts_left -= started
        if preempted or empty:
            self._steps_left = 0


def _head_fits(state: BatchState, plan: StepPlan) -> bool:
    """Whether the next step may start the next request: else holding a prompt back would serve none."""
    starts = plan.phase is not Phase.DECODE and plan.starts >= 1
    has_slot = state.running_count < min(plan.max_batch_size, state.slots)
    return bool(state.waiting) and starts and has_slot and state.waiting[0].prefill_tokens <= state.free_tokens
