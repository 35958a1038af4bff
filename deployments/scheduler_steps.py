"""Steps of an engine on their way, and those that have ended until somebody wants to know.

What a step holds is counted when it has just been scheduled, while it is in the processor's caches: the engine waits
for whatever is done when it comes back, so then little more is noted than the time, and outputs of steps are not kept,
for vLLM makes the next ones in their place. Who departed is looked at when results are asked for, several together.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from policies.types import FinishedRequest, StepPlan, StepResult


class Step(NamedTuple):
    """A step as it was scheduled.

    Attributes:
        output: what it holds, which vLLM hands back beside its results.
        plan, began_s: by which and when it was begun.
        prefills: ids of those that got a part of their prompt.
        chunks: tokens in the cache, before it, of those that went on with their prompt, by id.
        mean_context_tokens: of those that run before it; None where it follows from the step before.
        running_count, waiting_count: after admission.
    """

    output: SchedulerOutput
    plan: StepPlan
    began_s: float
    prefills: Sequence[str]
    chunks: Mapping[str, int]
    mean_context_tokens: float | None
    running_count: int
    waiting_count: int


class _Ended(NamedTuple):
    """A step and those who departed with it; times and who finished are not in the result yet."""

    result: StepResult
    ended_s: float
    step_s: float
    departed: list[Request | FinishedRequest]


class StepAccount:
    """Takes steps in the order in which they are scheduled, which is that in which they end."""

    def __init__(self, now_s: float) -> None:
        # Output, time of the begin and result of each.
        self._on_their_way: deque[tuple[SchedulerOutput, float, StepResult]] = deque()
        self._ended: list[_Ended] = []
        self._departed: list[Request | FinishedRequest] = []
        self._last_end_s = now_s
        self._mean_context_tokens = 0.0  # of those that run after the last step that was scheduled

    @property
    def in_flight(self) -> bool:
        return bool(self._on_their_way)

    def scheduled(self, step: Step) -> None:
        result = self._counted(step)
        if step.output.num_scheduled_tokens:
            self._on_their_way.append((step.output, step.began_s, result))
        else:  # nothing will come back that tells more
            self._end(result, self._last_end_s, 0.0)

    def departed(self, request: Request | FinishedRequest) -> None:
        """It left with the step that ends next. A request is held until results are asked for, and must not change."""
        self._departed.append(request)

    def ended(self, output: SchedulerOutput, now_s: float) -> None:
        """Its results have come. Steps from before a change of mode were never scheduled here."""
        if self._on_their_way and self._on_their_way[0][0] is output:
            _, began_s, result = self._on_their_way.popleft()
            self._end(result, now_s, max(0.0, now_s - max(began_s, self._last_end_s)))
        self._last_end_s = now_s

    def _end(self, result: StepResult, ended_s: float, step_s: float) -> None:
        self._ended.append(_Ended(result, ended_s, step_s, self._departed))
        self._departed = []

    def _counted(self, step: Step) -> StepResult:
        """What it holds."""
        scheduled, prefills = step.output.num_scheduled_tokens, step.prefills
        decodes = len(scheduled) - len(prefills)
        return StepResult(
            now_s=0.0,
            step_s=0.0,
            phase=step.plan.phase,
            prefill_tokens=sum(map(scheduled.__getitem__, prefills)),
            prefill_requests=len(prefills),
            decode_requests=decodes,
            kv_tokens=round(self._read_tokens(step, decodes)) if scheduled else 0,
            max_batch_size=step.plan.max_batch_size,
            running_count=step.running_count,
            waiting_count=step.waiting_count,
            preempted=len(step.output.preempted_req_ids or ()),
        )

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
        for result, ended_s, step_s, departed in ended:
            finished = tuple([record(one) if isinstance(one, Request) else one for one in departed])
            yield result._replace(now_s=ended_s, step_s=step_s, finished=finished)
