"""An engine with continuous batching: plan a step, schedule it, account for it.

The plan comes from a `BatchPolicy`; the engine only applies it, in vLLM's order: decodes first, then prompts already
begun, then admissions while slots, token budget and blocks last. A step that had to preempt admits none. Departures
from vLLM: tokens are accounted for at the end of the step (no step is in flight while the next is planned), and only
the whole prompt's room is asked for at admission.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Protocol

from policies.checks import require_at_least
from policies.engine.promised_queue import PromisedQueue, Waiting
from policies.engine.standing_plan import StandingPlan
from policies.errors import ConfigError
from policies.router.credit import MemoryBound
from policies.types import (
    BatchPolicy,
    BatchState,
    FinishedRequest,
    Limit,
    Paced,
    Phase,
    RequestView,
    StepPlan,
    StepResult,
)
from simulator.batch import Batch, Rows
from simulator.core import Event, Kind
from simulator.metrics import EngineTotals
from simulator.prefix_cache import PrefixCache
from simulator.requests import Request

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        slots: most requests that run at once (vLLM's max_num_seqs).
        total_blocks, block_size: the KV cache; block_size in tokens.
        max_batch_tokens: most tokens per step (vLLM's max_num_batched_tokens).
        ordered: what waits starts by its promise, as with Sluice's scheduler, not as it came.
        watermark: fraction of the blocks that is kept free when a request starts beside others.
        max_num_queued_reqs: most requests that an engine holds, running ones too; it refuses any more.
        max_num_queued_tokens: it refuses what comes while the prompts of all requests without a first token have so
            many tokens, whatever of them has been computed. The last three are vLLM's own; None sets no limit.

    Raises:
        ConfigError: a value is out of bounds.
    """

    slots: int = 256
    total_blocks: int = 27_000
    block_size: int = 16
    max_batch_tokens: int = 8192
    ordered: bool = False
    watermark: float = 0.0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "slots", "total_blocks", "block_size", "max_batch_tokens")
        require_at_least(0, self, "watermark", "max_num_queued_reqs", "max_num_queued_tokens")
        if self.watermark >= 1:
            raise ConfigError(f"watermark must be below 1, got {self.watermark}")

    @property
    def capacity_tokens(self) -> int:
        return self.total_blocks * self.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.total_blocks)

    @property
    def refuses(self) -> bool:
        """Whether it may refuse a request at all."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None


@dataclass(slots=True)
class _Step:
    """What a step holds while it runs."""

    plan: StepPlan
    decoding: Rows
    decodes: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    prefill_requests: int = 0
    completed: tuple[int, ...] = ()
    preempted: int = 0
    started: int = 0
    step_s: float = 0.0

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefill_tokens


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
        self._on_finished = on_finished
        self._batch = Batch(config.slots, config.total_blocks, config.block_size)
        self.prefixes = PrefixCache(config.block_size)
        self._waiting: PromisedQueue[Request] = PromisedQueue()
        self._views: tuple[RequestView, ...] | None = ()
        self._standing: StandingPlan[Request] | None = None
        self._step: _Step | None = None
        self._awake = False
        self._stopped = False
        self._departed = 0
        self._unread_tokens = 0  # prompts of all that it holds without a first token

    @property
    def holds(self) -> int:
        return len(self._batch) + len(self._waiting)

    @property
    def late(self) -> int:
        """Those that wait and cannot be in time."""
        return len(self._waiting) - self._waiting.in_time

    @property
    def unread_tokens(self) -> int:
        """Of prompts in progress and of all that wait."""
        return self._batch.unread_tokens + sum(one.unread_tokens for one in self._waiting)

    @property
    def unread_prompts(self) -> int:
        """In progress, and all that wait."""
        return len(self._batch.prefilling_rows()) + len(self._waiting)

    @property
    def in_time_tokens(self) -> int:
        """Unread, of prompts in progress and of those that wait and are not late."""
        return self._batch.unread_tokens + self._waiting.in_time_tokens

    @property
    def seconds_per_prompt_token(self) -> float | None:
        """The pace at which it reads, as far as its policy knows it."""
        return self.policy.seconds_per_prompt_token if isinstance(self.policy, Paced) else None

    @property
    def mean_context_tokens(self) -> float | None:
        """Of what runs, prompt and answer so far; None when nothing does."""
        running = self._batch.view()
        return running.total_tokens / len(running) if len(running) else None

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of its prompt that are cached here."""
        return request.cached_tokens if request.session is None else self.prefixes.known_tokens(request)

    def takes_more(self) -> bool:
        """Whether a request that comes now is let in, by vLLM's own limits (`AsyncLLM.check_admission`)."""
        most_requests, most_tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        if most_requests is not None and self.holds >= most_requests:
            return False
        return most_tokens is None or self._unread_tokens < most_tokens

    def submit(self, request: Request, now_s: float) -> list[Event]:
        request.entered_s = now_s
        request.cached_tokens = self.known_tokens(request)
        promised = self.config.ordered
        if request.first_token_s is None:
            self._unread_tokens += request.prompt_tokens
        self._waiting.add(
            Waiting(
                request,
                arrival_s=request.arrival_s if promised else now_s,
                deadline_s=request.deadline_s if promised else inf,
                unread_tokens=request.view().prefill_tokens,
                fills_idle=promised and request.fills_idle,
            )
        )
        self._views = None
        if self._standing is not None:
            self._standing.arrived()
        return self._wake(now_s)

    def _wake(self, now_s: float) -> list[Event]:
        if self._awake:
            return []
        self._awake = True
        return [Event(now_s, Kind.STEP, self._on_step)]

    def stop(self) -> list[Request]:
        """Fail: everything it held, oldest first, keeps its tokens, those of the step under way too, but no KV."""
        self._stopped, self._step = True, None
        running = [self._batch.preempt() for _ in range(len(self._batch))][::-1]
        self._note_lost(running)
        held = running + [one.item for one in self._waiting]
        self._waiting = PromisedQueue()
        for request in held:
            request.entered_s = None
        return held

    def _on_step(self, now_s: float) -> Iterable[Event]:
        """Close the step that ran until now and open the next one."""
        if self._stopped:
            return []
        events = list(self._close(self._step, now_s)) if self._step else []
        if not self.holds:
            self._awake, self._step = False, None
            return events
        self._step = self._open(now_s)
        events.append(Event(now_s + self._step.step_s, Kind.STEP, self._on_step))
        return events

    def _open(self, now_s: float) -> _Step:
        standing = self._standing
        if standing is None or not standing.stands(
            departed=self._departed, prompts_in_progress=self._batch.prefilling > 0
        ):
            standing = self._planned(now_s)
        step = self._schedule(standing, now_s)
        standing.taken(started=step.started, preempted=step.preempted > 0, empty=step.empty)
        step.step_s = _IDLE_STEP_S if step.empty else self._seconds(step)
        return step

    def _planned(self, now_s: float) -> StandingPlan[Request]:
        pace, held = self.seconds_per_prompt_token, list[Request]()
        if self.config.ordered and pace is not None and (self._waiting.changed or self._batch.prefilling):
            held = self._waiting.split(now_s, pace, self._reading())
            self._views = None
        state = self._state(now_s)
        plan = self.policy.plan(state)
        self.memory.planned(state.running_count, plan.max_batch_size, by_memory=plan.limited_by is Limit.MEMORY)
        self._standing = StandingPlan(plan, state, held)
        return self._standing

    def _reading(self) -> list[Waiting[Request]]:
        """Prompts in progress, with what is left of them."""
        return [
            Waiting(
                request,
                arrival_s=request.arrival_s,
                deadline_s=request.deadline_s,
                unread_tokens=left,
                has_begun=request.first_token_s is not None,
                reads=True,
            )
            for request, left in self._batch.prompts_left()
        ]

    def _seconds(self, step: _Step) -> float:
        return self._times.step_s(
            prefill_tokens=step.prefill_tokens,
            decode_requests=step.decodes,
            kv_tokens=step.kv_tokens,
            prefill_kv_tokens=step.prefill_kv_tokens,
        )

    def _state(self, now_s: float) -> BatchState:
        if self._views is None:
            self._views = tuple(one.item.view() for one in islice(self._waiting, self.config.slots))
        return BatchState(
            now_s=now_s,
            running=self._batch.view(),
            waiting=self._views,
            waiting_count=len(self._waiting),
            slots=self.config.slots,
            free_blocks=self._batch.free_blocks,
            total_blocks=self.config.total_blocks,
            block_size=self.config.block_size,
            max_batch_tokens=self.config.max_batch_tokens,
            departed=self._departed,
        )

    def _schedule(self, standing: StandingPlan[Request], now_s: float) -> _Step:
        plan = standing.plan
        step = _Step(plan, slice(0, 0))
        budget = plan.max_batch_tokens
        if plan.phase is not Phase.PREFILL:
            self._preempt(step, self._batch.make_room(budget))
            step.decoding, step.decodes, step.kv_tokens = self._batch.decode(budget)
            budget = plan.budget(step.decodes) - step.decodes
        if plan.phase is not Phase.DECODE:
            budget = self._continue_prompts(step, budget, standing.held)
            if not step.preempted:
                self._admit(step, budget, standing.cap(len(self._batch)), now_s)
        return step

    def _preempt(self, step: _Step, lost: list[Request]) -> None:
        for request in lost:
            request.preemptions += 1
            unread_tokens = request.view().prefill_tokens
            self._waiting.put_back(Waiting(request, arrival_s=request.arrival_s, unread_tokens=unread_tokens))
        if lost:
            self._note_lost(lost)
            self._departed += len(lost)
            step.preempted += len(lost)
            self._views = None

    def _note_lost(self, requests: list[Request]) -> None:
        """Their KV is gone and will be computed anew."""
        self.totals.recomputed_tokens += sum(request.prompt_tokens + request.generated_tokens for request in requests)

    def _continue_prompts(self, step: _Step, budget: int, held: Sequence[Request]) -> int:
        """Chunks of the prompts that were begun, oldest first, but for those held back; without a free block the
        youngest gives way."""
        for row in self._batch.prefilling_rows():
            if budget <= 0 or row >= len(self._batch):
                break
            if self._batch.requests[row] in held:
                continue
            while not (tokens := self._compute(step, row, budget)) and row < len(self._batch) - 1:
                if not step.decodes:
                    self._preempt(step, [self._batch.preempt()])
                else:
                    break
            budget -= tokens
        return budget

    def _compute(self, step: _Step, row: int, budget: int) -> int:
        tokens, kv_tokens, complete = self._batch.prefill(row, budget)
        if tokens:
            step.prefill_tokens += tokens
            step.prefill_kv_tokens += kv_tokens
            step.prefill_requests += 1
            if complete:
                step.completed += (row,)
        return tokens

    def _admit(self, step: _Step, budget: int, cap: int, now_s: float) -> None:
        """Start the head of the queue until cap, budget or blocks run out."""
        cap, kept_blocks = min(cap, self.config.slots), self.config.watermark_blocks
        while self._waiting and len(self._batch) < cap and budget > 0:
            request = self._waiting.head().item
            if not self._batch.fits(request, kept_blocks):
                return
            self._waiting.pop()
            self._views = None
            self._find_prefix(request)
            if request.started_s is None:
                request.started_s = now_s
            self._batch.admit(request)
            step.started += 1
            budget -= self._compute(step, len(self._batch) - 1, budget)

    def _find_prefix(self, request: Request) -> None:
        if request.session is not None:
            self.prefixes.shrink(self._batch.free_blocks * self.config.block_size)
            request.cached_tokens = self.prefixes.take(request)

    def _close(self, step: _Step, now_s: float) -> Iterable[Event]:
        batch_size, waiting = len(self._batch), len(self._waiting)
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
        finished = self._batch.finish(now_s)
        for request in finished:
            self.prefixes.keep(request, request.prompt_tokens + request.output_tokens)
        self.prefixes.shrink(self._batch.free_blocks * self.config.block_size)
        self._departed += len(finished)
        self.policy.observe(self._result(step, now_s, batch_size, waiting, finished))
        return self._on_finished(now_s, self, finished) if finished or step.completed else ()

    def _note_tokens(self, step: _Step, now_s: float) -> None:
        if step.decodes:
            self.totals.gaps.add(self._batch.gaps_s(step.decoding, now_s))
        for row in step.completed:
            request = self._batch.requests[row]
            gap_s = self._batch.gaps_s(slice(row, row + 1), now_s)
            if request.first_token_s is None:
                request.first_token_s = now_s
                self._unread_tokens -= request.prompt_tokens
            else:
                self.totals.gaps.add(gap_s)

    def _result(self, step: _Step, now_s: float, batch_size: int, waiting: int, finished: list[Request]) -> StepResult:
        return StepResult(
            now_s=now_s,
            step_s=0.0 if step.empty else step.step_s,
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
            finished=tuple(_finished(request) for request in finished),
        )


def _finished(request: Request) -> FinishedRequest:
    return FinishedRequest(
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        class_index=request.class_index,
        predicted_output_tokens=request.predicted_output_tokens,
    )
