"""Sluice's scheduler plug-in for vLLM: policies plan every engine step, vLLM's own scheduler carries the plan out.

    vllm serve MODEL --scheduler-cls deployments.vllm_scheduler.SluiceScheduler \\
        --additional-config '{"sluice": {"mode": "auto"}}'

No line of vLLM's scheduling is repeated here. A `Planner` sets the knobs that vLLM has already:

* the most requests: `max_num_active_reqs`, which never evicts;
* DECODE: no admission, and prompts in progress are put off as on a throttled step of data-parallel engines;
* PREFILL: running decodes are not eligible before the next step, which is how vLLM staggers decodes in pipelines;
* token budget: `max_num_scheduled_tokens`;
* order: a waiting queue by promises, where vLLM's policy is "fcfs";
* what is given up first: a queue of free blocks that has those of sessions behind it.

In mode `stock` there is no planner, and each step costs one more look at an attribute.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, StreamingUpdate

from deployments.config.scheduler import SchedulerSettings
from deployments.engines.features import Cause, Feature, switched_off, why_off
from deployments.engines.vllm.cached_tiers import tier_table
from deployments.engines.vllm.causes import causes_of_scheduler, passing_causes
from deployments.engines.vllm.request_metadata import comes_back
from deployments.engines.vllm.scheduler.kept_blocks import KeptBlocks
from deployments.engines.vllm.scheduler.planner import Planner
from deployments.engines.vllm.scheduler.telemetry import Telemetry, Transfers
from policies.errors import ConfigError, SluiceError
from policies.live import Live
from policies.types import StepResult
from router.clock import Clock, MonotonicClock


class SluiceScheduler(AsyncScheduler):
    """vLLM's scheduler, and a switch between stock and planned steps.

    Attributes:
        clock: measures steps.
        on_step: called with every step's result, for calibration and tests: before the next plan, or by `report`.
        planner: plans the steps; None in mode `stock`.
        kept: the free blocks; None without a prefix cache, and before a mode other than `stock`.
        live_settings, slots, late_patience_s: the settings in force, and what follows from them.
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
        self.clock: Clock = MonotonicClock()
        self.on_step: Callable[[StepResult], None] | None = None
        self.telemetry = Telemetry()
        self.transfers = Transfers()
        self.planner: Planner | None = None
        self.kept: KeptBlocks | None = None
        self._stock_limits = most, _ = self.max_num_active_reqs, self.max_num_scheduled_tokens
        self.live_settings = Live(SchedulerSettings.of_vllm(self.vllm_config.additional_config))
        self.slots = self.live_settings.view(lambda settings: min(settings.max_batch_size or most, most))
        self.late_patience_s = self.live_settings.view(lambda settings: settings.late_patience_s)
        self._base: type[Scheduler] = AsyncScheduler
        if not self.scheduler_config.async_scheduling:
            # Where a step ends before the next begins, as on CPUs, vLLM itself takes `Scheduler`: what `AsyncScheduler`
            # notes of tokens in flight costs 1 to 2 us for each request of a step, and would always be nothing.
            self._base = Scheduler
            self._update_request_with_output = Scheduler._update_request_with_output.__get__(self)
        self._go_by(self.settings)

    @property
    def settings(self) -> SchedulerSettings:
        """In force now."""
        return self.live_settings.now

    def control(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings between two steps; lengths and step times learned so far are kept.

        Returns:
            The settings in force.

        Raises:
            ConfigError: a setting is unknown or wrong, or cannot change; nothing has changed then.
        """
        self.report()
        # Before they are looked at, which runs the code that they name: that is for the configuration alone to say.
        for name in SchedulerSettings.fixed_keys():
            if changes.get(name, now := getattr(self.settings, name)) != now:
                raise ConfigError(f"{name} cannot change while the engine runs: set engine.scheduler and redeploy")
        self._go_by(self.settings.changed(changes))
        return self.settings.model_dump(mode="json")

    def report(self) -> None:
        """Tell policy, telemetry and `on_step` of the steps that have ended since they were last told."""
        if self.planner is not None:
            self.planner.report()

    def status(self) -> dict[str, Any]:
        """What the plug-in does and why, for people and monitoring."""
        if self.planner is None:
            return {"mode": self.settings.mode}
        self.report()
        snapshot = self.planner.snapshot()
        return {
            "mode": self.settings.mode,
            **({} if self.settings.policy is None else {"policy": self.settings.policy}),
            "batch_size": int(min(self.slots.now, self.planner.memory.requests, snapshot.most)),
            **({} if self.kept is None else {"kept_blocks": self.kept.kept, "return_chance": self.kept.return_chance}),
            **self.planner.unread(),
            **self.telemetry.of_policy(self.planner.policy, snapshot.state),
            **self.telemetry.of_steps(),
        }

    def _go_by(self, settings: SchedulerSettings) -> None:
        """Raises ConfigError; all is as it was then."""
        planner = self.planner
        if settings.mode == "stock":
            self.live_settings.replace(settings)
            self.planner = None
            if self.kept is not None:
                self.kept.keep_at_most(0)
            if planner is not None:
                self.max_num_active_reqs, self.max_num_scheduled_tokens = self._stock_limits
                self._requeue(create_request_queue(self.policy))
            return
        causes = causes_of_scheduler(self)
        phases_work = not why_off(Feature.PHASES, causes)
        policy = settings.build_policy(
            learned=planner.policy if planner else None,
            before=self.settings,
            phases=phases_work,
            speculates=self.num_spec_tokens > 0,
        )
        self.live_settings.replace(settings)
        self._keep(settings.kept_fraction)
        if planner is not None:
            planner.settings_changed(policy)
            return
        cuts_prompts = not why_off(Feature.CUT_PROMPTS, causes)
        self.planner = Planner(self, policy, phases_work=phases_work, cuts_prompts=cuts_prompts, on_step=self._note)
        if self.policy == SchedulingPolicy.FCFS:
            self._requeue(self.planner.queue)

    def _keep(self, fraction: float) -> None:
        if not self.kv_cache_manager.enable_caching:
            return
        pool = self.kv_cache_manager.block_pool
        if self.kept is None:
            self.kept = KeptBlocks.put_into(pool, self.clock)
        self.kept.keep_at_most(int(fraction * pool.num_gpu_blocks))

    def _note(self, result: StepResult) -> None:
        if self.on_step is not None:
            self.on_step(result)

    def _requeue(self, queue: Any) -> None:
        for request in self.waiting:
            queue.add_request(request)
        self.waiting = queue

    # What vLLM calls

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.planner is not None and self.requests.get(request.request_id) is request:  # not a session's next part
            self.planner.arrived(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self.planner is not None:
            if self.pause_state == PauseState.PAUSED_ALL:
                self.planner.paused()
            else:
                throttle_prefills = self.planner.before_step(throttle_prefills)
        return super().schedule(throttle_prefills)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """vLLM calls this at the end of `schedule`, when requests are still as they were before the step."""
        if self.planner is not None:
            self.planner.scheduled(scheduler_output)
        self._base._update_after_schedule(self, scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now_s = self.clock.now()
        planner = self.planner
        accepted = 0 if planner is None else planner.verified(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if planner is not None:
            planner.ended(scheduler_output, now_s, accepted)
        return outputs

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        """vLLM ends every request here, however it ends; a session that waits for input ends as if aborted."""
        if self.planner is not None:
            self.planner.leaves(request)
        return super()._free_request(request, delay_free_blocks)

    def _free_request_blocks(self, request: Request) -> None:
        """vLLM calls this when a request has ended or is preempted. With a KV connector it may put the freeing off, and
        keeps nothing then."""
        if self.kept is None:
            super()._free_request_blocks(request)
            return
        params = request.sampling_params
        self.kept.keeps = comes_back(params.extra_args if params else None, request.session_id)
        try:
            super()._free_request_blocks(request)
        finally:
            self.kept.keeps = False

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """vLLM goes on here with a session's next part, once the one before has been answered."""
        if self.planner is not None:
            self.planner.departs(session)
        super()._update_request_as_session(session, update)

    def make_stats(
        self, spec_decoding_stats: Any = None, kv_connector_stats: Any = None, *args: Any, **more: Any
    ) -> Any:
        """vLLM calls this after every step, whether it logs statistics or not."""
        if kv_connector_stats is not None and (tiers := tier_table(self)) is not None:
            tiers.measured(kv_connector_stats.data)
        return super().make_stats(spec_decoding_stats, kv_connector_stats, *args, **more)

    def _update_from_kv_xfer_finished(self, kv_connector_output: Any) -> None:
        """vLLM calls this where there is a KV connector."""
        if (stats := kv_connector_output.kv_connector_stats) is not None:
            self.transfers.add(stats.data)
        super()._update_from_kv_xfer_finished(kv_connector_output)


def core_status(core: Any) -> dict[str, Any]:
    """Engine-core utility `sluice_status`: counts of any scheduler, what is off, and what ours has to say."""
    scheduler = core.scheduler
    plans = isinstance(scheduler, SluiceScheduler) and scheduler.planner is not None
    running, waiting = scheduler.get_request_counts()
    cache = scheduler.kv_cache_manager
    counts = {
        "running": running,
        "waiting": waiting,
        "free_blocks": cache.block_pool.get_num_free_blocks(),
        "total_blocks": cache.block_pool.num_gpu_blocks,
        "kv_cache_usage_ratio": cache.usage,
        "off": switched_off(
            causes_of_scheduler(scheduler) | passing_causes(scheduler) | (set() if plans else {Cause.STOCK})
        ),
    }
    if cache.enable_caching and (hits := cache.prefix_cache_stats) is not None:
        counts |= {"prefix_cache_query_tokens": hits.queries, "prefix_cache_hit_tokens": hits.hits}
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
