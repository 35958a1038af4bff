"""Who goes next in an engine."""

from collections.abc import Iterable
from math import inf

import pytest

from policies.engine.promised_queue import PromisedQueue, Waiting
from policies.live import Live
from policies.router.order import Band
from policies.types import Left, Unread


def entry(name: str, *, arrival: float = 0.0, due: float = inf, tokens: int = 10, idle: bool = False) -> Waiting[str]:
    return Waiting(name, arrival_s=arrival, deadline_s=due, unread_tokens=tokens, fills_idle=idle)


def queue(*entries: Waiting[str], late_patience_s: Live[float] | None = None) -> PromisedQueue[str]:
    made: PromisedQueue[str] = PromisedQueue(late_patience_s)
    for one in entries:
        made.add(one)
    return made


def names(waiting: Iterable[Waiting[str]]) -> str:
    return "".join(one.item for one in waiting)


def test_groups_follow_each_other() -> None:
    made = queue(
        entry("i", idle=True), entry("u"), entry("l", due=1.0, tokens=100), entry("b", due=9.0), entry("a", due=5.0)
    )
    made.put_back(entry("r", due=1.0))
    made.split(0.0, 0.1)
    assert names(made) == "rabuli"


def test_without_promises_it_is_first_come_first_served() -> None:
    assert names(queue(entry("a", arrival=1.0), entry("b", arrival=2.0), entry("c", arrival=2.0))) == "abc"


def test_what_was_put_back_last_goes_first() -> None:
    made = queue(entry("a"))
    made.put_back(entry("b"))
    made.put_back(entry("c"))
    assert names(made) == "cba"


def test_who_yielded_may_come_back_and_who_is_late_stays_late() -> None:
    yields, late = entry("y", due=10.0, tokens=60), entry("l", due=1.0, tokens=60)
    made = queue(yields, late, entry("a", due=9.0, tokens=50))
    made.split(0.0, 0.1)
    assert (yields.yields, late.yields) == (True, False)
    assert names(made) == "ayl"
    assert made.pop().item == "a"
    made.split(0.0, 0.1)
    assert names(made) == "yl"
    late.unread_tokens = 1  # it could be in time now, but has been given up
    made.split(0.0, 0.1)
    assert names(made) == "yl"


@pytest.mark.parametrize("patience_s", [60.0, 55.0])
def test_late_ones_get_a_tenth_once_they_have_lost_the_patience_that_is_in_force(patience_s: float) -> None:
    made = queue(entry("l", arrival=0.0, due=1.0, tokens=100), late_patience_s=(in_force := Live(600.0)))
    in_force.replace(patience_s)
    started = ""
    for number in range(30):
        now = 50.0 + number
        made.add(entry("a", arrival=now, due=now + 5.0, tokens=100))
        made.split(now, 0.001)
        started += made.pop().item
    # Of the seconds from 50 on, those until its patience is over, and then ten prompts of others for its share.
    assert started.index("l") - (patience_s - 50.0) in range(10, 13)
    assert started.count("l") == 1


def test_late_ones_leave_half_of_what_may_run_to_those_in_time() -> None:
    made = queue(*(entry(str(n), due=1.0, tokens=100) for n in range(9)))
    made.add(entry("a", due=99.0))
    made.split(0.0, 0.1)
    assert [made.cap(running, 8) for running in (0, 3, 4, 7, 8)] == [4, 4, 5, 8, 8]
    assert queue(entry("a", due=9.0), entry("i", idle=True)).cap(7, 8) == 8
    assert queue().cap(0, 8) == 8


def test_the_longest_wait_of_a_late_one_is_told() -> None:
    made = queue(entry("a", due=99.0), entry("u"), entry("i", idle=True))
    assert made.late_wait_s(9.0) == 0.0
    for arrival in (5.0, 3.0):
        made.add(entry("l", arrival=arrival, due=6.0, tokens=100))
    made.split(5.5, 0.1)
    assert made.late_wait_s(9.0) == 6.0


def test_a_late_one_starts_where_no_more_than_one_may_run() -> None:
    made = queue(entry("l", due=1.0, tokens=100))
    made.split(0.0, 0.1)
    assert [made.cap(running, 1) for running in (0, 1)] == [1, 1]


