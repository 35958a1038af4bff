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

from deployments.engines.features import Feature, why_off
from deployments.engines.vllm.causes import passing_causes
from deployments.engines.vllm.scheduler.loads import Loads
from deployments.engines.vllm.scheduler.media import encoded, encodes_media
from deployments.engines.vllm.scheduler.queue import PromiseQueue
from deployments.engines.vllm.scheduler.snapshot import Snapshot, SnapshotTaker, prompts_in_progress
from deployments.engines.vllm.scheduler.steps import StepAccount
from deployments.engines.vllm.scheduler.telemetry import Telemetry
from policies.engine.promised_queue import Waiting
from policies.engine.standing_plan import StandingPlan
from policies.live import Live
from policies.router.credit import MemoryBound
from policies.types import (
    BatchPolicy,
    Encoding,
    FinishedRequest,
    Foreseen,
    Paced,
    Phase,
    StepPlan,
    StepResult,
    chunk_kv_tokens,
)


class Planner:
    """Plans the steps of one scheduler while its mode is not `stock`.

    Attributes:
        policy: what is asked.
        memory: requests that memory lets run.
        queue: the scheduler's waiting queue while this plans.
    """

    def __init__(
        self,
        scheduler: Any,
        policy: BatchPolicy,
        *,
        phases_work: bool,
        cuts_prompts: bool,
        on_step: Callable[[StepResult], None],
    ) -> None:
        """Args:
        phases_work: whether prefill and decode can be kept apart, but for causes that pass.
        cuts_prompts: whether a step may be smaller than vLLM's.
        """
        self._goes_by(policy)
        self.memory = MemoryBound()
        self._scheduler, self._phases_ever_work, self._on_step = scheduler, phases_work, on_step
        self._telemetry: Telemetry = scheduler.telemetry
        self._whole_budget: int = scheduler.max_num_scheduled_tokens
        self._cuts_prompts = cuts_prompts
        self._slots: Live[int] = scheduler.slots
        self._taker = SnapshotTaker(scheduler, self._whole_budget, cuts_prompts=cuts_prompts)
        self._account = StepAccount(scheduler.clock.now())
        self._standing: StandingPlan[Request] | None = None
        self._loads = Loads(scheduler)
        self.queue = PromiseQueue(self._waiting, scheduler.late_patience_s)
        self._chunks: tuple[Request, ...] = ()  # requests in the middle of their prompt before the step
        self._context_tokens: float | None = None  # mean of those that decode, where a snapshot has told
        self._told_context_tokens = 0.0  # by the last one
        self._now_s: float = scheduler.clock.now()
        self._planned: StepPlan | None = None  # of the step that is being scheduled

    def _waiting(self, request: Request) -> Waiting[Request]:
        """As it stands in the queue. vLLM asks its connector of a new request only afterwards."""
        waiting = self._taker.waiting(request, self._scheduler.clock.now(), self._answers, self._media_price)
        waiting.unread_tokens = max(1, waiting.unread_tokens - self._loads.saved_tokens(request, self._pace))
        return waiting

    def _goes_by(self, policy: BatchPolicy) -> None:
        self.policy = policy
        # Looked at once: at every step it would cost more than many a plan.
        self._paced: Paced | None = policy if isinstance(policy, Paced) else None
        self._answers: Foreseen | None = None if self._paced is None else self._paced.answers
        self._encoding: Encoding | None = policy if isinstance(policy, Encoding) else None

    def settings_changed(self, policy: BatchPolicy) -> None:
        """Go on with another policy, that has taken over what this one learned, or with other settings of it."""
        self._goes_by(policy)
        self._account.renumber(self._taker.settings_changed())
        self._standing = None

    def snapshot(self) -> Snapshot:
        return self._taker.take(self._scheduler.clock.now(), in_flight=self._account.in_flight)

    def unread(self) -> dict[str, Any]:
        """What has to be read yet and how fast that goes, for routers; and what became of drafts."""
        promised = self.queue.promised
        return {
            "unread_prompt_tokens": _unread_tokens(prompts_in_progress(self._scheduler)) + promised.in_time_tokens,
            "late_requests": len(promised) - promised.in_time,
            "late_wait_seconds": promised.late_wait_s(self._scheduler.clock.now()),
            "seconds_per_prompt_token": self._pace,
            **({} if self._taker.drafted is None else {"drafts": self._taker.drafted.numbers()}),
        }

    @property
    def _media_price(self) -> float:
        """What encoding a token of media takes, in tokens of a prompt."""
        return self._encoding.media_price if self._encoding is not None and encodes_media(self._scheduler) else 0.0

    @property
    def _pace(self) -> float | None:
        """Seconds that a prompt token takes; None while that is not known."""
        return None if self._paced is None else self._paced.seconds_per_prompt_token

    # Before a step

    def arrived(self, request: Request) -> None:
        """It has come to the scheduler."""
        known = self._taker.known(request, self._scheduler.clock.now())
        if known.ends_by_s < inf and self._answers is not None:
            self._taker.foretold(request, known, self._answers, self._media_price)
        if self._standing is not None:
            self._standing.arrived(promised=min(known.deadline_s, known.tpot_s, known.ends_by_s) < inf)

    def before_step(self, throttle_prefills: bool) -> bool:
        """Set vLLM's knobs for the next step. Returns whether prompts are put off in it."""
        began, scheduler = time.perf_counter(), self._scheduler
        self._now_s = scheduler.clock.now()
        self._chunks, self._context_tokens = prompts_in_progress(scheduler), None
        decodes = len(scheduler.running) - len(self._chunks)
        drafts = self._drafts(decodes)
        standing = self._standing
        if (
            standing is None
            or not standing.stands(departed=self._taker.departed, prompts_in_progress=bool(self._chunks))
            or (standing.plan.phase is not Phase.MIXED and not self._phases_work())
        ):
            self.report()
            standing = self._standing = self._asked(drafts)
        self._planned = plan = standing.plan
        if plan.phase is Phase.DECODE or self._reads_nothing(plan, decodes):
            throttle = self._hold_back()
        else:
            throttle = throttle_prefills and plan.phase is Phase.MIXED
            # As vLLM counts: a session that waits for input holds its slot.
            idle = scheduler.num_waiting_for_streaming_input
            running = len(scheduler.running)
            beside_late = idle + self.queue.promised.cap(running, plan.most(self._slots.now) - idle)
            scheduler.max_num_active_reqs = min(standing.cap(running + idle), beside_late, self._slots.now)
        budget = plan.budget(decodes, drafts or 0) if self._cuts_prompts else self._whole_budget
        scheduler.max_num_scheduled_tokens = min(budget, self._whole_budget)
        if plan.phase is Phase.PREFILL:
            self._leave_out(request for request in scheduler.running if not request.is_prefill_chunk)
        self._leave_out(standing.held)
        if plan.max_prefill_tokens is not None:
            self._put_decodes_first()
        self._telemetry.planned(plan, time.perf_counter() - began)
        return throttle

    def _asked(self, draft_tokens: int | None) -> StandingPlan[Request]:
        """The policy's plan; mixed where phases cannot be kept apart, which another's policy does not know."""
        held = self._split()
        snapshot = self._taker.take(self._now_s, in_flight=self._account.in_flight)
        self._chunks, self._context_tokens = snapshot.chunks, snapshot.mean_context_tokens
        self._told_context_tokens = snapshot.mean_context_tokens
        in_flight = self._account.unfinished(self._now_s)
        state = snapshot.state._replace(
            unread=self.queue.promised.unread, in_flight=in_flight, draft_tokens=draft_tokens
        )
        plan = self.policy.plan(state)
        self.memory.planned(snapshot.state.running_count, plan.max_batch_size, by_memory=plan.limited_by.is_memory)
        if plan.phase is not Phase.MIXED and not self._phases_work():
            plan = plan._replace(phase=Phase.MIXED, steps=1, starts=inf)
        # A plan asks for one request at least, also where idle ones hold every slot.
        size = min(plan.max_batch_size + snapshot.idle_slots, self._slots.now)
        # What leaves from now on is counted without those whose last token is in flight.
        state = snapshot.state._replace(departed=self._taker.departed)
        return StandingPlan(plan._replace(max_batch_size=size), state, held)

    def _split(self) -> list[Request]:
        """Sort the queue by which requests can still be in time, where that may have changed. Returns which prompts in
        progress had better wait for others."""
        pace = self._pace if self.queue.promised.changed or self._chunks else None
        if self._paced is None or pace is None:
            return []
        answers, price = self._paced.answers, self._paced.answer_price(self._told_context_tokens)
        reading = self._taker.reading(self._chunks, self._now_s, answers, self._media_price)
        return self.queue.promised.split(
            self._now_s, pace, reading, answer_price=price, step_s=answers.seconds_per_token
        )

    def _drafts(self, decodes: int) -> int | None:
        """Tokens that vLLM takes into the step beside one of each request that decodes; None without drafts."""
        if (drafted := self._taker.drafted) is None:
            return None
        drafted.shorten(self.policy, decodes * self._told_context_tokens)
        return drafted.waiting()

    def _reads_nothing(self, plan: StepPlan, decodes: int) -> bool:
        """Whether no prompt may be read beside those that decode. A budget alone would let through as many tokens as
        requests have their last token in flight, at the price of a step that reads."""
        return plan.max_prefill_tokens == 0 and decodes > 0 and self._phases_work()

    def _phases_work(self) -> bool:
        return self._phases_ever_work and not why_off(Feature.PHASES, passing_causes(self._scheduler))

    def _put_decodes_first(self) -> None:
        """vLLM goes through the batch in its order: a prompt in progress before others would take the tokens that the
        budget has for their decodes. One that was held back is passed by those that started after it."""
        chunks, running = set(self._chunks), self._scheduler.running
        if chunks and not chunks.issuperset(running[-len(chunks) :]):
            running.sort(key=chunks.__contains__)

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
        self._account.rests()

    # After a step

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step has been scheduled; requests are still as they were before it."""
        if self._planned is None or self._standing is None:
            return
        began, scheduler = time.perf_counter(), self._scheduler
        started = len(output.scheduled_new_reqs) + len(output.scheduled_cached_reqs.resumed_req_ids)
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
            encoder_tokens=encoded(scheduler.requests, output.scheduled_encoder_inputs),
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

    def verified(self, output: SchedulerOutput, sampled: Any) -> int:
        """As `DraftedTokens.verified`; 0 without drafts."""
        if (drafted := self._taker.drafted) is None:
            return 0
        began = time.perf_counter()
        accepted = drafted.verified(output, sampled)
        self._telemetry.spent(time.perf_counter() - began)
        return accepted

    def ended(self, output: SchedulerOutput, now_s: float, accepted_tokens: int) -> None:
        """The results of a step have come."""
        began = time.perf_counter()
        goes_on = bool(self._scheduler.running)
        if first := self._account.ended(output, now_s, goes_on=goes_on, accepted_tokens=accepted_tokens):
            for known in self._taker.has_first_token(first, now_s):
                self._telemetry.gaps.has_first_token(known, self._account.noted)
        self._telemetry.spent(time.perf_counter() - began)

    def report(self) -> None:
        """Tell the policy and others of the steps that have ended since they were last told."""
        for result, between_s in self._account.results(self._forget):
            self.policy.observe(result)
            self._telemetry.observed(result, between_s, self.policy)
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
        if request.is_finished() and not _is_aborted(request):
            self._telemetry.gaps.leaves(known, request.num_output_tokens)
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
