"""A step-by-step engine for policy tests: slots, KV blocks, chunked prefill, preemption, a step-time law, no more.

It is deliberately naive and shares no code with the policies. Every plan it is handed is checked against the contract
of ``StepPlan``, so a test that merely runs it already tests that.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from policies.engine.standing_plan import StandingPlan
from policies.types import (
    BatchPolicy,
    BatchState,
    FinishedRequest,
    Phase,
    RequestView,
    RunningRequests,
    StepPlan,
    StepResult,
    StepTimes,
)


@dataclass(slots=True, eq=False)
class Job:
    """One request with its true length, and what has been computed of it."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    class_index: int = 0
    arrival_s: float = 0.0
    generated: int = 0
    computed: int = 0

    @property
    def prefill_left(self) -> int:
        return max(0, self.prompt_tokens + max(0, self.generated - 1) - self.computed)

    def view(self) -> RequestView:
        return RequestView(
            request_id=self.request_id,
            arrival_s=self.arrival_s,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.generated,
            class_index=self.class_index,
        )


@dataclass(slots=True)
class ToyEngine:
    policy: BatchPolicy
    times: StepTimes
    slots: int = 64
    total_blocks: int = 100_000
    block_size: int = 16
    max_batch_tokens: int = 8192
    window: int = 1024
    max_model_len: int | None = None
    now_s: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    used_blocks: int = 0
    departed: int = 0
    stands: bool = False
    asked: int = 0
    _standing: StandingPlan[Any] | None = None
    _untold: list[StepResult] = field(default_factory=list)
    _prefill: dict[str, int] = field(default_factory=dict)

    @property
    def preemptions(self) -> int:
        return sum(result.preempted for result in self.results)

    @property
    def finished(self) -> int:
        return sum(len(result.finished) for result in self.results)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        if self._standing is not None:
            self._standing.arrived()

    def snapshot(self) -> BatchState:
        return BatchState(
            now_s=self.now_s,
            running=RunningRequests.of(
                prompt_tokens=[job.prompt_tokens for job in self.running],
                output_tokens=[job.generated for job in self.running],
                prefill_tokens_left=[job.prefill_left for job in self.running],
                class_index=[job.class_index for job in self.running],
            ),
            waiting=tuple(job.view() for job in islice(self.waiting, self.window)),
            waiting_count=len(self.waiting),
            slots=self.slots,
            free_blocks=self.free_blocks,
            total_blocks=self.total_blocks,
            block_size=self.block_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
            departed=self.departed,
        )

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.used_blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hold(self, job: Job, computed: int) -> None:
        self.used_blocks += self._blocks(computed) - self._blocks(job.computed)
        job.computed = computed

    def step(self) -> StepResult:
        """Plan, run and account one step."""
        standing = self._plan()
        plan = standing.plan
        self._prefill = {}
        budget = plan.max_batch_tokens
        decoding, preempted = self._decode(budget) if plan.phase is not Phase.PREFILL else ([], 0)
        budget, started = plan.budget(len(decoding)), 0
        context = sum(job.computed for job in decoding)
        if plan.phase is not Phase.DECODE:
            self._prefill_running(budget - len(decoding))
            started = self._admit(standing.cap(len(self.running)), budget - len(decoding) - sum(self._prefill.values()))
        tokens = sum(self._prefill.values())
        standing.taken(started=started, preempted=preempted > 0, empty=not (tokens or decoding))
        step_s = self.times.step_s(prefill_tokens=tokens, decode_requests=len(decoding), kv_tokens=context)
        self.now_s += step_s
        batch = len(self.running)
        result = StepResult(
            now_s=self.now_s,
            step_s=step_s,
            phase=plan.phase,
            prefill_tokens=tokens,
            prefill_requests=len(self._prefill),
            decode_requests=len(decoding),
            kv_tokens=context,
            max_batch_size=plan.max_batch_size,
            running_count=batch,
            waiting_count=len(self.waiting),
            preempted=preempted,
            finished=self._finish(),
        )
        self._untold.append(result)
        if not self.stands:
            self._tell()
        self.results.append(result)
        self.plans.append(plan)
        return result

    def _plan(self) -> StandingPlan[Any]:
        """The plan that stands, where plans may; else a new one at every step."""
        prefilling = any(job.prefill_left for job in self.running)
        if not (self.stands and self._standing) or not self._standing.stands(
            departed=self.departed, prompts_in_progress=prefilling
        ):
            self._tell()
            state = self.snapshot()
            plan = self.policy.plan(state)
            check_plan(state, plan)
            self._standing, self.asked = StandingPlan(plan, state), self.asked + 1
        return self._standing

    def _tell(self) -> None:
        for result in self._untold:
            self.policy.observe(result)
        self._untold.clear()

    def _decode(self, budget: int) -> tuple[list[Job], int]:
        """Decode what fits, preempting the youngest while a block is missing: who decoded, and how many were lost."""
        ready = [job for job in self.running if not job.prefill_left][:budget]
        decoding: list[Job] = []
        lost: set[str] = set()
        for job in ready:
            while job.request_id not in lost and not self._grow(job):
                victim = self.running[-1]
                lost.add(victim.request_id)
                self._preempt(victim)
            if job.request_id not in lost:
                decoding.append(job)
        return [job for job in decoding if job.request_id not in lost], len(lost)

    def _grow(self, job: Job) -> bool:
        if self._blocks(job.computed + 1) - self._blocks(job.computed) > self.free_blocks:
            return False
        self._hold(job, job.computed + 1)
        job.generated += 1
        return True

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self._hold(job, 0)
        self.departed += 1
        self.waiting.appendleft(job)

    def _prefill_running(self, budget: int) -> None:
        for job in self.running:
            if job.prefill_left and budget > 0:
                budget -= self._compute(job, budget)

    def _admit(self, cap: int, budget: int) -> int:
        """Returns how many have started."""
        started = 0
        while self.waiting and len(self.running) < cap and budget > 0:
            if self._blocks(self.waiting[0].prefill_left) > self.free_blocks:
                break
            job = self.waiting.popleft()
            self.running.append(job)
            budget -= self._compute(job, budget)
            started += 1
        return started

    def _compute(self, job: Job, budget: int) -> int:
        tokens = min(job.prefill_left, budget, self.free_blocks * self.block_size)
        self._hold(job, job.computed + tokens)
        self._prefill[job.request_id] = tokens
        if not job.prefill_left and not job.generated:
            job.generated = 1
        return tokens

    def _finish(self) -> tuple[FinishedRequest, ...]:
        done = [job for job in self.running if not job.prefill_left and job.generated >= job.output_tokens]
        if done:
            self.running = [job for job in self.running if job.prefill_left or job.generated < job.output_tokens]
        for job in done:
            self._hold(job, 0)
        self.departed += len(done)
        return tuple(
            FinishedRequest(
                prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens, class_index=job.class_index
            )
            for job in done
        )