def due_whole(name: str, ends_by_s: float, *, tokens: int = 10, answer: float = 0.0) -> Waiting[str]:
    left = Left(answer / 2, answer, answer)
    return Waiting(name, arrival_s=0.0, ends_by_s=ends_by_s, unread_tokens=tokens, left=left)


def test_whole_answers_that_are_late_leave_half_of_the_slots() -> None:
    made = queue(*(due_whole(str(n), 1.0, tokens=100) for n in range(9)))
    made.split(0.0, 0.1)
    assert [made.cap(running, 20) for running in (0, 5, 12)] == [10, 10, 12]


def test_of_whole_answers_the_cheap_ones_go_first_and_a_first_token_by_its_time() -> None:
    made = queue(*(due_whole(f"{tokens}", 10.0, tokens=tokens) for tokens in (50, 50, 10, 90)), entry("f", due=6.0))
    assert names(made) == "10f505090"


def test_a_whole_answer_is_late_where_even_a_short_one_would_be() -> None:
    made = queue(due_whole("l", 10.0, answer=200.0), due_whole("a", 10.0, answer=100.0))
    made.split(0.0, 0.1, step_s=0.05)
    assert (names(made), made.in_time) == ("la", 2)
    made.split(0.0, 0.1, step_s=0.099)
    assert (names(made), made.in_time) == ("al", 1)
    assert made.unread.deadline_s == [pytest.approx(10.0 - 50 * 0.099)]


def test_the_dearest_yields_its_answer_counted() -> None:
    made = queue(
        Waiting("l", arrival_s=0.0, deadline_s=11.0, unread_tokens=40, left=Left(50.0, 100.0, 100.0)),
        entry("a", due=11.0, tokens=60),
        entry("b", due=11.0, tokens=50),
    )
    made.split(0.0, 0.1)
    assert (names(made), list(made.unread.tokens)) == ("lba", [40, 60, 50])
    made.split(0.0, 0.1, answer_price=2.0)
    assert names(made) == "abl"


def test_removed_is_removed() -> None:
    kept, gone = entry("a", due=1.0), entry("b", due=2.0)
    made = queue(kept, gone)
    made.remove(gone)
    assert (names(made), len(made)) == ("a", 1)


def test_what_is_in_time_is_counted_apart() -> None:
    made = queue(entry("a", due=5.0, tokens=7), entry("u", tokens=5), entry("l", due=0.1), entry("i", idle=True))
    made.split(0.0, 0.1)
    assert (made.in_time, made.in_time_tokens, len(made)) == (2, 12, 4)


def test_what_reads_for_no_promise_is_counted_apart_from_what_is_in_time() -> None:
    made = queue(
        entry("a", due=5.0, tokens=7), entry("u", tokens=5), entry("l", due=0.1, tokens=20), entry("i", idle=True)
    )
    made.put_back(entry("r", due=5.0, tokens=100))
    reads = [
        Waiting("p", arrival_s=0.0, unread_tokens=1000, reads=True),
        Waiting("q", arrival_s=0.0, deadline_s=9.0, unread_tokens=3, reads=True),
        Waiting("s", arrival_s=0.0, unread_tokens=2000, resumed=True, reads=True),
    ]
    made.split(0.0, 0.0001, reads)
    assert made.unread == Unread([0.1, 5.0, 9.0], [20, 7, 3], 5 + 10 + 100 + 1000 + 2000)
    made.split(0.0, 0.1, reads)
    assert (made.unread.tokens, made.unread.late_tokens) == ([7, 3], 20 + 5 + 10 + 100 + 1000 + 2000)


def test_a_prompt_in_progress_is_named_when_it_would_make_others_late() -> None:
    made = queue(entry("a", due=2.0))
    long = Waiting("p", arrival_s=0.0, deadline_s=20.0, unread_tokens=50, reads=True)
    again = Waiting("r", arrival_s=0.0, unread_tokens=50, resumed=True, reads=True)
    assert made.split(0.0, 0.1, [long]) == ["p"]
    assert names(made) == "a"
    assert made.split(0.0, 0.01, [long]) == []
    assert made.split(0.0, 0.1, [again]) == []  # it has sent a part of its answer
    assert entry_of(made, "a").band is Band.LATE


def entry_of(made: PromisedQueue[str], name: str) -> Waiting[str]:
    return next(one for one in made if one.item == name)
