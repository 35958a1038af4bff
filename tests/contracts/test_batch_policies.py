"""What every batch policy promises, checked over all that are registered and over compositions of them."""

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.smallest import Smallest
from policies.engine.step_time import StepTimeConfig
from policies.registry import Family, build, build_of, kinds
from policies.types import (
    BatchPolicy,
    BatchState,
    FinishedRequest,
    Phase,
    RequestView,
    RunningRequests,
    StepCoefficients,
    StepPlan,
    StepResult,
    StepTimes,
)
from tests.toy_engine import Job, ToyEngine, check_plan, random_jobs, run_closed

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.01, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=5e-8),
    mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=5e-8, interference_s=1e-4),
)

pytestmark = pytest.mark.slow
PRIOR = StepTimeConfig(prior=TIMES)
TARGET = {"itl_target_s": 0.03}

MAKERS: dict[str, Callable[[], BatchPolicy]] = {
    "auto": lambda: build("auto"),
    "auto with a latency target": lambda: build(
        "auto", itl_targets_s=(0.03,) * 3, itl_budgets_s=(0.1,) * 3, classes=3, step_times=TIMES
    ),
    "stock": lambda: build("stock"),
    "memory_aware": lambda: build("memory_aware", min_samples=4),
    "memory_aware linear": lambda: build("memory_aware", form="linear", basis="resident", min_samples=4),
    "sla_constrained": lambda: build("sla_constrained", window_steps=2, **TARGET),
    "sla_constrained_literal": lambda: build("sla_constrained_literal", window_steps=2, max_batch_size=8, **TARGET),
    "chunk_size": lambda: build("chunk_size", window_steps=2, **TARGET),
    "forecast_admission": lambda: build("forecast_admission", min_samples=4, refresh_steps=3, classes=3),
    "exclusive_mixed": lambda: build("exclusive_mixed", replan_steps=3, min_samples=4),
    "exclusive_mixed exclusive": lambda: build(
        "exclusive_mixed", mode="exclusive", replan_steps=3, min_samples=4, step_times=PRIOR, max_wait_s=5.0
    ),
    "exclusive_mixed threshold": lambda: build(
        "exclusive_mixed", mode="exclusive", phase_rule="threshold", replan_steps=3, min_samples=4, step_times=PRIOR
    ),
    "exclusive_mixed ifr": lambda: build(
        "exclusive_mixed", mode="exclusive", phase_rule="ifr", replan_steps=3, min_samples=4, step_times=PRIOR
    ),
    "exclusive_mixed fixed": lambda: build("exclusive_mixed", mode="exclusive", phase_rule="fixed", refill=5),
    "phases before caps": lambda: Smallest(
        build("exclusive_mixed", mode="exclusive", replan_steps=3),
        build("memory_aware"),
        build("sla_constrained", **TARGET),
    ),
}

if own := os.environ.get("SLUICE_POLICY"):  # package.module:Class, see docs/write-a-policy.md
    MAKERS[own] = partial(build_of, Family.BATCH, own, {})

every_policy = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))

counts = st.integers(0, 40)


