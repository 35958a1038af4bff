"""What every batch policy promises, checked over all that are registered and over compositions of them."""

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.step_time import StepTimeConfig
from policies.papers.smallest import Smallest
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

EXAMPLES = settings().max_examples / 100  # of the profile: 1 by default, 0.2 in `quick`
PRIOR = StepTimeConfig(prior=TIMES)
TARGET = {"itl_target_s": 0.03}

MAKERS: dict[str, Callable[[], BatchPolicy]] = {
    "auto": lambda: build("auto"),
    "auto that knows step times": lambda: build("auto", classes=3, step_times=TIMES),
    "auto that searches": lambda: build("auto", papers={"sla": "search", **TARGET}, step_times=TIMES),
    "auto that searches by promises": lambda: build("auto", papers={"sla": "search"}, step_times=TIMES),
    "stock": lambda: build("stock"),
    "memory_aware": lambda: build("memory_aware", min_samples=4),
    "memory_aware linear": lambda: build("memory_aware", form="linear", basis="resident", min_samples=4),
    "sla_constrained": lambda: build("sla_constrained", window_steps=2, **TARGET),
    "sla_constrained_literal": lambda: build("sla_constrained_literal", window_steps=2, max_batch_size=8, **TARGET),
    "chunk_size": lambda: build("chunk_size", window_steps=2, **TARGET),
    "forecast_admission": lambda: build("forecast_admission", min_samples=4, refresh_steps=3, classes=3),
    "exclusive_mixed": lambda: build("exclusive_mixed", replan_steps=3, min_samples=4),
    "exclusive_mixed exclusive": lambda: build(
        "exclusive_mixed", mode="exclusive", replan_steps=3, min_samples=4, step_times=PRIOR
    ),
    "exclusive_mixed_literal threshold": lambda: build(
        "exclusive_mixed_literal",
        mode="exclusive",
        phase_rule="threshold",
        replan_steps=3,
        min_samples=4,
        step_times=PRIOR,
    ),
    "exclusive_mixed_literal ifr": lambda: build(
        "exclusive_mixed_literal", mode="exclusive", phase_rule="ifr", replan_steps=3, min_samples=4, step_times=PRIOR
    ),
    "exclusive_mixed_literal by eq. 8": lambda: build(
        "exclusive_mixed_literal", mode_rule="crossover", replan_steps=3, min_samples=4, step_times=PRIOR
    ),
    "exclusive_mixed_literal up to N*": lambda: build(
        "exclusive_mixed_literal",
        mode="exclusive",
        overflow_probability=0.05,
        replan_steps=3,
        min_samples=4,
        step_times=PRIOR,
    ),
    "exclusive_mixed_literal": lambda: build("exclusive_mixed_literal", mode="exclusive", phase_rule="fixed", refill=5),
    "phases before caps": lambda: Smallest(
        build("exclusive_mixed", mode="exclusive", replan_steps=3),
        build("memory_aware"),
        build("sla_constrained", **TARGET),
    ),
}

if own := os.environ.get("SLUICE_POLICY"):  # package.module:Class, see docs/guides/write-a-policy.md
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
            deadline_s=[(np.inf, 0.5)[index % 2] for index in range(len(running))],
            first_token_s=[np.nan if part else 0.1 * index for index, (_, _, part) in enumerate(running)],
            tpot_s=[(np.inf, 0.02, 0.2)[index % 3] for index in range(len(running))],
        ),
        waiting=tuple(
            RequestView(
                request_id=f"w{index}",
                arrival_s=0.0,
                prompt_tokens=prompt,
                output_tokens=output,
                cached_tokens=output,
                class_index=index % 3,
                deadline_s=(np.inf, 1.0)[index % 2],
                tpot_s=(np.inf, 0.03)[index % 2],
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
@settings(deadline=None, max_examples=round(40 * EXAMPLES))
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
@settings(deadline=None, max_examples=round(15 * EXAMPLES))
def test_equal_histories_give_equal_plans_and_leave_the_snapshots_as_they_were(
    make: Callable[[], BatchPolicy], history: list[BatchState | StepResult]
) -> None:
    before = [contents(event) for event in history if isinstance(event, BatchState)]
    first = replay(make(), history)
    assert [contents(event) for event in history if isinstance(event, BatchState)] == before
    assert replay(make(), history) == first


@every_policy
@given(history=histories, rest=histories)
@settings(deadline=None, max_examples=round(15 * EXAMPLES))
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


@pytest.mark.long
@pytest.mark.slow
@every_policy
@pytest.mark.parametrize(("blocks", "budget"), [(6000, 512), (150, 512)])
def test_asking_less_often_costs_next_to_nothing(make: Callable[[], BatchPolicy], blocks: int, budget: int) -> None:
    always, seldom = (
        _served(ToyEngine(make(), TIMES, slots=64, total_blocks=blocks, max_batch_tokens=budget, stands=stands), 300)
        for stands in (False, True)
    )
    assert always.asked == len(always.results)
    assert seldom.now_s < 1.03 * always.now_s


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("stock", 0.2), ("auto", 0.3), ("forecast_admission", 0.3)])
def test_a_policy_is_asked_in_few_of_the_steps(name: str, share: float) -> None:
    engine = _served(ToyEngine(build(name), TIMES, slots=64, max_batch_tokens=512, max_model_len=1024, stands=True))
    assert engine.asked < share * len(engine.results)


def _served(engine: ToyEngine, count: int = 600) -> ToyEngine:
    jobs = random_jobs(count, prompt=(20, 120), mean_output=60, seed=5)
    return run_closed(engine, jobs, 2 * engine.slots)


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
