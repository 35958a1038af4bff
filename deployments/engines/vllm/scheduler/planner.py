"""Plans the steps of one vLLM scheduler by a policy: asks, applies the answer by vLLM's own knobs, and reports.

Before a step: a snapshot, `policy.plan`, and the plan goes into knobs that vLLM has already. How long a plan stands is
`policies.engine.standing_plan`'s rule. What steps held and how long they took goes to `policy.observe` before it is
asked again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from deployments.engines.vllm.scheduler.queue import PromiseQueue
from deployments.engines.vllm.scheduler.snapshot import Snapshot, SnapshotTaker, prompts_in_progress
from deployments.engines.vllm.scheduler.steps import StepAccount
from deployments.engines.vllm.scheduler.telemetry import Telemetry
from policies.engine.standing_plan import StandingPlan
from policies.live import Live
from policies.router.credit import MemoryBound
from policies.types import BatchPolicy, FinishedRequest, Limit, Paced, Phase, StepPlan, StepResult, chunk_kv_tokens


class Planner:
    """Plans the steps of one scheduler while its mode is not `stock`.

    Attributes:
        policy: what is asked.
        memory: requests that memory lets run.
        queue: the scheduler's waiting queue while this plans.
    """

    def __init__(
        self, scheduler: Any, policy: BatchPolicy, *, phases_work: bool, on_step: Callable[[StepResult], None]
    ) -> None:
        """phases_work: whether prefill and decode can be kept apart."""
        self.policy = policy
        self.memory = MemoryBound()
        self._scheduler, self._phases_work, self._on_step = scheduler, phases_work, on_step
        self._telemetry: Telemetry = scheduler.telemetry
        self._whole_budget: int = scheduler.max_num_scheduled_tokens
        # Where prompts, drafts, images or states cannot be cut anywhere, a smaller budget might let nothing through.
        self._cuts_prompts = bool(
            scheduler.scheduler_config.enable_chunked_prefill
            and not scheduler.num_spec_tokens
            and not scheduler.max_num_encoder_input_tokens
            and not scheduler.need_mamba_block_aligned_split
        )
        self._slots: Live[int] = scheduler.slots
        self._taker = SnapshotTaker(scheduler, self._whole_budget, cuts_prompts=self._cuts_prompts)
        self._account = StepAccount(scheduler.clock.now())
        self._standing: StandingPlan[Request] | None = None
        self.queue = PromiseQueue(
            lambda request: self._taker.waiting(request, scheduler.clock.now()), scheduler.late_patience_s
        )
        self._chunks: tuple[Request, ...] = ()  # requests in the middle of their prompt before the step
        self._context_tokens: float | None = None  # mean of those that decode, where a snapshot has told
        self._now_s: float = scheduler.clock.now()
        self._planned: StepPlan | None = None  # of the step that is being scheduled

    def settings_changed(self, policy: BatchPolicy) -> None:
        """Go on with another policy, that has taken over what this one learned, or with other settings of it."""
        self.policy = policy
        self._account.renumber(self._taker.settings_changed())
        self._standing = None

    def snapshot(self) -> Snapshot:
        return self._taker.take(self._scheduler.clock.now(), in_flight=self._account.in_flight)

    def unread(self) -> dict[str, Any]:
        """What has to be read yet and how fast that goes, for routers."""
        promised = self.queue.promised
        in_progress = _unread_tokens(prompts_in_progress(self._scheduler))
        return {
            "unread_prompt_tokens": in_progress + promised.in_time_tokens,
            "late_requests": len(promised) - promised.in_time,
            "seconds_per_prompt_token": self._pace,
        }

    @property
    def _pace(self) -> float | None:
        """Seconds that a prompt token takes; None while that is not known."""
        return self.policy.seconds_per_prompt_token if isinstance(self.policy, Paced) else None

    # Before a step

    def arrived(self, request: Request) -> None:
        """It has come to the scheduler."""
        known = self._taker.known(request, self._scheduler.clock.now())
        if self._standing is not None:
            self._standing.arrived(promised=min(known.deadline_s, known.tpot_s) < inf)

    def before_step(self, throttle_prefills: bool) -> bool:
        """Set vLLM's knobs for the next step. Returns whether prompts are put off in it."""
        began, scheduler = time.perf_counter(), self._scheduler
        self._now_s = scheduler.clock.now()
        self._chunks, self._context_tokens = prompts_in_progress(scheduler), None
        standing = self._standing
        if standing is None or not standing.stands(
            departed=self._taker.departed, prompts_in_progress=bool(self._chunks)
        ):
            self.report()
            standing = self._standing = self._asked()
        self._planned = plan = standing.plan
        if plan.phase is Phase.DECODE:
            throttle = self._hold_back()
        else:
            throttle = throttle_prefills and plan.phase is Phase.MIXED
            # As vLLM counts: a session that waits for input holds its slot.
            active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
            scheduler.max_num_active_reqs = min(standing.cap(active), self._slots.now)
        decodes = len(scheduler.running) - len(self._chunks)
        budget = plan.budget(decodes) if self._cuts_prompts else self._whole_budget
        scheduler.max_num_scheduled_tokens = min(budget, self._whole_budget)
        if plan.phase is Phase.PREFILL:
            self._leave_out(request for request in scheduler.running if not request.is_prefill_chunk)
        self._leave_out(standing.held)
        self._telemetry.planned(plan, time.perf_counter() - began)
        return throttle

    def _asked(self) -> StandingPlan[Request]:
        """The policy's plan; mixed where phases cannot be kept apart, which another's policy does not know."""
        held = self._split()
        snapshot = self._taker.take(self._now_s, in_flight=self._account.in_flight)
        self._chunks, self._context_tokens = snapshot.chunks, snapshot.mean_context_tokens
        plan = self.policy.plan(snapshot.state)
        by_memory = plan.limited_by is Limit.MEMORY
        self.memory.planned(snapshot.state.running_count, plan.max_batch_size, by_memory=by_memory)
        if plan.phase is not Phase.MIXED and not self._phases_work:
            plan = plan._replace(phase=Phase.MIXED, steps=1)
        # A plan asks for one request at least, also where idle ones hold every slot.
        size = min(plan.max_batch_size + snapshot.idle_slots, self._slots.now)
        # What leaves from now on is counted without those whose last token is in flight.
        state = snapshot.state._replace(departed=self._taker.departed)
        return StandingPlan(plan._replace(max_batch_size=size), state, held)

    def _split(self) -> list[Request]:
        """Sort the queue by which requests can still be in time, where that may have changed. Returns which prompts in
        progress had better wait for others."""
        if self._pace is None or not (self.queue.promised.changed or self._chunks):
            return []
        return self.queue.promised.split(self._now_s, self._pace, self._taker.reading(self._chunks, self._now_s))

    def _hold_back(self) -> bool:
        """Let no request start or go on with a prompt."""
        self._scheduler.max_num_active_reqs = 0
        self._scheduler.prefill_capacity_bound = False  # else vLLM puts off nothing while its queue is long
        return True

    def _leave_out(self, requests: Iterable[Request]) -> None:
        """They are not eligible before the next step, which is how vLLM staggers decodes in pipelines."""
        next_step = self._scheduler.current_step + 2  # schedule() counts this one first
        for request in requests:
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, next_step)

    def paused(self) -> None:
        """Steps are taken without a plan."""
        self._standing = self._planned = None

    # After a step

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step has been scheduled; requests are still as they were before it."""
        if self._planned is None or self._standing is None:
            return
        began, scheduler = time.perf_counter(), self._scheduler
        starts, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        started = len(starts) + len(resumed)
        self._taker.started(started)
        self._standing.taken(
            started=started, preempted=bool(output.preempted_req_ids), empty=not output.num_scheduled_tokens
        )
        prefills = self._prefills(output) if started or self._chunks else ()
        joining, prefill_kv_tokens = self._read(prefills, output.num_scheduled_tokens) if prefills else ({}, 0)
        self._account.scheduled(
            output,
            self._planned,
            self._now_s,
            prefills,
            joining,
            prefill_kv_tokens,
            self._context_tokens,
            running_count=len(scheduler.running),
            waiting_count=len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
        )
        self._telemetry.spent(time.perf_counter() - began)

    def _prefills(self, output: SchedulerOutput) -> list[str]:
        """Ids of those that get a part of their prompt."""
        chunks = [one.request_id for one in self._chunks if one.request_id in output.num_scheduled_tokens]
        starts = [start.req_id for start in output.scheduled_new_reqs]
        return [*starts, *output.scheduled_cached_reqs.resumed_req_ids, *chunks]

    def _read(self, prefills: Sequence[str], scheduled: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Tokens in the cache, after a step, of those whose prompt ends with it, and `prefill_kv_tokens`."""
        joining, kv_tokens = dict[str, int](), 0
        for request_id in prefills:
            request, tokens = self._scheduler.requests[request_id], scheduled[request_id]
            held = request.num_computed_tokens
            kv_tokens += chunk_kv_tokens(tokens, held)
            if held + tokens >= request.num_tokens:
                joining[request_id] = held + tokens
        return joining, kv_tokens

    def ended(self, output: SchedulerOutput, now_s: float) -> None:
        """The results of a step have come."""
        began = time.perf_counter()
        if first := self._account.ended(output, now_s):
            self._taker.has_first_token(first, now_s)
        self._telemetry.spent(time.perf_counter() - began)

    def report(self) -> None:
        """Tell the policy and others of the steps that have ended since they were last told."""
        for result in self._account.results(self._forget):
            self.policy.observe(result)
            self._telemetry.observed(result)
            self._on_step(result)

    # The end of a request

    def leaves(self, request: Request) -> None:
        """It ends, however. Nothing may be told for long after an abort: what ended in a step is looked at later."""
        began = time.perf_counter()
        if self._taker.known(request, self._now_s).told.measures:
            self._taker.forget(request)
        elif _is_aborted(request) or not request.num_output_tokens:
            self.departs(request)
        else:
            self._account.departed(request)
        self._telemetry.spent(time.perf_counter() - began)

    def departs(self, request: Request) -> None:
        record = self._forget(request)
        if record.output_tokens:
            self._account.departed(record)

    def _forget(self, request: Request) -> FinishedRequest:
        """Returns what policies are told of it."""
        known = self._taker.known(request, self._scheduler.clock.now())
        self._taker.forget(request)
        return FinishedRequest(
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            class_index=known.class_index,
            predicted_output_tokens=known.told.predicted_output_tokens,
            aborted=_is_aborted(request),
        )


def _unread_tokens(chunks: Sequence[Request]) -> int:
    return sum([one.num_tokens - one.num_computed_tokens for one in chunks])


def _is_aborted(request: Request) -> bool:
    return request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