@st.composite
def states(draw: st.DrawFn) -> BatchState:
    """Any engine: empty or full, decoding or cut in the middle of prompts, with or without free blocks."""
    running = draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000), st.booleans()), max_size=24))
    waiting = draw(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 50)), max_size=24))
    block_size = draw(st.sampled_from([1, 16, 128]))
    used = sum(-(-(prompt + output) // block_size) for prompt, output, _ in running)
    free = draw(st.integers(0, 2000))
    return BatchState(
        now_s=draw(st.floats(0, 1e6)),
        running=RunningRequests.of(
            prompt_tokens=[prompt for prompt, _, _ in running],
            output_tokens=[0 if part else output + 1 for _, output, part in running],
            prefill_tokens_left=[prompt if part else 0 for prompt, _, part in running],
            class_index=[index % 3 for index in range(len(running))],
        ),
        waiting=tuple(
            RequestView(
                request_id=f"w{index}",
                arrival_s=0.0,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=output,
                class_index=index % 3,
            )
            for index, (prompt, output) in enumerate(waiting)
        ),
        waiting_count=len(waiting) + (draw(counts) if waiting else 0),
        slots=draw(st.integers(1, 48)),
        free_blocks=free,
        total_blocks=used + free + draw(counts) + 1,
        block_size=block_size,
        max_batch_tokens=draw(st.integers(1, 16384)),
        departed=0,
    )


@st.composite
def results(draw: st.DrawFn) -> StepResult:
    """Any report, also of a step that did nothing."""
    finished = draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.booleans()), max_size=4))
    prefill, decodes = draw(st.integers(0, 4000)), draw(counts)
    return StepResult(
        now_s=draw(st.floats(0, 1e6)),
        step_s=draw(st.floats(0, 10)),
        phase=draw(st.sampled_from(Phase)),
        prefill_tokens=prefill,
        prefill_requests=int(prefill > 0),
        decode_requests=decodes,
        kv_tokens=decodes * 100,
        max_batch_size=draw(st.integers(1, 48)),
        running_count=decodes + int(prefill > 0),
        waiting_count=draw(counts),
        preempted=draw(st.integers(0, 2)),
        finished=tuple(
            FinishedRequest(prompt_tokens=p, output_tokens=o, class_index=i % 3, aborted=aborted)
            for i, (p, o, aborted) in enumerate(finished)
        ),
    )


histories = st.lists(st.one_of(states(), results()), min_size=1, max_size=25)


def replay(policy: BatchPolicy, history: list[BatchState | StepResult]) -> list[StepPlan]:
    plans = []
    for event in history:
        if isinstance(event, BatchState):
            plans.append(policy.plan(event))
        else:
            policy.observe(event)
    return plans


def contents(state: BatchState) -> list[object]:
    """Everything in a snapshot, in a form that compares."""
    arrays = [getattr(state.running, field.name).tobytes() for field in fields(RunningRequests)]
    return arrays + [getattr(state, name) for name in state._fields if name != "running"]


def test_every_registered_batch_policy_is_under_contract() -> None:
    assert set(kinds(Family.BATCH)) <= set(MAKERS)


@every_policy
@given(history=histories)
@settings(deadline=None, max_examples=40)
def test_every_plan_keeps_the_contract_and_lets_something_run(
    make: Callable[[], BatchPolicy], history: list[BatchState | StepResult]
) -> None:
    policy = make()
    for event in history:
        if isinstance(event, BatchState):
            check_plan(event, policy.plan(event))
        else:
            policy.observe(event)


@every_policy
@given(history=histories)
@settings(deadline=None, max_examples=15)
def test_equal_histories_give_equal_plans_and_leave_the_snapshots_as_they_were(
    make: Callable[[], BatchPolicy], history: list[BatchState | StepResult]
) -> None:
    before = [contents(event) for event in history if isinstance(event, BatchState)]
    first = replay(make(), history)
    assert [contents(event) for event in history if isinstance(event, BatchState)] == before
    assert replay(make(), history) == first


@every_policy
@given(history=histories, rest=histories)
@settings(deadline=None, max_examples=15)
def test_a_pickled_policy_goes_on_where_it_was(
    make: Callable[[], BatchPolicy], history: list[BatchState | StepResult], rest: list[BatchState | StepResult]
) -> None:
    policy = make()
    replay(policy, history)
    twin = pickle.loads(pickle.dumps(policy))
    assert replay(twin, rest) == replay(policy, rest)


