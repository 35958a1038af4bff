"""When a driver asks again."""

from math import inf
from typing import Any

import pytest

from policies.engine.standing_plan import StandingPlan
from policies.types import Limit, Phase, RequestView, RunningRequests, StepPlan
from tests.policies.states import batch_of, state_of


def standing(
    phase: Phase = Phase.MIXED, *, running: int = 4, waiting: int = 0, left: int = 0, **fields: object
) -> StandingPlan[str]:
    plan = StepPlan(phase=phase, max_batch_size=8, limited_by=Limit.SLOTS, max_batch_tokens=512, **fields)  # type: ignore[arg-type]
    batch = RunningRequests.of(
        prompt_tokens=[10] * running, output_tokens=[1] * running, prefill_tokens_left=[left] + [0] * (running - 1)
    )
    state = state_of(running=batch, waiting_count=waiting, slots=8, departed=100)
    return StandingPlan(plan, state)


def steps_taken(plan: StandingPlan[str], departed: int = 100, most: int = 50) -> int:
    """The first one, and as many as it stands for."""
    return 1 + next((n for n in range(most) if not plan.stands(departed=departed, prompts_in_progress=False)), most)


def test_it_stands_for_its_steps() -> None:
    assert steps_taken(standing(steps=1)) == 1
    assert steps_taken(standing(steps=16)) == 16


def test_it_falls_when_more_have_departed_than_it_says() -> None:
    assert standing(steps=9, departures=2).stands(departed=102, prompts_in_progress=False)
    assert not standing(steps=9, departures=2).stands(departed=103, prompts_in_progress=False)


@pytest.mark.parametrize(("phase", "stands"), [(Phase.MIXED, True), (Phase.DECODE, False)])
def test_a_phase_did_not_reckon_with_a_prompt_in_progress(phase: Phase, stands: bool) -> None:
    assert standing(phase, steps=9).stands(departed=100, prompts_in_progress=True) is stands


@pytest.mark.parametrize("event", [{"preempted": True, "empty": False}, {"preempted": False, "empty": True}])
def test_a_preemption_or_a_step_that_held_nothing_ends_it(event: dict[str, bool]) -> None:
    plan = standing(steps=9)
    plan.taken(started=0, **event)
    assert steps_taken(plan) == 1


@pytest.mark.parametrize(("waiting", "stands"), [(0, 1), (5, 9)])
def test_a_lone_arrival_ends_a_phase_of_decodes_and_one_behind_a_queue_does_not(waiting: int, stands: int) -> None:
    plan = standing(Phase.DECODE, steps=9, waiting=waiting)
    plan.arrived()
    assert steps_taken(plan) == stands


@pytest.mark.parametrize(
    ("promised", "waiting", "stands"), [(False, 0, 9), (True, 0, 1), (True, 5, 9)], ids=["unpromised", "lone", "behind"]
)
def test_in_a_mixed_phase_a_promised_request_that_would_start_ends_it(
    promised: bool, waiting: int, stands: int
) -> None:
    plan = standing(steps=9, waiting=waiting)
    plan.arrived(promised=promised)
    assert steps_taken(plan) == stands


def test_its_starts_are_used_up_over_all_its_steps() -> None:
    plan = standing(steps=9, starts=3)
    assert plan.cap(4) == 7
    plan.taken(started=2, preempted=False, empty=False)
    assert plan.cap(6) == 7
    assert plan.cap(5) == 6, "nobody comes in the place of who left"
    assert standing(starts=inf).cap(5) == 8


def test_in_a_phase_of_decodes_nobody_starts() -> None:
    assert standing(Phase.DECODE, starts=0).cap(4) == 0


@pytest.mark.parametrize(("left", "stands"), [(0, 9), (5, 1)])
def test_an_arrival_ends_it_while_a_prompt_is_in_progress(left: int, stands: int) -> None:
    plan = standing(steps=9, waiting=3, left=left)
    plan.arrived()
    assert steps_taken(plan) == stands


@pytest.mark.parametrize(
    ("fields", "holds"),
    [
        ({}, True),
        ({"phase": Phase.DECODE}, False),
        ({"starts": 0}, False),
        ({"max_batch_size": 2}, False),
        ({"slots": 2}, False),
        ({"prompt_tokens": 161}, False),
        ({"waiting": ()}, False),
    ],
)
def test_a_prompt_is_held_back_for_one_step_and_not_for_a_head_that_cannot_start(
    fields: dict[str, Any], holds: bool
) -> None:
    head = RequestView(request_id="a", arrival_s=0.0, prompt_tokens=fields.pop("prompt_tokens", 160))
    state = state_of(
        running=batch_of(decoding=2),
        waiting=fields.pop("waiting", (head,)),
        slots=fields.pop("slots", 8),
        free_blocks=10,
        departed=100,
    )
    plan = StepPlan(Phase.MIXED, max_batch_size=8, limited_by=Limit.SLOTS, max_batch_tokens=512, steps=9)
    made = StandingPlan(plan._replace(**fields), state, ["long"])
    assert list(made.held) == (["long"] if holds else [])
    assert steps_taken(made) == (1 if holds else 9)
