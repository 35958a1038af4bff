"""What routers know of sessions."""

import math

import pytest

from policies.errors import ConfigError
from policies.router.sessions import Pauses, Sessions, SessionsConfig, Task, Turn, TurnCounts


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
    assert known.pause_s == pytest.approx((4.0 + 10.0) / 2)
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


def test_a_pause_that_has_lasted_long_ends_later_than_a_fresh_one() -> None:
    pauses = Pauses()
    assert pauses.chance(10.0) is None and pauses.median_s is None
    for pause_s in (2.0, 3.0, 5.0, 6.0, 9.0, 40.0, 300.0, 1000.0):
        pauses.ended(pause_s)
    pauses.never_ended()
    fresh, old = pauses.chance(16.0), pauses.chance(16.0, 64.0)
    assert fresh is not None and old is not None and fresh > 0.5 > old
    assert pauses.median_s is not None and 4.0 <= pauses.median_s <= 8.0
    assert pauses.chance(math.inf) == pytest.approx(8 / 9)


def test_no_count_of_turns_promises_less_than_none_or_no_end() -> None:
    counts = TurnCounts()
    assert all(0.0 < counts.left(turns) < 100.0 for turns in (1, 2, 5, 100, 5000))
    for _ in range(100):
        counts.was_over(1)
    assert counts.left(1) < 3.0 < counts.left(2)
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


def test_a_turn_gets_a_share_of_what_its_task_has_left() -> None:
    sessions, task = Sessions(), Task(600.0, 600.0)
    first_s = sessions.turn_s("a", task, 0.0)
    assert first_s is not None and 0.0 < first_s < 600.0
    later_s = sessions.turn_s("a", task, 500.0)
    assert later_s is not None and later_s == pytest.approx(first_s / 6)
    assert sessions.turn_s("a", task, 600.0) is None


def test_pauses_are_no_time_for_turns() -> None:
    sessions, task = seen(turn("a", 0.0), turn("a", 11.0)), Task(600.0, 600.0)
    patient, hasty = seen(turn("b", 0.0), turn("b", 1.0)), Task(600.0, 600.0)
    of_slow, of_fast = sessions.turn_s("a", task, 12.0), patient.turn_s("b", hasty, 12.0)
    assert of_slow is not None and of_fast is not None and of_slow < of_fast
