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

# What a step holds: a ``StepResult`` from `phase` to `prefill_kv_tokens`.
_Content = tuple[Phase, int, int, int, int, int, int, int, int, int]


class _Ended(NamedTuple):
    """A step, when it ended and how long it took, and which requests departed with it."""

    content: _Content
    ended_s: float
    step_s: float
    departed: list[Request | FinishedRequest]


class StepAccount:
    """Takes steps in the order in which they are scheduled, which is that in which they end."""

    def __init__(self, now_s: float) -> None:
        # Output, time of the begin, content, and first tokens of each.
        self._on_their_way: deque[tuple[SchedulerOutput, float, _Content, Sequence[str]]] = deque()
        self._ended: list[_Ended] = []
        self._departed: list[Request | FinishedRequest] = []
        self._last_end_s = now_s
        self._mean_context_tokens = 0.0  # of those that decode after the last step that was scheduled

    @property
    def in_flight(self) -> bool:
        return bool(self._on_their_way)

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
    ) -> None:
        """A step has been scheduled.

        Args:
            began_s: when that was begun.
            prefills: ids of those that got a part of their prompt.
            joining: tokens in the cache, after it, of those whose prompt ends with it, by id.
            prefill_kv_tokens: as `StepResult` has it.
            mean_context_tokens: of those that decode before it; None where it follows from the step before.
            running_count, waiting_count: after admission.
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
        )  # fmt: skip
        if scheduled:
            self._on_their_way.append((output, began_s, content, tuple(joining)))
        else:  # nothing will come back that tells more
            self._end(content, self._last_end_s, 0.0)

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

    def ended(self, output: SchedulerOutput, now_s: float) -> Sequence[str]:
        """Its results have come. Steps from before a change of mode were never scheduled here.

        Returns:
            Ids of those whose prompt ended with it.
        """
        first: Sequence[str] = ()
        if self._on_their_way and self._on_their_way[0][0] is output:
            _, began_s, content, first = self._on_their_way.popleft()
            self._end(content, now_s, max(0.0, now_s - max(began_s, self._last_end_s)))
        self._last_end_s = now_s
        return first

    def _end(self, content: _Content, ended_s: float, step_s: float) -> None:
        self._ended.append(_Ended(content, ended_s, step_s, self._departed))
        self._departed = []

    def _read_tokens(self, joining: Collection[int], decodes: int) -> float:
        """Context that the decodes of a step read, and what follows from it for the next step: everybody has got one
        token more, and those that end are taken to have held as much as the others."""
        kv_tokens = decodes * self._mean_context_tokens
        if requests := decodes + len(joining):
            self._mean_context_tokens = (kv_tokens + sum(joining)) / requests + 1.0
        return kv_tokens

    def results(self, record: Callable[[Request], FinishedRequest]) -> Iterator[StepResult]:
        """Results of the ended steps, each once; ``record`` is called once for every request that departed."""
        ended, self._ended = self._ended, []
        for content, ended_s, step_s, departed in ended:
            finished = tuple([record(one) if isinstance(one, Request) else one for one in departed])
            yield StepResult(ended_s, step_s, *content, finished)
