"""Latency-bound batch and chunk for several service classes in one engine: the strictest class that runs decides.

Source: 001's Algorithm 2 (``SlaConstrained``) and its prefill-decode fusion (``ChunkSize``), which know one target. All
requests of a step wait for the whole step, so the class with the shortest target binds as long as one of it is in the
batch or at the head of the queue. Every target keeps a search of its own, and each of them learns from every step: what
a batch costs does not depend on whose limit made it so.

Nobody is evicted, so a batch that grew under a looser target is over the limit when a request of a strict class comes,
for as long as those in it take to end. Such requests start all the same, as many as their limit lets run of their own:
their tokens come slower until then, in place of none at all.
"""

from dataclasses import dataclass
from itertools import takewhile
from math import inf

import numpy as np

from policies.checks import require_each_positive
from policies.engine.chunk_size import ChunkSize, ChunkSizeConfig
from policies.engine.plans import capped_plan
from policies.engine.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.errors import ConfigError
from policies.types import BatchPolicy, BatchState, Limit, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTargetsConfig:
    """Mean seconds between tokens to hold, by class_index; None where a class has no target.

    Raises:
        ConfigError: there is no class, or a target is not positive.
    """

    itl_targets_s: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if not self.itl_targets_s:
            raise ConfigError("itl_targets_s must hold a positive number or None per class, got none")
        require_each_positive(self, "itl_targets_s")


class ClassTargets:
    """``SlaConstrained`` and ``ChunkSize`` under the target of the strictest class at hand."""

    def __init__(self, config: ClassTargetsConfig, learned: "ClassTargets | None" = None) -> None:
        """``learned``: one whose searches this one goes on with, where it has their targets; it must not be used any
        more."""
        self.config = config
        self._target_s = np.array([inf if target is None else target for target in config.itl_targets_s])
        targets = {target for target in config.itl_targets_s if target is not None}
        self._batch = {target: SlaConstrained(SlaConstrainedConfig(itl_target_s=target)) for target in targets}
        self._chunk = {target: ChunkSize(ChunkSizeConfig(itl_target_s=target)) for target in targets}
        if learned:
            self._batch |= {target: batch for target, batch in learned._batch.items() if target in targets}
            self._chunk |= {target: chunk for target, chunk in learned._chunk.items() if target in targets}

    def strictest_s(self, state: BatchState) -> float | None:
        """The shortest target among what runs and what would start next; None when no such class has one.

        With one class, indices are ignored, as everywhere.
        """
        if len(self.config.itl_targets_s) == 1:
            return self.config.itl_targets_s[0]
        at_hand = state.running.class_index
        if state.waiting:
            at_hand = np.append(at_hand, state.waiting[0].class_index)
        shortest = float(self._target_s[at_hand].min()) if len(at_hand) else inf
        return shortest if shortest < inf else None

    def batch_size(self, state: BatchState) -> int:
        """Requests that the strictest class lets run."""
        target = self.strictest_s(state)
        return state.slots if target is None else min(state.slots, self._batch[target].limit)

    def plan(self, state: BatchState) -> StepPlan:
        target = self.strictest_s(state)
        if target is None:
            return capped_plan(state, state.slots, Limit.SLOTS)
        batch, chunk = self._batch[target], self._chunk[target]
        # With several classes the strictest may be another one after this step.
        steps = min(batch.steps_ahead(), chunk.steps_ahead()) if len(self._target_s) == 1 else 1
        plan = capped_plan(state, self._cap(state, target), Limit.SLA, steps)
        return plan._replace(max_prefill_tokens=chunk.chunk_tokens)

    def _cap(self, state: BatchState, target: float) -> int:
        """The limit; in a batch beyond it, what runs and who of this target may join from the head of the queue."""
        limit = self._batch[target].limit
        if state.running_count <= limit or len(self._target_s) == 1:
            return limit
        alike = int(np.count_nonzero(self._target_s[state.running.class_index] == target))
        head = takewhile(lambda request: self._target_s[request.class_index] == target, state.waiting)
        return state.running_count + max(0, min(limit - alike, sum(1 for _ in head)))

    def observe(self, result: StepResult) -> None:
        parts: list[BatchPolicy] = [*self._batch.values(), *self._chunk.values()]
        for part in parts:
            part.observe(result)
