"""The mean time between tokens of requests that were promised one: as it was planned, and as it came."""

from collections import deque
from math import inf
from typing import Any

from deployments.engines.vllm.scheduler.snapshot import Known, StepSeconds
from policies.types import StepResult


class _OfClass:
    """How many requests of a class have ended, how many of them missed the mean that they were promised, and sums of
    their means: promised, believed when steps were planned, in steps, and as tokens came."""

    def __init__(self) -> None:
        self.requests = self.missed = 0
        self.promised_s = self.believed_s = self.in_steps_s = self.came_s = 0.0

    def add(self, known: Known, since: StepSeconds, now: StepSeconds, last_token_s: float, gaps: int) -> None:
        came_s = (last_token_s - known.first_token_s) / gaps
        self.requests += 1
        self.missed += came_s > known.tpot_s
        self.promised_s += known.tpot_s
        self.believed_s += (now.believed_s - since.believed_s) / gaps
        self.in_steps_s += (now.in_steps_s - since.in_steps_s) / gaps
        self.came_s += came_s


class PromisedGaps:
    """Adds up steps, and looks at a request twice, after its first token and at its end: a step costs the same however
    many run."""

    def __init__(self) -> None:
        self._first: deque[tuple[int, Known]] = deque()  # with the number of the step that made it
        self._leaving: list[tuple[Known, int]] = []  # with its tokens
        self._steps = 0
        self._seconds = StepSeconds(0.0, 0.0)
        self._of_class: dict[str, _OfClass] = {}

    def has_first_token(self, known: Known, step: int) -> None:
        """step: the number of the step that made it, from 1 on, of all that were or will be told."""
        if known.tpot_s < inf:
            self._first.append((step, known))

    def leaves(self, known: Known, output_tokens: int) -> None:
        """Its answer is whole with the step that is told next."""
        if known.tpot_s < inf:
            self._leaving.append((known, output_tokens))

    def step(self, result: StepResult, *, between_s: float, believed_s: float) -> None:
        """A step has ended.

        Args:
            between_s: of its seconds, those before its begin.
            believed_s: what it was planned to take.
        """
        self._steps += 1
        before = self._seconds
        self._seconds = now = StepSeconds(before.believed_s + believed_s, before.in_steps_s + result.step_s - between_s)
        while self._first and self._first[0][0] <= self._steps:
            self._first.popleft()[1].at_first = now
        for known, output_tokens in self._leaving:
            if known.at_first is not None and output_tokens > 1:
                of_class = self._of_class.setdefault(known.slo_class, _OfClass())
                of_class.add(known, known.at_first, now, result.now_s, output_tokens - 1)
        self._leaving.clear()

    def numbers(self) -> dict[str, dict[str, Any]]:
        """By class: requests, those of them that missed their mean, and sums of means in seconds."""
        return {name: dict(vars(of_class)) for name, of_class in self._of_class.items()}
