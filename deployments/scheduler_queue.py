"""The engine's waiting queue in the order of virtual deadlines, behind vLLM's queue interface."""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from operator import itemgetter

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

_request_of = itemgetter(2)


class DeadlineQueue(RequestQueue):
    """Least key first; equal keys in the order in which they came.

    What vLLM puts back in front (preempted, or skipped because it cannot start yet) stays in front, as in vLLM's own
    queue: a preempted request that lost its turn would lose its work again.
    """

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._front: deque[Request] = deque()
        self._sorted: list[tuple[float, int, Request]] = []  # descending, so that the head is popped off the end
        self._arrivals = count()

    def add_request(self, request: Request) -> None:
        insort(self._sorted, (-self._key(request), -next(self._arrivals), request))

    def pop_request(self) -> Request:
        if self._front:
            return self._front.popleft()
        return self._sorted.pop()[2]

    def peek_request(self) -> Request:
        return self._front[0] if self._front else self._sorted[-1][2]

    def prepend_request(self, request: Request) -> None:
        self._front.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._front.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        if gone:
            self._front = deque(request for request in self._front if request not in gone)
            self._sorted = [entry for entry in self._sorted if entry[2] not in gone]

    def __bool__(self) -> bool:
        return bool(self._front or self._sorted)

    def __len__(self) -> int:
        return len(self._front) + len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._front, map(_request_of, reversed(self._sorted)))
