"""An engine with continuous batching: plan a step, schedule it, account for it.

The plan comes from a `BatchPolicy`; `simulator.scheduler` applies it. Departure from vLLM: tokens are accounted for at
the end of the step, so no step is in flight while the next is planned.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol, runtime_checkable

from policies.checks import require_at_least
from policies.engine.promised_queue import NOTHING_LEFT
from policies.engine.standing_plan import StandingPlan
from policies.errors import ConfigError
from policies.router.credit import MemoryBound
from policies.types import BatchPolicy, BatchState, Left, Paced, StepResult
from simulator.core import Event, Kind
from simulator.metrics import EngineTotals
from simulator.requests import Request
from simulator.scheduler import Scheduler, Step
from simulator.tier import Tier, TierConfig

# How long an engine sleeps that could schedule nothing, as vLLM's loop does.
_IDLE_STEP_S = 1e-3


class StepClock(Protocol):
    """What a step costs: `StepTimes`, or anything finer."""

    def step_s(
        self,
        *,
        prefill_tokens: float = 0.0,
        decode_requests: float = 0.0,
        kv_tokens: float = 0.0,
        prefill_kv_tokens: float = 0.0,
    ) -> float: ...


@runtime_checkable
class UnevenClock(StepClock, Protocol):
    """Time passes between steps, too."""

    def before_s(self, decodes: int) -> float:
        """Seconds before a step of so many decodes that are in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        slots: most requests that run at once (vLLM's max_num_seqs).
        total_blocks, block_size: the KV cache; block_size in tokens.
        max_batch_tokens: most tokens per step (vLLM's max_num_batched_tokens).
        max_model_len: most tokens of a request, prompt and answer together, None is the
            longest request of the workload, as an operator would set it.
        ordered: what waits starts by its promise, as with Sluice's scheduler, not as it came.
        kept_fraction: of the cache, what sessions that come back may keep through their pauses.
        watermark: fraction of the blocks that is kept free when a request starts beside others.
        max_num_queued_reqs: most requests that an engine holds, running ones too; it refuses any more.
        max_num_queued_tokens: it refuses what comes while the prompts of all requests without a first token have this
            many tokens, read or not. The last three are vLLM's own; None sets no limit.
        tier: memory beyond this cache, None without.

    Raises:
        ConfigError: a value is out of bounds.
    """

    slots: int = 256
    total_blocks: int = 27_000
    block_size: int = 16
    max_batch_tokens: int = 8192
    max_model_len: int | None = None
    ordered: bool = False
    kept_fraction: float = 0.0
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    tier: TierConfig | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "slots", "total_blocks", "block_size", "max_batch_tokens", "max_model_len")
        require_at_least(0, self, "kept_fraction", "watermark", "max_num_queued_reqs", "max_num_queued_tokens")
        for name in ("kept_fraction", "watermark"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be below 1, got {getattr(self, name)}")

    @property
    def capacity_tokens(self) -> int:
        return self.total_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.total_blocks)

    def serving(self, requests: Iterable[Request]) -> "EngineConfig":
        """The same sizes with `max_model_len` set to the longest of these requests, where it is not given."""
        if self.max_model_len is not None:
            return self
        longest = max((each.prompt_tokens + each.output_tokens for each in requests), default=None)
        return replace(self, max_model_len=longest)

    @property
    def refuses(self) -> bool:
        """Whether it may refuse a request at all."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None


class Engine:
    """One replica's engine; ``on_finished`` is told at the end of the step that finished requests."""

    def __init__(
        self,
        replica_id: str,
        config: EngineConfig,
        policy: BatchPolicy,
        times: StepClock,
        on_finished: Callable[[float, "Engine", list[Request]], Iterable[Event]],
    ) -> None:
        self.replica_id = replica_id
        self.config = config
        self.policy = policy
        self.totals = EngineTotals()
        self.memory = MemoryBound()
        self._times = times
        self._uneven = times if isinstance(times, UnevenClock) else None
        self._on_finished = on_finished
        self._scheduler = Scheduler(
            slots=config.slots,
            total_blocks=config.total_blocks,
            block_size=config.block_size,
            watermark_blocks=config.watermark_blocks,
            ordered=config.ordered,
            totals=self.totals,
            kept_fraction=config.kept_fraction,
            tier=None if config.tier is None else Tier(config.tier, config.block_size),
            pace_s=lambda: self.seconds_per_prompt_token,
        )
        self._batch = self._scheduler.batch
        self._standing: StandingPlan[Request] | None = None
        self._step: Step | None = None
        self._awake = False
        self._stopped = False
        self._now_s = 0.0
        self._unread_tokens = 0  # prompts of all that it holds without a first token
        self._read: list[Request] = []
        self._called_back: list[Request] = []
        self._recalled: list[Request] = []

    @property
    def holds(self) -> int:
        return len(self._scheduler)

    @property
    def late(self) -> int:
        """Requests that wait and cannot be in time."""
        waiting = self._scheduler.waiting
        return len(waiting) - waiting.in_time

    @property
    def in_time_tokens(self) -> int:
        """Unread tokens of prompts in progress and of those that wait and are not late."""
        return self._batch.unread_tokens + self._scheduler.waiting.in_time_tokens

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """The pace at which it reads, as far as its policy knows it."""
        return self.policy.seconds_per_prompt_token if isinstance(self.policy, Paced) else None

    @property
    def mean_context_tokens(self) -> float | None:
        """Tokens of a running request, prompt and answer so far; None when nothing runs."""
        running = self._batch.view()
        return running.total_tokens / len(running) if len(running) else None

    def return_chance(self, now_s: float) -> float:
        """That what its prefix cache gives up next would be wanted again soon."""
        return self._scheduler.return_chance(now_s)

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of its prompt that are cached here."""
        return self._scheduler.known_tokens(request)

    def spared_tokens(self, request: Request, prompt_token_s: float) -> int:
        """Leading tokens of its prompt that need not be read here: cached ones, and what a load would save."""
        load = self._scheduler.load(request, self._now_s, prompt_token_s)
        return self.known_tokens(request) + load.saved_tokens

    def takes_more(self) -> bool:
        """Whether a request that comes now is let in, by vLLM's own limits (`AsyncLLM.check_admission`)."""
        most_requests, most_tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        if most_requests is not None and self.holds >= most_requests:
            return False
        return most_tokens is None or self._unread_tokens < most_tokens

    def submit(self, request: Request, now_s: float) -> list[Event]:
        request.entered_s = now_s
        request.cached_tokens, request.loaded_tokens, self._now_s = self.known_tokens(request), 0, now_s
        if request.first_token_s is None:
            self._unread_tokens += request.prompt_tokens
        self._scheduler.add(request, now_s, self._left(request))
        if self._standing is not None:
            self._standing.arrived(promised=request.has_promise)
        return self._wake(now_s)

    def _left(self, request: Request) -> Left:
        """Tokens of its answer, as far as its policy knows; that takes note of it."""
        if not isinstance(self.policy, Paced):
            return NOTHING_LEFT
        answers = self.policy.answers
        left = answers.left(request.class_index, request.predicted_output_tokens, request.generated_tokens)
        if request.ends_by_s < inf:
            answers.come(request.arrival_s, request.ends_by_s, request.view().prefill_tokens, left)
        return left

    def _wake(self, now_s: float) -> list[Event]:
        if self._awake:
            return []
        self._awake = True
        return [Event(now_s, Kind.STEP, self._on_step)]

    def recall(self, request: Request) -> None:
        """It is to give its slot back at the end of the step under way, with the tokens that it has by then."""
        self._called_back.append(request)

    def take_read(self) -> list[Request]:
        """Requests whose first token has come since this was asked last."""
        read, self._read = self._read, []
        return read

    def take_recalled(self) -> list[Request]:
        """Requests that have given their slots back since this was asked last."""
        recalled, self._recalled = self._recalled, []
        return recalled

    def stop(self) -> list[Request]:
        """Fail: everything it held, oldest first, keeps its tokens, those of the step under way too, but no KV."""
        self._stopped, self._step = True, None
        held = self._scheduler.clear()
        for request in held:
            request.entered_s = None
        return held

    def _on_step(self, now_s: float) -> Iterable[Event]:
        """Close the step that ran until now and open the next one."""
        if self._stopped:
            return []
        self._now_s = now_s
        events = list(self._close(self._step, now_s)) if self._step else []
        if not self.holds:
            self._awake, self._step = False, None
            return events
        self._step = self._open(now_s)
        events.append(Event(now_s + self._step.before_s + self._step.step_s, Kind.STEP, self._on_step))
        return events

    def _open(self, now_s: float) -> Step:
        standing, reading = self._standing, self._batch.prefilling > 0
        if standing is None or not standing.stands(departed=self._scheduler.departed, prompts_in_progress=reading):
            standing = self._standing = self._planned(now_s)
        step = self._scheduler.schedule(standing, now_s)
        standing.taken(started=step.started, preempted=step.preempted > 0, empty=step.empty)
        step.step_s = _IDLE_STEP_S if step.empty else self._seconds(step)
        step.before_s = 0.0 if self._uneven is None else self._uneven.before_s(step.decodes)
        return step

    def _planned(self, now_s: float) -> StandingPlan[Request]:
        in_the_way: list[Request] = []
        if isinstance(self.policy, Paced):
            in_the_way = self._scheduler.sort_by_promises(now_s, self.policy, self.mean_context_tokens or 0.0)
        state = self._state(now_s)
        plan = self.policy.plan(state)
        self.memory.planned(state.running_count, plan.max_batch_size, by_memory=plan.limited_by.is_memory)
        return StandingPlan(plan, state, in_the_way)

    def _state(self, now_s: float) -> BatchState:
        return BatchState(
            now_s=now_s,
            running=self._batch.view(),
            waiting=self._scheduler.head(),
            waiting_count=len(self._scheduler.waiting),
            slots=self.config.slots,
            free_blocks=self._batch.free_blocks,
            total_blocks=self.config.total_blocks,
            block_size=self.config.block_size,
            max_batch_tokens=self.config.max_batch_tokens,
            departed=self._scheduler.departed,
            max_model_len=self.config.max_model_len,
            unread=self._scheduler.waiting.unread,
        )

    def _seconds(self, step: Step) -> float:
        return self._times.step_s(
            prefill_tokens=step.prefill_tokens,
            decode_requests=step.decodes,
            kv_tokens=step.kv_tokens,
            prefill_kv_tokens=step.prefill_kv_tokens,
        )

    def _close(self, step: Step, now_s: float) -> Iterable[Event]:
        batch_size, waiting = len(self._batch), len(self._scheduler.waiting)
        self._note_tokens(step, now_s)
        self.totals.add(
            step.plan.phase,
            step_s=step.step_s,
            prefill_tokens=step.prefill_tokens,
            decodes=step.decodes,
            preempted=step.preempted,
            batch_size=batch_size,
            used_blocks=self._batch.total_blocks - self._batch.free_blocks,
        )
        finished = self._scheduler.finish(now_s)
        self.policy.observe(_result(step, now_s, batch_size, waiting, finished))
        self._give_back()
        return self._on_finished(now_s, self, finished) if finished or step.completed or self._recalled else ()

    def _give_back(self) -> None:
        """Take out what was called back and has not ended."""
        for request in filter(self._scheduler.take, self._called_back):
            if request.first_token_s is None:
                self._unread_tokens -= request.prompt_tokens
            request.entered_s = None
            self._recalled.append(request)
        self._called_back.clear()

    def _note_tokens(self, step: Step, now_s: float) -> None:
        if step.decodes:
            self.totals.gaps.add(self._batch.gaps_s(step.decoding, now_s))
        for row in step.completed:
            request = self._batch.requests[row]
            gap_s = self._batch.gaps_s(slice(row, row + 1), now_s)
            if request.first_token_s is None:
                request.first_token_s = now_s
                self._unread_tokens -= request.prompt_tokens
                self._read.append(request)
            else:
                self.totals.gaps.add(gap_s)


def _result(step: Step, now_s: float, batch_size: int, waiting: int, finished: list[Request]) -> StepResult:
    return StepResult(
        now_s=now_s,
        step_s=0.0 if step.empty else step.before_s + step.step_s,  # as the live plug-in counts
        phase=step.plan.phase,
        prefill_tokens=step.prefill_tokens,
        prefill_requests=step.prefill_requests,
        decode_requests=step.decodes,
        kv_tokens=step.kv_tokens,
        max_batch_size=step.plan.max_batch_size,
        running_count=batch_size,
        waiting_count=waiting,
        preempted=step.preempted,
        prefill_kv_tokens=step.prefill_kv_tokens,
        finished=tuple([request.ended() for request in finished]),
    )
