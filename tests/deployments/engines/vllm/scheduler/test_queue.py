"""The waiting queue behind vLLM's interface."""

from typing import Any, cast

from deployments.engines.vllm.scheduler.queue import PromiseQueue
from policies.engine.promised_queue import Waiting
from policies.live import Live


def queue_of(*deadlines: float) -> PromiseQueue:
    """Requests that are their own deadlines."""
    queue = PromiseQueue(lambda one: Waiting(one, arrival_s=0.0, deadline_s=cast(float, one)), Live(60.0))
    for deadline_s in deadlines:
        queue.add_request(cast(Any, deadline_s))
    return queue


def test_the_least_deadline_goes_first_and_whoever_was_put_back_before_it() -> None:
    queue = queue_of(3.0, 1.0, 2.0)
    queue.prepend_request(cast(Any, 9.0))
    assert queue.peek_request() == cast(Any, 9.0)
    assert list(queue) == [9.0, 1.0, 2.0, 3.0]
    assert [queue.pop_request() for _ in range(len(queue))] == [9.0, 1.0, 2.0, 3.0]
    assert not queue


def test_those_that_are_skipped_stand_in_front_as_they_did() -> None:
    queue = queue_of(3.0, 1.0, 2.0)
    skipped = [queue.pop_request(), queue.pop_request()]
    queue.prepend_requests(cast(Any, list(reversed(skipped))))
    assert list(queue) == [1.0, 2.0, 3.0]


def test_who_is_removed_need_not_be_there() -> None:
    queue = queue_of(3.0, 1.0, 2.0)
    queue.remove_requests(cast(Any, {1.0, 7.0}))
    queue.remove_request(cast(Any, 3.0))
    assert list(queue) == [2.0]
