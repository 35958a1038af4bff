"""The engine's waiting queue by promises, behind vLLM's queue interface."""

from collections.abc import Callable, Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from policies.engine.promised_queue import PromisedQueue, Waiting
from policies.live import Live


class PromiseQueue(RequestQueue):
    """In the order of ``PromisedQueue``.

    What vLLM puts back in front (preempted, or skipped because it cannot start yet) stays in front, as in vLLM's own
    queue: a preempted request that lost its turn would lose its work again.
    """

    def __init__(self, waiting: Callable[[Request], Waiting[Request]], late_patience_s: Live[float]) -> None:
        """waiting: what is known of a request that comes; late_patience_s: as of `PromisedQueue`."""
        self.promised: PromisedQueue[Request] = PromisedQueue(late_patience_s)
        self._waiting = waiting
        self._entries: dict[Request, Waiting[Request]] = {}

    def add_request(self, request: Request) -> None:
        self._entries[request] = entry = self._waiting(request)
        self.promised.add(entry)

    def pop_request(self) -> Request:
        request = self.promised.pop().item
        del self._entries[request]
        return request

    def peek_request(self) -> Request:
        return self.promised.head().item

    def prepend_request(self, request: Request) -> None:
        self._entries[request] = entry = self._waiting(request)
        self.promised.put_back(entry)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        self.promised.remove(self._entries.pop(request))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request in self._entries:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry.item for entry in self.promised)
