"""Who can keep its promise: the split of a queue against brute force, and requests that run."""

from itertools import accumulate, combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.engine.lateness import in_the_way, running_late, split
from policies.types import RunningRequests

NAN, INF = np.nan, np.inf


def most_in_time(jobs: list[tuple[float, int]], ahead: int = 0) -> int:
    """By trying all subsets, each in order of deadlines, at one second a token."""
    for count in range(len(jobs), 0, -1):
        for chosen in combinations(sorted(jobs), count):
            ready, kept = float(ahead), True
            for due, tokens in chosen:
                ready += tokens
                kept &= ready <= due
            if kept:
                return count
    return 0


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8))
def test_as_many_are_in_time_as_can_be(jobs: list[tuple[int, int]]) -> None:
    jobs = sorted(jobs)
    found = split([due for due, _ in jobs], [tokens for _, tokens in jobs], now_s=0.0, seconds_per_token=1.0)
    assert not found.late & found.yielded
    assert len(jobs) - len(found.late) - len(found.yielded) == most_in_time([(float(d), t) for d, t in jobs])


def test_who_could_not_be_read_in_time_even_as_the_next_one_is_late_and_takes_nobodys_place() -> None:
    found = split([1.0, 5.0], [100, 4], now_s=0.0, seconds_per_token=1.0)
    assert (found.late, found.yielded) == ({0}, frozenset())


def test_the_longest_prompt_yields_where_not_all_can_be_in_time() -> None:
    found = split([5.0, 6.0, 7.0], [2, 4, 3], now_s=0.0, seconds_per_token=1.0)
    assert (found.late, found.yielded) == (frozenset(), {1})


def test_prompts_in_progress_are_read_first() -> None:
    assert not split([5.0], [4], now_s=0.0, seconds_per_token=1.0, tokens_ahead=1).yielded
    assert split([5.0], [4], now_s=0.0, seconds_per_token=1.0, tokens_ahead=2).yielded == {0}


def running(**columns: object) -> RunningRequests:
    return RunningRequests.of(prompt_tokens=[100], **columns)  # type: ignore[arg-type]


def late(now_s: float, step_s: float = 0.01, **columns: object) -> bool:
    return bool(running_late(running(**columns), now_s, step_s)[0])


def test_a_first_token_that_came_after_its_deadline_is_late_for_good() -> None:
    assert late(5.0, output_tokens=[10], deadline_s=[1.0], first_token_s=[1.1], tpot_s=[1.0])
    assert not late(5.0, output_tokens=[10], deadline_s=[1.0], first_token_s=[0.9], tpot_s=[1.0])


def test_so_is_one_that_has_not_come_by_then() -> None:
    assert late(5.0, output_tokens=[0], deadline_s=[1.0], first_token_s=[NAN], prefill_tokens_left=[50])
    assert not late(0.5, output_tokens=[0], deadline_s=[1.0], first_token_s=[NAN], prefill_tokens_left=[50])


def test_tokens_that_were_too_slow_make_late_only_who_cannot_make_up_for_it() -> None:
    # 10 tokens after the first in 0.5 s; 20 more at 10 ms each make a mean of 23 ms, or 90 more one of 14 ms.
    told = {"output_tokens": [11], "first_token_s": [0.0], "tpot_s": [0.02]}
    assert late(0.5, predicted_output_tokens=[31], **told)
    assert not late(0.5, predicted_output_tokens=[101], **told)


def test_without_a_prediction_an_answer_is_taken_to_become_twice_as_long() -> None:
    told = {"output_tokens": [11], "first_token_s": [0.0]}
    assert late(0.5, tpot_s=[0.02], **told)
    assert not late(0.5, tpot_s=[0.03], **told)


def test_without_a_promise_nobody_is_late() -> None:
    assert not late(1e6, output_tokens=[11], first_token_s=[0.0], tpot_s=[INF], deadline_s=[INF])


def held(jobs: list[tuple[float, int, bool]]) -> list[int]:
    """Places of the prompts in progress that wait; jobs are (due, tokens, whether it is one), at a second a token."""
    due, tokens = [job[0] for job in jobs], [job[1] for job in jobs]
    reading = [place for place, job in enumerate(jobs) if job[2]]
    found = split(due, tokens, now_s=0.0, seconds_per_token=1.0)
    return in_the_way(due, tokens, reading, found, now_s=0.0, seconds_per_token=1.0)


def test_a_long_prompt_in_progress_waits_for_who_would_be_late_behind_it() -> None:
    assert held([(5.0, 4, False), (100.0, 50, True)]) == [1]


def test_it_goes_on_while_all_are_in_time_behind_it() -> None:
    assert held([(80.0, 4, False), (100.0, 50, True)]) == []


def test_it_waits_for_nobody_who_is_due_later_or_late() -> None:
    assert held([(50.0, 50, True), (54.0, 4, False)]) == []
    assert held([(5.0, 9, False), (100.0, 50, True)]) == []


def test_prompts_in_progress_wait_once_they_are_too_much_together() -> None:
    assert held([(12.0, 4, False), (100.0, 5, True), (100.0, 5, True)]) == [2]


def test_a_prompt_in_progress_that_is_late_waits_for_all_who_are_in_time() -> None:
    assert held([(1.0, 50, True), (20.0, 4, False)]) == [0]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), max_size=2),
)
def test_what_is_not_held_may_be_read_first_and_all_who_wait_stay_in_time(
    waiting: list[tuple[int, int]], reading: list[tuple[int, int]]
) -> None:
    jobs = sorted([(*job, False) for job in waiting] + [(*job, True) for job in reading])
    found = split([job[0] for job in jobs], [job[1] for job in jobs], now_s=0.0, seconds_per_token=1.0)
    places = held([(float(due), tokens, reads) for due, tokens, reads in jobs])
    in_time = [place for place in range(len(jobs)) if place not in found.late | found.yielded]
    first = [place for place, job in enumerate(jobs) if job[2] and place not in places]
    order = first + [place for place in in_time if place not in first]
    ready = dict(zip(order, accumulate(jobs[place][1] for place in order), strict=True))
    assert all(ready[place] <= jobs[place][0] for place in in_time if not jobs[place][2])
