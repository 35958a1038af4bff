"""What routers know of sessions."""

import pytest

from policies.errors import ConfigError
from policies.router.promise import Promise
from policies.router.sessions import Pauses, Sessions, SessionsConfig, Task, Turn, TurnCounts, within_task


def turn(session: str, began_s: float, prompt_tokens: int = 100, task: Task | None = None) -> Turn:
    return Turn(session, began_s, began_s + 1.0, prompt_tokens, task)


def seen(*turns: Turn, keep_s: float = 3600.0, max_sessions: int = 100) -> Sessions:
    sessions = Sessions(SessionsConfig(max_sessions=max_sessions, keep_s=keep_s))
    for each in turns:
        sessions.observe(each)
    return sessions


def test_turns_pauses_and_growth_of_a_session_are_known() -> None:
    sessions = seen(turn("a", 0.0), turn("b", 1.0), turn("a", 5.0, 300), turn("a", 16.0, 500))
    known = sessions.find("a")
    assert known is not None and (known.turns, known.prompt_tokens, known.ended_s) == (3, 500, 17.0)
    assert (len(sessions), sessions.turns, sessions.pauses.seen) == (2, 4, 2)
    assert 0.0 < sessions.growth_tokens < 200.0


def test_a_turn_that_is_told_twice_or_too_late_counts_once() -> None:
    sessions = seen(turn("a", 0.0), turn("a", 5.0), turn("a", 5.0), turn("a", 0.0))
    assert sessions.turns == 2


def test_sessions_beyond_the_bound_or_their_time_are_forgotten() -> None:
    sessions = seen(*(turn(f"s{n}", float(n)) for n in range(10)), max_sessions=4)
    assert len(sessions) == 4 and sessions.find("s9") is not None and sessions.find("s5") is None
    sessions = seen(turn("a", 0.0), turn("b", 100.0), keep_s=60.0)
    assert len(sessions) == 1 and sessions.find("a") is None
    with pytest.raises(ConfigError):
        SessionsConfig(max_sessions=0)


def test_the_median_of_pauses_is_known_by_powers_of_two() -> None:
    pauses = Pauses()
    assert pauses.median_s is None
    for pause_s in (2.0, 3.0, 5.0, 6.0, 9.0, 40.0, 300.0, 1000.0):
        pauses.ended(pause_s)
    assert pauses.seen == 8 and pauses.median_s is not None and 4.0 <= pauses.median_s <= 8.0


def test_sessions_that_are_over_after_one_turn_say_nothing_of_longer_ones() -> None:
    counts = TurnCounts()
    for _ in range(100):
        counts.was_over(1)
    assert counts.chance_of_another(1) < 0.2 < counts.chance_of_another(2)


def test_names_that_never_come_back_are_kept_no_longer() -> None:
    sessions = Sessions(SessionsConfig(keep_s=10.0))
    assert sessions.comes_back("new")
    for number in range(60):
        sessions.observe(turn(f"once {number}", number * 1.0))
    assert not sessions.comes_back("new")
    sessions.observe(turn("a", 60.0))
    assert sessions.comes_back("a")  # its second turn


def test_the_same_deadline_goes_on_and_another_begins_a_task() -> None:
    sessions = Sessions()
    task = sessions.task("a", 60.0, 100.0)
    assert task == Task(60.0, 160.0)
    sessions.observe(turn("a", 100.0, task=task))
    assert sessions.task("a", None, 110.0) == sessions.task("a", 60.0, 110.0) == task
    assert sessions.task("a", 30.0, 110.0) == Task(30.0, 140.0)
    sessions.observe(turn("a", 110.0))  # says nothing of it
    assert sessions.task("a", None, 120.0) == task
    assert sessions.task("b", None, 120.0) is None


def test_a_turn_has_all_that_its_task_has_left() -> None:
    task, promise = Task(600.0, 600.0), Promise(ttft_s=2.0)
    assert within_task(promise, task, 500.0) == Promise(ttft_s=2.0, e2e_s=100.0)
    assert within_task(Promise(e2e_s=30.0), task, 500.0) == Promise(e2e_s=30.0)
    assert within_task(promise, task, 600.0) == within_task(promise, None, 0.0) == promise
