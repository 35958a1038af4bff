"""What the steps of a real engine held, so that modes can be compared by their steps as well as by a clock.

On shared cores two runs of the very same steps may differ by a tenth. So one law of step times is fitted to the steps
of all runs, and a run is charged what its steps take by that: what is left are the decisions.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from policies.engine.step_time import fit_step_times
from policies.types import Phase, StepResult, StepTimes


class StepRecorder:
    """Notes what vLLM's scheduler puts into each step of an engine of which it is the only reader, and when it is done:
    with asynchronous scheduling the next step is scheduled before that."""

    def __init__(self, scheduler: Any, now: Callable[[], float]) -> None:
        """now: seconds on the clock that steps are timed by."""
        self.steps: list[StepResult] = []
        self._scheduler, self._now = scheduler, now
        # Output, time of the begin and content of each.
        self._on_their_way: deque[tuple[Any, float, StepResult]] = deque()
        self._last_end_s = now()
        scheduler.schedule, scheduler.update_from_output = self._schedule, self._update

    def close(self) -> None:
        """Leave the scheduler as it was."""
        del self._scheduler.schedule, self._scheduler.update_from_output

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        began_s = self._now()
        output = type(self._scheduler).schedule(self._scheduler, *args, **kwargs)  # the plug-in changes its class
        if output.num_scheduled_tokens:
            self._on_their_way.append((output, began_s, self._content(output)))
        return output

    def _update(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._on_their_way and self._on_their_way[0][0] is output:
            _, began_s, content = self._on_their_way.popleft()
            now_s = self._now()
            self.steps.append(content._replace(now_s=now_s, step_s=now_s - max(began_s, self._last_end_s)))
            self._last_end_s = now_s
        return type(self._scheduler).update_from_output(self._scheduler, output, *args, **kwargs)

    def _content(self, output: Any) -> StepResult:
        """vLLM has counted the step's tokens as computed by now."""
        scheduler, decoded, prefilled = self._scheduler, list[int](), list[int]()
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            before = request.num_computed_tokens - tokens
            if tokens == 1 and before >= request.num_prompt_tokens:
                decoded.append(before)
            else:
                prefilled.append(tokens)
        return StepResult(
            now_s=0.0,
            step_s=0.0,
            phase=Phase.MIXED,
            prefill_tokens=sum(prefilled),
            prefill_requests=len(prefilled),
            decode_requests=len(decoded),
            kv_tokens=sum(decoded),
            max_batch_size=scheduler.max_num_running_reqs,
            running_count=len(scheduler.running),
            waiting_count=len(scheduler.waiting),
            preempted=len(output.preempted_req_ids or ()),
        )


def law_of(runs: Iterable[Sequence[StepResult]]) -> StepTimes:
    """Fitted to the steps of all runs. Raises InputError where prefills and decodes were never seen apart."""
    return fit_step_times([step for run in runs for step in run])


def seconds_by(times: StepTimes, steps: Sequence[StepResult]) -> float:
    """What these steps take by this law."""
    return sum(
        times.step_s(prefill_tokens=step.prefill_tokens, decode_requests=step.decode_requests, kv_tokens=step.kv_tokens)
        for step in steps
    )
