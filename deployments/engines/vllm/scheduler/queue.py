"""The engine's waiting queue in the order of virtual deadlines, behind vLLM's queue interface."""

from bisect import bisect_right
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

    Attributes:
        popped: requests taken from the front so far.
        moved: times that those in front may have changed otherwise: somebody came between them or was put before them,
            or anybody was removed.
    """

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._front: deque[Request] = deque()
        self._sorted: list[tuple[float, int, Request]] = []  # descending, so that the head is popped off the end
        self._arrivals = count()
        self.popped = self.moved = 0
        self._watched = 0

    def watch(self, count: int) -> None:
        """So many in front are those in whose changes somebody is interested from now on."""
        self._watched = count

    def add_request(self, request: Request) -> None:
        entry = (-self._key(request), -next(self._arrivals), request)
        at = bisect_right(self._sorted, entry)
        self.moved += len(self) - at < self._watched
        self._sorted.insert(at, entry)

    def pop_request(self) -> Request:
        self.popped += 1
        self._watched -= 1
        if self._front:
            return self._front.popleft()
        return self._sorted.pop()[2]

    def peek_request(self) -> Request:
        return self._front[0] if self._front else self._sorted[-1][2]

    def prepend_request(self, request: Request) -> None:
        self.moved += 1
        self._front.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self.moved += 1
        self._front.extendleft(requests)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        if gone:
            self.moved += 1
            self._front = deque(request for request in self._front if request not in gone)
            self._sorted = [entry for entry in self._sorted if entry[2] not in gone]

    def __bool__(self) -> bool:
        return bool(self._front or self._sorted)

    def __len__(self) -> int:
        return len(self._front) + len(self._sorted)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._front, map(_request_of, reversed(self._sorted)))
