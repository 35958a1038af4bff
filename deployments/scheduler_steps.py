"""Steps of an engine on their way, and those that have ended until somebody wants to know.

The engine waits for whatever is done while a step passes, and little of that is in the processor's caches: so who
departed is looked at when results are asked for, several together. Outputs of steps are not kept for as long, for vLLM
makes the next ones in their place.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from policies.types import FinishedRequest, StepPlan, StepResult


class Step(NamedTuple):
    """A step as it was scheduled.

    Attributes:
        output: what it holds, which vLLM hands back beside its results.
        plan, began_s: by which and when it was begun.
        chunks: tokens in the cache, before it, of those that went on with their prompt, by id.
        mean_context_tokens: of those that run before it; None where it follows from the step before.
        running_count, waiting_count: after admission.
    """

    output: SchedulerOutput
    plan: StepPlan
    began_s: float
    chunks: Mapping[str, int]
    mean_context_tokens: float | None
    running_count: int
    waiting_count: int

    def prefills(self) -> list[str]:
        """Ids of those that got a part of their prompt."""
        starts = [request.req_id for request in self.output.scheduled_new_reqs]
        return [*starts, *self.output.scheduled_cached_reqs.resumed_req_ids, *self.chunks]


class StepAccount:
    """Takes steps in the order in which they are scheduled, which is that in which they end."""

    def __init__(self, now_s: float) -> None:
        self._on_their_way: deque[Step] = deque()
        # Steps that have ended, but for what is told of those who departed with them.
        self._ended: list[tuple[StepResult, list[Request | FinishedRequest]]] = []
        self._departed: list[Request | FinishedRequest] = []
        self._last_end_s = now_s
        self._mean_context_tokens = 0.0  # of those that run after the last step that ended

    @property
    def in_flight(self) -> bool:
        return bool(self._on_their_way)

    def scheduled(self, step: Step) -> None:
        if step.output.num_scheduled_tokens:
            self._on_their_way.append(step)
        else:  # nothing will come back that tells more
            self._end(step, self._last_end_s, 0.0)

    def departed(self, request: Request | FinishedRequest) -> None:
        """It left with the step that ends next. A request is held until results are asked for, and must not change."""
        self._departed.append(request)

    def ended(self, output: SchedulerOutput, now_s: float) -> None:
        """Its results have come. Steps from before a change of mode were never scheduled here."""
        if self._on_their_way and self._on_their_way[0].output is output:
            step = self._on_their_way.popleft()
            self._end(step, now_s, max(0.0, now_s - max(step.began_s, self._last_end_s)))
        self._last_end_s = now_s

    def _end(self, step: Step, ended_s: float, step_s: float) -> None:
        scheduled, prefills = step.output.num_scheduled_tokens, step.prefills()
        decodes, prefill_tokens = len(scheduled) - len(prefills), sum(map(scheduled.__getitem__, prefills))
        result = StepResult(
            now_s=ended_s,
            step_s=step_s,
            phase=step.plan.phase,
            prefill_tokens=prefill_tokens,
            prefill_requests=len(prefills),
            decode_requests=decodes,
            kv_tokens=round(self._read_tokens(step, decodes)) if scheduled else 0,
            max_batch_size=step.plan.max_batch_size,
            running_count=step.running_count,
            waiting_count=step.waiting_count,
            preempted=len(step.output.preempted_req_ids or ()),
        )
        self._ended.append((result, self._departed))
        self._departed = []

    def _read_tokens(self, step: Step, decodes: int) -> float:
        """Context that the decodes of a step read, and what follows from it for the next step: everybody has got one
        token more, and who ends is taken to have held as much as the others."""
        if step.mean_context_tokens is not None:
            self._mean_context_tokens = step.mean_context_tokens
        scheduled, begun = step.output.num_scheduled_tokens, dict(step.chunks)
        for start in step.output.scheduled_new_reqs:
            begun[start.req_id] = start.num_computed_tokens
        kv_tokens = decodes * self._mean_context_tokens
        if requests := decodes + len(begun):
            held = kv_tokens + sum([cached + scheduled[request_id] for request_id, cached in begun.items()])
            self._mean_context_tokens = (held + requests) / requests
        return kv_tokens

    def results(self, record: Callable[[Request], FinishedRequest]) -> Iterator[StepResult]:
        """Of the steps that have ended, each once; ``record`` is called once for every request that departed."""
        ended, self._ended = self._ended, []
        for result, departed in ended:
            if departed:
                told = [record(one) if isinstance(one, Request) else one for one in departed]
                result = result._replace(finished=tuple(told))
            yield result
