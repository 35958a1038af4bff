"""How long steps may be so that whole answers end in time."""

from dataclasses import replace

import numpy as np
import pytest

from policies.engine.answers import Answers
from policies.lengths.remaining import RemainingTokens
from policies.types import Left, RunningRequests, StepCoefficients, StepTimes
from tests.policies.states import result_of

LAW = StepCoefficients(overhead_s=0.005, prefill_s=2e-5, decode_s=2e-5)
TIMES = StepTimes(prefill=LAW, decode=LAW, mixed=LAW)
LONGEST_S = 0.160


def answers_of(per_s: float, *kinds: tuple[int, float, float], count: int = 256) -> Answers:
    """Kinds come in turn: unread tokens, tokens of the answer, and seconds in all."""
    answers = Answers(RemainingTokens())
    for n in range(count):
        unread, answer, within_s = kinds[n % len(kinds)]
        answers.come(n / per_s, n / per_s + within_s, unread, Left(answer, answer, answer))
    return answers


def step_s(per_s: float, *kinds: tuple[int, float, float], count: int = 256, times: StepTimes = TIMES) -> float:
    return answers_of(per_s, *kinds, count=count).step_s(count / per_s, times, LONGEST_S)


def test_steps_are_as_long_as_they_come_while_all_fit() -> None:
    assert step_s(5.0, (400, 250.0, 8.0)) == LONGEST_S
    assert step_s(500.0, (400, 250.0, 8.0), count=8) == LONGEST_S  # nothing is known yet


def test_a_full_step_that_was_short_once_bounds_no_later_one() -> None:
    chat = (400, 250.0, 8.0)
    for per_s, answers in ((5.0, answers_of(5.0, chat)), (100.0, answers_of(100.0, chat))):
        assert answers.step_s(256 / per_s, TIMES, 0.008) == 0.008
        assert answers.step_s(256 / per_s, TIMES, LONGEST_S) > 0.008


def test_beyond_capacity_they_are_as_short_as_answers_need() -> None:
    chat, tool = (400, 250.0, 8.0), (900, 40.0, 5.0)
    assert step_s(100.0, chat) < 0.03
    assert 2 * step_s(100.0, chat) < step_s(100.0, tool) < LONGEST_S


def test_after_a_pause_steps_are_bounded_by_those_that_come_then() -> None:
    """With all remembered ones, of an hour ago too, the load would look like nothing for hundreds of requests."""
    per_s, answers = 100.0, answers_of(100.0, (400, 250.0, 8.0))
    began_s = 3600.0
    for n in range(64):
        answers.come(began_s + n / per_s, began_s + n / per_s + 8.0, 400, Left(250.0, 250.0, 250.0))
    assert answers.step_s(began_s + 64 / per_s, TIMES, LONGEST_S) < 0.03


def test_dear_ones_that_do_not_fit_have_no_say() -> None:
    chat, document = (400, 250.0, 8.0), (60_000, 20.0, 30.0)
    assert step_s(120.0, chat, document) == step_s(120.0, chat, (120_000, 20.0, 1.0))


def test_a_fit_without_a_fixed_price_bounds_steps_by_that_of_decodes() -> None:
    free = StepCoefficients(overhead_s=0.0, prefill_s=2e-5, decode_s=2e-5)
    assert step_s(100.0, (400, 250.0, 8.0), times=replace(TIMES, mixed=free)) == step_s(100.0, (400, 250.0, 8.0))
    assert 0.0 < step_s(100.0, (400, 250.0, 8.0), times=StepTimes(prefill=free, decode=free, mixed=free)) <= LONGEST_S


def test_whole_answers_that_run_are_seen() -> None:
    answers = Answers(RemainingTokens())
    two = {"prompt_tokens": [10] * 2, "output_tokens": [0] * 2}
    assert not answers.look_at(RunningRequests.of(**two))
    assert answers.look_at(RunningRequests.of(**two, ends_by_s=[np.inf, 1.0]))


def test_steps_of_decodes_have_a_mean() -> None:
    answers = Answers(RemainingTokens())
    answers.observe(result_of(step_s=0.02, decode_requests=3))
    assert answers.seconds_per_token == 0.02
    answers.observe(result_of(step_s=0.04, decode_requests=3))
    assert answers.seconds_per_token == pytest.approx(0.0204)