@every_policy
def test_buffers_may_be_overwritten_as_soon_as_a_plan_is_made(make: Callable[[], BatchPolicy]) -> None:
    jobs = random_jobs(40, prompt=(50, 300), mean_output=40, seed=1)
    clean, scribbling = make(), make()
    plain = run_closed(ToyEngine(clean, TIMES, slots=8), copy.deepcopy(jobs), 16)
    scribbled = run_closed(ToyEngine(_Scribbler(scribbling), TIMES, slots=8), copy.deepcopy(jobs), 16)
    assert plain.plans == scribbled.plans


class _Scribbler:
    """A driver that reuses its buffers: it overwrites the arrays of a snapshot once the plan is there."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy

    def plan(self, state: BatchState) -> StepPlan:
        columns = [getattr(state.running, field.name).copy() for field in fields(RunningRequests)]
        plan = self.policy.plan(state._replace(running=RunningRequests(*columns)))
        for column in columns:
            column[:] = 7
        return plan

    def observe(self, result: StepResult) -> None:
        self.policy.observe(result)


class _Keeper:
    """A driver that keeps a plan for as long as it may, and reports the steps before it asks again."""

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.kept = 0
        self._plan: StepPlan | None = None
        self._steps_left = self._departed = 0
        self._untold: list[StepResult] = []

    def plan(self, state: BatchState) -> StepPlan:
        if self._plan and self._may_keep(self._plan, state):
            self.kept += 1
            self._steps_left -= 1
            cap = self._plan.cap(state.departed - self._departed)
            room = 0 if self._plan.phase is Phase.DECODE else max(0, cap - state.running_count)
            admit = tuple(request.request_id for request in state.waiting[:room])
            return self._plan._replace(max_batch_size=cap, admit=admit)
        for result in self._untold:
            self.policy.observe(result)
        self._untold.clear()
        self._plan = self.policy.plan(state)
        self._steps_left, self._departed = self._plan.steps - 1, state.departed
        return self._plan

    def _may_keep(self, plan: StepPlan, state: BatchState) -> bool:
        undisturbed = plan.phase is Phase.MIXED or not state.prefilling_count
        return self._steps_left > 0 and undisturbed and state.departed - self._departed <= plan.may_leave

    def observe(self, result: StepResult) -> None:
        self._untold.append(result)
        if result.preempted:
            self._steps_left = 0


@every_policy
@pytest.mark.parametrize(("blocks", "budget"), [(6000, 512), (6000, 64), (150, 512), (60, 512)])
def test_a_plan_that_is_kept_is_what_would_have_been_planned(
    make: Callable[[], BatchPolicy], blocks: int, budget: int
) -> None:
    assert _driven(_Keeper(make()), blocks, budget) == _driven(make(), blocks, budget)


@pytest.mark.parametrize("name", ["auto", "auto with a latency target", "exclusive_mixed", "exclusive_mixed exclusive"])
@pytest.mark.parametrize("blocks", [6000, 150])
def test_looking_at_what_has_been_learned_changes_nothing(name: str, blocks: int) -> None:
    make = MAKERS[name]
    assert _driven(_Onlooker(make()), blocks) == _driven(make(), blocks)


class _Onlooker:
    """A driver whose monitoring asks after every step, when the policy would read some steps later."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._phases = getattr(policy, "phases", policy)

    def plan(self, state: BatchState) -> StepPlan:
        plan: StepPlan = self.policy.plan(state)
        return plan

    def observe(self, result: StepResult) -> None:
        self.policy.observe(result)
        self._phases.step_times()
        self._phases.law()


@pytest.mark.parametrize(
    ("name", "share"), [("forecast_admission", 0.4), ("mixed", 0.4), ("exclusive", 0.05), ("auto", 0.05)]
)
def test_a_cap_that_is_kept_is_what_would_have_been_planned_while_a_few_leave(name: str, share: float) -> None:
    def make() -> BatchPolicy:
        return build(name) if name == "forecast_admission" else build("auto", mode=name, step_times=TIMES)

    keeper = _Keeper(make())
    kept = _driven(keeper, blocks=2500, slots=300, mean_output=150)
    assert kept == _driven(make(), blocks=2500, slots=300, mean_output=150)
    assert keeper.kept > share * len(kept)


