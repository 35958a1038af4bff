"""Behaviour of the waiting queue in order of deadlines, and what it tells of changes among those in front."""

from itertools import count
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.vllm.scheduler.queue import DeadlineQueue


def queue_of(*deadlines: float) -> DeadlineQueue:
    """Requests that are their own deadlines."""
    queue = DeadlineQueue(cast(Any, float))
    for deadline_s in deadlines:
        queue.add_request(cast(Any, deadline_s))
    return queue


def test_the_least_deadline_goes_first_and_whoever_was_put_back_before_it() -> None:
    queue = queue_of(3.0, 1.0, 2.0)
    queue.prepend_request(cast(Any, 9.0))
    assert list(queue) == [9.0, 1.0, 2.0, 3.0]
    assert [queue.pop_request() for _ in range(len(queue))] == [9.0, 1.0, 2.0, 3.0]


def test_who_comes_behind_those_that_are_watched_is_no_change() -> None:
    queue = queue_of(1.0, 2.0, 4.0)
    queue.watch(2)
    queue.add_request(cast(Any, 3.0))
    assert (queue.popped, queue.moved) == (0, 0)
    queue.add_request(cast(Any, 1.5))
    assert (queue.popped, queue.moved) == (0, 1)


def test_once_those_in_front_are_popped_fewer_are_watched() -> None:
    queue = queue_of(1.0, 2.0, 4.0)
    queue.watch(2)
    queue.pop_request()
    queue.add_request(cast(Any, 3.0))
    assert (queue.popped, queue.moved) == (1, 0)


changes = st.lists(st.tuples(st.sampled_from(["add", "pop", "put back", "remove"]), st.integers(0, 30)), max_size=25)


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(0, 14), changes)
def test_without_a_move_those_in_front_are_those_of_before_without_who_was_popped(
    first: list[int], watched: int, then: list[tuple[str, int]]
) -> None:
    names = count()
    deadlines: dict[Any, float] = {}

    def request(deadline_s: int) -> Any:
        name = next(names)
        deadlines[name] = deadline_s
        return name

    queue = DeadlineQueue(cast(Any, deadlines.__getitem__))
    for deadline_s in first:
        queue.add_request(request(deadline_s))
    shown = list(queue)[:watched]
    queue.watch(len(shown))
    for change, value in then:
        if change == "add":
            queue.add_request(request(value))
        elif change == "put back":
            queue.prepend_request(request(value))
        elif queue and change == "pop":
            queue.pop_request()
        elif queue:
            queue.remove_request(list(queue)[value % len(queue)])
        if not queue.moved:
            ahead = shown[queue.popped :]
            assert list(queue)[: len(ahead)] == ahead
