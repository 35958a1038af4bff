"""Steps of an engine in flight, and ended steps until their results are asked for.

What a step holds is counted when it has just been scheduled, while it is in the processor's caches: the engine waits
for whatever is done when it comes back, so then little more is noted than the time, and outputs of steps are not kept,
for vLLM makes the next ones in their place. Results are made, and departures are looked at, when results are asked
for, several together.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from policies.types import FinishedRequest, Phase, StepPlan, StepResult

# What a step holds: a ``StepResult`` from `phase` to `encoder_tokens`.
_Content = tuple[Phase, int, int, int, int, int, int, int, int, int, int, int]


class _Ended(NamedTuple):
    """A step, how many of its drafted tokens proved right, when it ended, how long it took, how much of that was before
    its begin, and which requests departed with it."""

    content: _Content
    accepted_tokens: int
    ended_s: float
    step_s: float
    between_s: float
    departed: list[Request | FinishedRequest]


class StepAccount:
    """Takes steps in the order in which they are scheduled, which is that in which they end.

    Attributes:
        noted: how many have ended so far.
    """

    def __init__(self, now_s: float) -> None:
        # Output, time of the begin, content, and first tokens of each.
        self._on_their_way: deque[tuple[SchedulerOutput, float, _Content, Sequence[str]]] = deque()
        self._ended: list[_Ended] = []
        self._departed: list[Request | FinishedRequest] = []
        self.noted = 0
        self._last_end_s = now_s
        self._goes_on = False  # whether requests ran on after the last end
        self._mean_context_tokens = 0.0  # of those that decode after the last step that was scheduled

    @property
    def in_flight(self) -> bool:
        return bool(self._on_their_way)

    def unfinished(self, now_s: float) -> tuple[StepResult, ...]:
        """Steps in flight, with the seconds that they have taken by now."""
        since_s, found = self._last_end_s, list[StepResult]()
        for _, began_s, content, _ in self._on_their_way:
            since_s = max(since_s, began_s)
            found.append(StepResult(now_s, now_s - since_s, *content))
            since_s = now_s  # the next one has not begun
        return tuple(found)

    def scheduled(
        self,
        output: SchedulerOutput,
        plan: StepPlan,
        began_s: float,
        prefills: Sequence[str],
        joining: Mapping[str, int],
        prefill_kv_tokens: int,
        mean_context_tokens: float | None,
        running_count: int,
        waiting_count: int,
        encoder_tokens: int = 0,
    ) -> None:
        """A step has been scheduled.

        Args:
            began_s: when that was begun.
            prefills: ids of those that got a part of their prompt.
            joining: tokens in the cache, after it, of those whose prompt ends with it, by id.
            prefill_kv_tokens: as `StepResult` has it.
            mean_context_tokens: of those that decode before it; None where it follows from the step before.
            running_count, waiting_count: after admission.
            encoder_tokens: as `StepResult` has it.
        """
        if mean_context_tokens is not None:
            self._mean_context_tokens = mean_context_tokens
        scheduled = output.num_scheduled_tokens
        decodes, prefill_tokens = len(scheduled) - len(prefills), 0
        if prefills:
            prefill_tokens = sum([scheduled[request_id] for request_id in prefills])
        kv_tokens = round(self._read_tokens(joining.values(), decodes))
        content = (
            plan.phase, prefill_tokens, len(prefills), decodes, kv_tokens,
            plan.max_batch_size, running_count, waiting_count, len(output.preempted_req_ids or ()), prefill_kv_tokens,
            sum(map(len, output.scheduled_spec_decode_tokens.values())), encoder_tokens,
        )  # fmt: skip
        if scheduled:
            self._on_their_way.append((output, began_s, content, tuple(joining)))
        else:  # nothing will come back that tells more
            self._end(content, 0, self._last_end_s, 0.0, 0.0)

    def departed(self, request: Request | FinishedRequest) -> None:
        """It left with the step that ends next. A request is held until results are asked for, and must not change."""
        self._departed.append(request)

    def renumber(self, class_index: Sequence[int]) -> None:
        """Classes have other indices from now on.

        Args:
            class_index: the new one for each of before.
        """
        self._departed = [
            one if isinstance(one, Request) else one._replace(class_index=class_index[one.class_index])
            for one in self._departed
        ]

    def ended(self, output: SchedulerOutput, now_s: float, *, goes_on: bool, accepted_tokens: int = 0) -> Sequence[str]:
        """Its results have come. Steps from before a change of mode were never scheduled here.

        While requests run, what passes between the results of a step and the begin of the next one belongs to that:
        clients wait for it too.

        Args:
            goes_on: whether requests run after it.
            accepted_tokens: drafted tokens that proved right.

        Returns:
            Ids of those whose prompt ended with it.
        """
        first: Sequence[str] = ()
        if self._on_their_way and self._on_their_way[0][0] is output:
            _, began_s, content, first = self._on_their_way.popleft()
            began_s = max(began_s, self._last_end_s)
            between_s = began_s - self._last_end_s if self._goes_on else 0.0
            self._end(content, accepted_tokens, now_s, max(0.0, between_s + now_s - began_s), between_s)
        self._last_end_s, self._goes_on = now_s, goes_on
        return first

    def rests(self) -> None:
        """Steps are taken that are not told of, or none at all."""
        self._goes_on = False

    def _end(self, content: _Content, accepted_tokens: int, ended_s: float, step_s: float, between_s: float) -> None:
        self.noted += 1
        self._ended.append(_Ended(content, accepted_tokens, ended_s, step_s, between_s, self._departed))
        self._departed = []

    def _read_tokens(self, joining: Collection[int], decodes: int) -> float:
        """Context that the decodes of a step read, and what follows from it for the next step: everybody has got one
        token more, and those that end are taken to have held as much as the others."""
        kv_tokens = decodes * self._mean_context_tokens
        if requests := decodes + len(joining):
            self._mean_context_tokens = (kv_tokens + sum(joining)) / requests + 1.0
        return kv_tokens

    def results(self, record: Callable[[Request], FinishedRequest]) -> Iterator[tuple[StepResult, float]]:
        """Results of the ended steps, each once, with the seconds of each that were before its begin; ``record`` is
        called once for every request that departed."""
        ended, self._ended = self._ended, []
        for content, accepted_tokens, ended_s, step_s, between_s, departed in ended:
            finished = tuple([record(one) if isinstance(one, Request) else one for one in departed])
            yield StepResult(ended_s, step_s, *content, accepted_tokens, finished), between_s