@pytest.mark.parametrize(
    "make",
    [
        lambda: build("chunk_size", window_steps=2, itl_target_s=0.016),
        lambda: build("sla_constrained", window_steps=2, itl_target_s=0.014),
        lambda: build("auto", mode="mixed", itl_targets_s=(0.016,)),
    ],
    ids=["chunk_size", "sla_constrained", "auto"],
)
def test_a_plan_is_kept_until_its_target_may_ask_for_another(make: Callable[[], BatchPolicy]) -> None:
    asked, kept = (_driven(policy) for policy in (make(), _Keeper(make())))
    assert kept == asked
    assert len({(plan.max_batch_size, plan.max_prefill_tokens) for plan in asked}) > 1


def _driven(
    policy: BatchPolicy, blocks: int = 6000, budget: int = 512, slots: int = 16, mean_output: float = 30
) -> list[StepPlan]:
    """What was planned, but for how long it holds."""
    jobs = random_jobs(max(150, 3 * slots), prompt=(20, 120), mean_output=mean_output, seed=5)
    engine = ToyEngine(policy, TIMES, slots=slots, total_blocks=blocks, max_batch_tokens=budget, max_model_len=1024)
    run_closed(engine, jobs, slots + 4)
    return [plan._replace(steps=1, may_leave=0, max_served=0) for plan in engine.plans]


@pytest.mark.parametrize(
    ("policy", "blocks", "share"),
    [
        (build("stock"), 6000, 0.9),
        (build("auto"), 6000, 0.5),
        (build("forecast_admission"), 6000, 0.5),
        (build("auto", itl_targets_s=(1.0,)), 6000, 0.8),
        (build("forecast_admission"), 60, 0.4),
        (build("auto"), 60, 0.4),
    ],
    ids=["stock", "auto", "forecast_admission", "auto with a target", "forecast_admission, tight", "auto, tight"],
)
def test_plans_are_kept(policy: BatchPolicy, blocks: int, share: float) -> None:
    keeper = _Keeper(policy)
    engine = ToyEngine(keeper, TIMES, slots=16, total_blocks=blocks, max_batch_tokens=512, max_model_len=1024)
    run_closed(engine, random_jobs(300, prompt=(20, 120), mean_output=30, seed=6), 20)
    assert keeper.kept > share * len(engine.plans)


@every_policy
@pytest.mark.parametrize(("slots", "blocks", "budget"), [(8, 2000, 8192), (8, 60, 8192), (16, 400, 48), (1, 400, 512)])
def test_an_engine_finishes_everything_with_every_policy(
    make: Callable[[], BatchPolicy], slots: int, blocks: int, budget: int
) -> None:
    jobs = random_jobs(60, prompt=(20, 200), mean_output=40, seed=2)
    for index, job in enumerate(jobs):
        job.class_index = index % 3
        job.output_tokens = min(job.output_tokens, 300)
    engine = ToyEngine(make(), TIMES, slots=slots, total_blocks=blocks, max_batch_tokens=budget)
    run_closed(engine, jobs, 24)
    assert engine.finished == 60
    assert all(result.scheduled_tokens for result in engine.results)


@every_policy
def test_a_lone_request_runs_without_a_wait(make: Callable[[], BatchPolicy]) -> None:
    engine = ToyEngine(make(), TIMES)
    engine.submit(Job(request_id="only", prompt_tokens=100, output_tokens=5))
    for _ in range(5):
        engine.step()
    assert engine.finished == 1


def test_the_running_arrays_are_checked_where_they_are_built_from_lists() -> None:
    with pytest.raises(ValueError, match="shape"):
        RunningRequests.of(prompt_tokens=[1, 2], output_tokens=[1])
    assert np.isnan(RunningRequests.of(prompt_tokens=[1], output_tokens=[1]).predicted_output_tokens).all()