def check_plan(state: BatchState, plan: StepPlan) -> None:
    """The contract of a plan: a positive cap and budget, and something to run."""
    may_start = bool(state.waiting) and plan.starts > 0 and plan.max_batch_size > state.running_count
    assert plan.max_batch_size >= 1
    assert plan.max_batch_tokens >= 1
    assert plan.max_prefill_tokens is None or plan.max_prefill_tokens >= 0
    assert plan.starts >= 0
    assert plan.steps >= 1
    assert plan.departures >= 0
    decoding = state.running_count - state.prefilling_count
    if plan.phase is Phase.DECODE:
        assert not plan.starts
        assert decoding or not (state.running_count or state.waiting)
    elif plan.phase is Phase.PREFILL:
        assert may_start or state.prefilling_count
    elif state.running_count or state.waiting:
        assert may_start or state.running_count


def run_closed(engine: ToyEngine, jobs: list[Job], clients: int) -> ToyEngine:
    """Keep ``clients`` requests in the engine until all jobs are done."""
    queue = deque(jobs)
    while queue or engine.waiting or engine.running:
        while queue and len(engine.waiting) + len(engine.running) < clients:
            engine.submit(queue.popleft())
        engine.step()
    return engine


def random_jobs(count: int, *, prompt: tuple[int, int], mean_output: float, seed: int) -> list[Job]:
    """Jobs with uniform prompts and geometric outputs."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(*prompt, count)
    outputs = rng.geometric(1.0 / mean_output, count)
    return [
        Job(request_id=f"r{i}", prompt_tokens=int(p), output_tokens=int(o))
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
