"""Sluice's scheduler plug-in for vLLM: policies plan every engine step, vLLM's own scheduler carries the plan out.

    vllm serve MODEL --scheduler-cls deployments.vllm_scheduler.SluiceScheduler \\
        --additional-config '{"sluice": {"mode": "auto"}}'

Before a step: snapshot, `policy.plan`, and the plan goes into knobs that vLLM has already. What the step held and how
long it took go to `policy.observe` before the next plan, which may be some steps later: a plan says for how many steps
it may be kept, and such steps hardly cost anything. No line of vLLM's scheduling is repeated here. The knobs:

* at most so many requests: `max_num_active_reqs`, which never evicts;
* DECODE: no admission, and prompts in progress are put off as on a throttled step of data-parallel engines;
* PREFILL: running decodes are not eligible before the next step, which is how vLLM staggers decodes in pipelines;
* token budget: `max_num_scheduled_tokens`;
* order: a waiting queue sorted by virtual deadline, where vLLM's policy is "fcfs".

In mode `stock` the object is of a class that overrides no method that a step calls, but where a KV connector moves
caches, so it costs nothing at all.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from deployments.config.scheduler import SchedulerSettings
from deployments.engines.vllm.scheduler.queue import DeadlineQueue
from deployments.engines.vllm.scheduler.snapshot import Snapshot, SnapshotTaker, prompts_in_progress
from deployments.engines.vllm.scheduler.steps import StepAccount
from deployments.engines.vllm.scheduler.telemetry import Telemetry, Transfers
from policies.engine.auto import Auto
from policies.errors import ConfigError, SluiceError
from policies.types import BatchPolicy, BatchState, FinishedRequest, Offers, Phase, StepPlan, StepResult
from router.clock import Clock, MonotonicClock

logger = logging.getLogger(__name__)


class SluiceScheduler(AsyncScheduler):
    """vLLM's scheduler, and a switch between stock and planned steps.

    Attributes:
        clock: measures steps.
        on_step: called with every step's result, for calibration and tests: before the next plan, or by `report`.
    """

    waiting: Any
    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: a setting is unknown or wrong, or batches overlap that are not scheduled ahead."""
        super().__init__(*args, **kwargs)
        if self.parallel_config.pipeline_parallel_size > 1 and not self.scheduler_config.async_scheduling:
            raise ConfigError(
                "pipeline parallelism needs --async-scheduling with Sluice's scheduler, or vLLM's own scheduler "
                "(engine.scheduler.mode: stock, without engine.prefill); it cannot be calibrated"
            )
        self.settings = SchedulerSettings.of_vllm(self.vllm_config.additional_config)
        self.clock: Clock = MonotonicClock()
        self.on_step: Callable[[StepResult], None] | None = None
        self.telemetry = Telemetry()
        self.transfers = Transfers()
        self._stock_limits = (self.max_num_active_reqs, self.max_num_scheduled_tokens)
        self._policy: BatchPolicy | None = None
        steps_overlap = self.scheduler_config.async_scheduling
        self._stock_class = SluiceScheduler if steps_overlap else _StepByStep
        self._planned_class = _PlannedScheduler if steps_overlap else _PlannedStepByStep
        self._adopt(self.settings)

    def control(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings between two steps; lengths and step times learned so far are kept.

        Returns:
            The settings in force.

        Raises:
            ConfigError: a setting is unknown or wrong, or names other classes or another policy; nothing has changed
                then.
        """
        self.report()
        # Before they are looked at, which runs the code that they name: that is for the configuration alone to say.
        for name in sorted(SchedulerSettings.FIXED):
            if changes.get(name, now := getattr(self.settings, name)) != now:
                raise ConfigError(f"{name} cannot change while the engine runs: set engine.scheduler and redeploy")
        settings = self.settings.changed(changes)
        now, then = self.settings.class_names, settings.class_names
        # By index one class's lengths would be another's. In mode stock nothing is learned, but then a replica that
        # comes later could not take over what this one took bit by bit.
        if now != then:
            raise ConfigError(f"the classes with targets or budgets cannot change, from {now[1:]} to {then[1:]}")
        self._adopt(settings)
        return self.settings.model_dump(mode="json")

    def report(self) -> None:
        """Tell policy, telemetry and `on_step` of the steps that have ended since they were last told."""

    def status(self) -> dict[str, Any]:
        """What the plug-in does and why, for people and monitoring."""
        return {"mode": self.settings.mode}

    def _adopt(self, settings: SchedulerSettings) -> None:
        policy = None if settings.mode == "stock" else self._policy_of(settings)
        self.settings = settings
        if policy is not None:
            self.__class__ = self._planned_class
            cast(_PlannedScheduler, self)._plan_by(policy)
            return
        if self._policy is not None:
            cast(_PlannedScheduler, self)._forget_plans()
            self._policy = None
            self.max_num_active_reqs, self.max_num_scheduled_tokens = self._stock_limits
            self._requeue(create_request_queue(self.policy))
        self.__class__ = self._stock_class

    def _policy_of(self, settings: SchedulerSettings) -> BatchPolicy:
        """A policy with these settings that goes on with what the present one has learned."""
        return settings.build_policy(
            learned=self._policy, phases=self._phases_work, speculates=self.num_spec_tokens > 0
        )

    @property
    def _phases_work(self) -> bool:
        """Whether phases can be kept apart.

        Data-parallel ranks step together, a KV connector admits in every step, and which adapters are in use vLLM tells
        by the decodes of the step: a step without them would start more adapters than a later one can hold.
        """
        return self.parallel_config.data_parallel_size == 1 and self.connector is None and self.lora_config is None

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """vLLM calls this where there is a KV connector."""
        if (stats := kv_connector_output.kv_connector_stats) is not None:
            self.transfers.add(stats.data)
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def _requeue(self, queue: Any) -> None:
        for request in self.waiting:
            queue.add_request(request)
        self.waiting = queue


class _StepByStep(SluiceScheduler):
    """Where a step ends before the next begins, as on CPUs. vLLM itself takes `Scheduler` there: what `AsyncScheduler`
    notes of tokens in flight costs 1 to 2 us for each request of a step, and would always be nothing."""

    _update_after_schedule = Scheduler._update_after_schedule
    _update_request_with_output = Scheduler._update_request_with_output


class _PlannedScheduler(SluiceScheduler):
    """With planned steps; made only by `SluiceScheduler._adopt`."""

    _policy: BatchPolicy

    def _plan_by(self, policy: BatchPolicy) -> None:
        fresh = self._policy is None
        self._policy = policy
        slots = min(self._stock_limits[0], self.settings.max_batch_size or self._stock_limits[0])
        if fresh:
            self._taker = SnapshotTaker(self, self._stock_limits[1])
            self._now_s = self.clock.now()
            self._account = StepAccount(self._now_s)
            if self.policy == SchedulingPolicy.FCFS:
                self._requeue(DeadlineQueue(self._deadline_s))
        self._taker.adopt(slots, self.settings.class_names)
        self._plan: StepPlan | None = None
        self._steps_left = 0  # for which the plan may be kept
        self._departed = 0  # when the plan was made
        self._snapshot: Snapshot | None = None  # that the step was planned by; None where the plan was kept
        self._chunks: tuple[Request, ...] = ()  # requests in the middle of their prompt before the step
        self._cached_tokens = 0  # that requests brought which started under the plan

    def _forget_plans(self) -> None:
        """Nobody would take from them the requests that end."""
        del self._taker, self._account, self._plan, self._snapshot, self._chunks

    def status(self) -> dict[str, Any]:
        self.report()
        snapshot = self._taken(self.clock.now())
        return {
            "mode": self.settings.mode,
            **({} if self.settings.policy is None else {"policy": self.settings.policy}),
            "batch_size": self._offered(snapshot),
            **self.telemetry.of_policy(self._policy, snapshot.state),
            **self.telemetry.of_steps(),
        }

    def _offered(self, snapshot: Snapshot) -> int:
        """Routers count every request that they sent, also those which stand in no batch; each of them once."""
        others = min(self._allowed(snapshot), snapshot.state.slots - snapshot.begun)
        return min(self._taker.slots, others + snapshot.apart)

    def _allowed(self, snapshot: Snapshot) -> int:
        """Requests that the policy would let run as things stand."""
        if isinstance(self._policy, Auto):
            return self._policy.batch_size(snapshot.state, snapshot.joining)
        return self._policy.batch_size(snapshot.state) if isinstance(self._policy, Offers) else snapshot.state.slots

    def _taken(self, now_s: float) -> Snapshot:
        return self._taker.take(now_s, in_flight=self._account.in_flight)

    def _deadline_s(self, request: Request) -> float:
        deadline_s = self._taker.metadata(request).deadline_s
        return deadline_s if deadline_s is not None and math.isfinite(deadline_s) else float(request.arrival_time)

    # Before a step

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.requests.get(request.request_id) is request:  # and not a session's next part
            self._taker.arrived(request, self.clock.now())

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        began = time.perf_counter()
        self._now_s = self.clock.now()
        if self.pause_state == PauseState.PAUSED_ALL:
            self._plan = None
            self._steps_left = 0
            return super().schedule(throttle_prefills)
        if (plan := self._plan) is not None and self._may_keep(plan):
            self._steps_left -= 1
            self._snapshot, self._chunks = None, prompts_in_progress(self)
            if plan.phase is not Phase.DECODE:
                self.max_num_active_reqs = min(plan.cap(self._departed_since()), self._taker.slots)
            if plan.max_prefill_tokens is not None:
                self.max_num_scheduled_tokens = self._budget(plan.budget(len(self.running) - len(self._chunks)))
            throttle = self._hold_back() if plan.phase is Phase.DECODE else throttle_prefills
            self.telemetry.planned(plan, time.perf_counter() - began)
            return super().schedule(throttle)
        self.report()
        snapshot = self._taken(self._now_s)
        plan = self._asked(snapshot.state)
        throttle = self._apply(plan, snapshot, throttle_prefills)
        if plan.steps > 1 and (most := self._most_steps(plan, snapshot)) < plan.steps:
            plan = plan._replace(steps=most)
        self._plan, self._steps_left, self._departed = plan, plan.steps - 1, snapshot.state.departed
        self._snapshot, self._cached_tokens = snapshot, 0
        self._chunks = snapshot.chunks
        self.telemetry.planned(plan, time.perf_counter() - began)
        return super().schedule(throttle)

    def _asked(self, state: BatchState) -> StepPlan:
        """The policy's plan; mixed where phases cannot be kept apart, which another's policy does not know."""
        plan = self._policy.plan(state)
        return plan if plan.phase is Phase.MIXED or self._phases_work else plan._replace(phase=Phase.MIXED)

    def _most_steps(self, plan: StepPlan, snapshot: Snapshot) -> int:
        """Steps for which this plan's slots stay what they are."""
        if snapshot.idle_slots or not self._taker.is_foreseeable or self._account.preempts:
            return 1
        return self._taker.steps_to_an_end() if self._counts_ends(plan) else plan.steps

    def _counts_ends(self, plan: StepPlan) -> bool:
        """Whether it matters to this plan who runs without decoding, because its last token is in flight: only where
        steps overlap, if not yet in the plan's first. Bounds on requests and on prompts do not count those."""
        bounds = plan.max_batch_size < self._taker.slots or plan.max_prefill_tokens is not None
        return (bounds or plan.phase is not Phase.MIXED) and self.scheduler_config.async_scheduling

    def _may_keep(self, plan: StepPlan) -> bool:
        """Phases did not reckon with a prompt that is longer than the plan's first step."""
        undisturbed = plan.phase is Phase.MIXED or not self._inflight_prefills
        return self._steps_left > 0 and undisturbed and self._departed_since() <= plan.may_leave

    def _departed_since(self) -> int:
        return self._taker.departed - self._departed

    def _apply(self, plan: StepPlan, snapshot: Snapshot, throttle_prefills: bool) -> bool:
        """Set vLLM's knobs. Returns whether prefills are put off."""
        # A plan asks for one request at least, also where idle ones hold every slot.
        self.max_num_active_reqs = min(plan.max_batch_size + snapshot.idle_slots, self._taker.slots)
        self.max_num_scheduled_tokens = self._budget(plan.budget(snapshot.state.running_count - len(snapshot.chunks)))
        if plan.phase is Phase.DECODE:
            return self._hold_back()
        if plan.phase is Phase.PREFILL:
            next_step = self.current_step + 2  # schedule() counts this one first
            for request in self.running:
                if request.next_decode_eligible_step < next_step and not request.is_prefill_chunk:
                    request.next_decode_eligible_step = next_step
            return False
        return throttle_prefills

    def _hold_back(self) -> bool:
        """Let nobody start or go on with a prompt."""
        self.max_num_active_reqs = 0
        self.prefill_capacity_bound = False  # else vLLM does not put off anything while its queue is long
        return True

    def _budget(self, tokens: int) -> int:
        """Where prompts, drafts, images or states cannot be cut anywhere, a smaller one might let nothing through."""
        whole = self._stock_limits[1]
        if (
            not self.scheduler_config.enable_chunked_prefill
            or self.num_spec_tokens
            or self.max_num_encoder_input_tokens
            or self.need_mamba_block_aligned_split
        ):
            return whole
        return min(tokens, whole)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM calls this at the end of `schedule`, when requests are still as they were before the step."""
        if self._plan is not None:
            self._note(scheduler_output, self._plan)
        super()._update_after_schedule(scheduler_output)

    def _note(self, output: SchedulerOutput, plan: StepPlan) -> None:
        began = time.perf_counter()
        scheduled, snapshot = output.num_scheduled_tokens, self._snapshot
        starts, resumed = output.scheduled_new_reqs, output.scheduled_cached_reqs.resumed_req_ids
        prefills = self._prefills(output) if starts or resumed or self._chunks else ()
        self._taker.step_taken(
            prefills, scheduled, begun=len(starts) + len(resumed), preempted=bool(output.preempted_req_ids)
        )
        if plan.steps > 1 and self._ends_plan(output, plan):
            self._steps_left = 0
        self._account.scheduled(
            output,
            plan,
            self._now_s,
            prefills,
            self._joining(prefills, scheduled) if prefills else (),
            snapshot.mean_context_tokens if snapshot is not None else None,
            running_count=len(self.running),
            waiting_count=len(self.waiting) + len(self.kv_holding_waiting),
        )
        self.telemetry.spent(time.perf_counter() - began)

    def _prefills(self, output: SchedulerOutput) -> list[str]:
        """Ids of those that get a part of their prompt."""
        chunks = [one.request_id for one in self._chunks if one.request_id in output.num_scheduled_tokens]
        starts = [start.req_id for start in output.scheduled_new_reqs]
        return [*starts, *output.scheduled_cached_reqs.resumed_req_ids, *chunks]

    def _joining(self, prefills: Sequence[str], scheduled: Mapping[str, int]) -> list[int]:
        """Tokens in the cache, after a step, of those whose prompt ends with it."""
        requests = map(self.requests.__getitem__, prefills)
        held = [(one, one.num_computed_tokens + scheduled[one.request_id]) for one in requests]
        return [tokens for one, tokens in held if tokens >= one.num_tokens]

    def _ends_plan(self, output: SchedulerOutput, plan: StepPlan) -> bool:
        """Add up what the requests that start bring from the cache; whether a step holds what its plan did not reckon
        with."""
        ends_soon = False
        for start in output.scheduled_new_reqs:
            self._cached_tokens += start.num_computed_tokens
            ends_soon |= self.requests[start.req_id].max_tokens <= plan.steps
        return bool(
            (ends_soon and self._counts_ends(plan))
            or output.preempted_req_ids
            or output.scheduled_cached_reqs.resumed_req_ids
            or not output.num_scheduled_tokens
            or self._cached_tokens > plan.max_batch_tokens
        )

    # After a step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now_s = self.clock.now()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        began = time.perf_counter()
        self._account.ended(scheduler_output, now_s)
        self.telemetry.spent(time.perf_counter() - began)
        return outputs

    def report(self) -> None:
        for result in self._account.results(self._forget):
            self._policy.observe(result)
            self.telemetry.observed(result)
            if self.on_step is not None:
                self.on_step(result)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        """vLLM ends every request here, however it ends; a session that waits for input ends as if aborted.

        Who ended in a step is looked at when the step is told of. Nothing may be told for long after an abort.
        """
        began = time.perf_counter()
        if _is_aborted(request) or not request.num_output_tokens:
            self._depart(request)
        else:
            self._taker.leave(request)
            self._account.departed(request)
        self.telemetry.spent(time.perf_counter() - began)
        return super()._free_request(request, delay_free_blocks)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """vLLM goes on here with a session's next part, once the one before has been answered."""
        self._depart(session)
        self._taker.goes_on(session)
        super()._update_request_as_session(session, update)

    def _depart(self, request: Request) -> None:
        record = self._forget(request)
        if record.output_tokens:
            self._account.departed(record)

    def _forget(self, request: Request) -> FinishedRequest:
        """Returns what policies are told of it."""
        told = self._taker.metadata(request)
        self._taker.forget(request)
        return FinishedRequest(
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            class_index=self._taker.class_index(told.slo_class),
            predicted_output_tokens=told.predicted_output_tokens,
            aborted=_is_aborted(request),
        )


class _PlannedStepByStep(_PlannedScheduler, _StepByStep):
    """With planned steps that do not overlap."""


def _is_aborted(request: Request) -> bool:
    return request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)


def core_status(core: Any) -> dict[str, Any]:
    """Engine-core utility `sluice_status`: counts of any scheduler, and what ours has to say."""
    scheduler = core.scheduler
    running, waiting = scheduler.get_request_counts()
    pool = scheduler.kv_cache_manager.block_pool
    counts = {
        "running": running,
        "waiting": waiting,
        "free_blocks": pool.get_num_free_blocks(),
        "total_blocks": pool.num_gpu_blocks,
    }
    if scheduler.connector is not None:
        counts["kv_held"] = len(scheduler.requests) - running - waiting
    if not isinstance(scheduler, SluiceScheduler):
        return counts
    return counts | scheduler.status() | (scheduler.transfers.numbers() if scheduler.connector is not None else {})


def core_control(core: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Engine-core utility `sluice_control`, run between two steps.

    Raises:
        SluiceError: the scheduler is not ours, or a setting is wrong.
    """
    if not isinstance(core.scheduler, SluiceScheduler):
        raise SluiceError("this engine runs vLLM's own scheduler: set engine.scheduler and restart it")
    return core.scheduler.control(changes)
