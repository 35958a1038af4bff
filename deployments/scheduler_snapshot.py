"""From vLLM's scheduler to the snapshot that policies read, at a cost that a step does not notice.

What never changes of a request (prompt, class, prediction) is kept in arrays, a row for each request that has run.

Departures from the letter of `policies.types`, all of them about what "runs" and "waits" means here:

* With steps in flight, a request whose last token is already being computed cannot be scheduled any more. It is left
  out of the batch and its slot with it, so that no decode step is planned for it alone.
* A session that waits for its client's next input, a grammar still compiled or KV still on its way does not wait for
  us: it is left out of the queue. A session holds its slot meanwhile.
* `output_tokens` counts tokens in flight as generated.

Most steps change little: every decode is one token further and a few prompts have been worked on. That much is kept
track of here; request objects are read again only after anything else (a preemption, a budget that cut decodes off).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.request_metadata import RequestMetadata, metadata_of
from policies.types import BatchState, IntArray, RequestView, RunningRequests

_computed = attrgetter("num_computed_tokens")
# Most requests of the queue that are shown: no step starts more.
_WINDOW = 256


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A `BatchState` and what the plug-in needs besides.

    Attributes:
        chunks: running requests in the middle of their prompt.
        idle_slots: slots held by sessions that wait for input and by requests whose last token is in flight.
    """

    state: BatchState
    chunks: tuple[Request, ...]
    idle_slots: int

    @property
    def decoding(self) -> int:
        return len(self.state.running) - len(self.chunks)

    @property
    def mean_context_tokens(self) -> float:
        running = self.state.running
        if not len(running):
            return 0.0
        return (int(running.prompt_tokens.sum()) + int(running.output_tokens.sum())) / len(running)


class SnapshotTaker:
    """Takes snapshots of one scheduler; keeps a row for each request that ran and a view for each that was shown."""

    def __init__(self, scheduler: Scheduler, slots: int, max_batch_tokens: int, class_names: tuple[str | None, ...]):
        self._scheduler = scheduler
        self.slots, self.max_batch_tokens = slots, max_batch_tokens
        self._class_index = {name: index for index, name in enumerate(class_names)}
        self._groups = max(1, len(scheduler.kv_cache_config.kv_cache_groups))
        # With these vLLM takes computed tokens back, and a step is not one token for each.
        self._always_fresh = scheduler.connector is not None or scheduler.num_spec_tokens > 0
        self._row_of: dict[Request, int] = {}
        self._free_rows: list[int] = []
        self._views: dict[Request, RequestView] = {}
        self._known: list[Request] = []
        self._rows: IntArray = np.zeros(0, dtype=np.int64)
        self._fresh = False
        self._decoding = self._rows
        # By row: prompt tokens, class, tokens at the very end, tokens computed.
        self._prompt, self._class, self._end, self._computed = np.zeros((4, 0), dtype=np.int64)
        self._predicted = np.zeros(0)

    def use_classes(self, class_names: Mapping[str | None, int]) -> None:
        """Class indices for requests seen from now on and for those seen before."""
        self._class_index = dict(class_names)
        self._views.clear()
        self._row_of.clear()
        self._free_rows = list(range(len(self._predicted)))
        self._known, self._fresh = [], False
        self._rows = self._decoding = np.zeros(0, dtype=np.int64)

    def take(self, now_s: float, wall_s: float, *, in_flight: bool) -> Snapshot:
        """now_s: the driver's clock; wall_s: Unix time, as arrivals; in_flight: whether steps have no result yet."""
        scheduler = self._scheduler
        chunks = tuple(request for request in scheduler._inflight_prefills if request.status == RequestStatus.RUNNING)
        running, ending = self._running(chunks, in_flight)
        idle = ending + scheduler.num_waiting_for_streaming_input
        slots = max(1, self.slots - idle)
        waiting, waiting_count = self._waiting(now_s - wall_s, slots - len(running))
        pool = scheduler.kv_cache_manager.block_pool
        state = BatchState(
            now_s=now_s,
            running=running,
            waiting=waiting,
            waiting_count=waiting_count,
            slots=slots,
            free_blocks=pool.get_num_free_blocks() // self._groups,
            total_blocks=(pool.num_gpu_blocks - 1) // self._groups,  # vLLM keeps one block for padding
            block_size=scheduler.block_size,
            max_batch_tokens=self.max_batch_tokens,
        )
        return Snapshot(state, chunks, idle)

    def step_taken(self, decodes: int, prefills: Iterable[str], scheduled: Mapping[str, int], preempted: int) -> None:
        """After a step was scheduled, before vLLM counts its tokens.

        decodes: requests that got a token; prefills: ids of those that got a part of their prompt; scheduled: tokens
        by id; preempted: requests that lost their cache.
        """
        if self._always_fresh or preempted or decodes not in (0, len(self._decoding)):
            self._fresh = False
        elif decodes:
            self._computed[self._decoding] += 1
        for request_id in prefills:
            request = self._scheduler.requests[request_id]
            row = self._row(request)
            self._computed[row] = request.num_computed_tokens + scheduled[request_id]

    def forget(self, request: Request) -> None:
        self._views.pop(request, None)
        row = self._row_of.pop(request, None)
        if row is not None:
            self._free_rows.append(row)

    def metadata(self, request: Request) -> RequestMetadata:
        params = request.sampling_params
        return metadata_of(params.extra_args if params else None)

    def class_index(self, slo_class: str | None) -> int:
        return self._class_index.get(slo_class, 0)

    # The running batch

    def _running(self, chunks: tuple[Request, ...], in_flight: bool) -> tuple[RunningRequests, int]:
        """The batch as arrays, and how many requests were left out because their last token is in flight."""
        requests = self._scheduler.running
        if requests != self._known:
            self._known = requests.copy()
            self._rows = self._rows_of(requests)
        if not self._fresh:
            self._computed[self._rows] = np.fromiter(map(_computed, requests), np.int64, len(requests))
            self._fresh = True
        ending = self._ending() if in_flight else []
        rows = np.delete(self._rows, ending) if ending else self._rows
        return self._arrays(rows, chunks), len(ending)

    def _arrays(self, rows: IntArray, chunks: tuple[Request, ...]) -> RunningRequests:
        prompt = self._prompt.take(rows)
        output = self._computed.take(rows)
        output -= prompt
        output += 1
        left = np.zeros(len(rows), dtype=np.int64)
        self._decoding = rows
        if chunks:
            places = {row: at for at, row in enumerate(rows.tolist())}
            for request in chunks:
                at = places[self._row_of[request]]
                left[at] = request.num_tokens - request.num_computed_tokens
                output[at] = request.num_output_tokens
            self._decoding = rows[left == 0]
        return RunningRequests(prompt, output, left, self._class.take(rows), self._predicted.take(rows))

    def _ending(self) -> list[int]:
        """Places in the batch of requests that vLLM will not schedule again, by its own rule."""
        near = self._computed.take(self._rows) + 1 >= self._end.take(self._rows)
        if not near.any():
            return []
        return [int(at) for at in np.flatnonzero(near) if _last_token_in_flight(self._known[at])]

    def _rows_of(self, requests: list[Request]) -> IntArray:
        try:
            return np.fromiter(map(self._row_of.__getitem__, requests), np.int64, len(requests))
        except KeyError:  # they ran already when this one took over
            return np.fromiter(map(self._row, requests), np.int64, len(requests))

    def _row(self, request: Request) -> int:
        row = self._row_of.get(request)
        if row is None:
            row = self._row_of[request] = self._new_row(request)
        return row

    def _new_row(self, request: Request) -> int:
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        told = self.metadata(request)
        self._prompt[row] = request.num_prompt_tokens
        self._class[row] = self.class_index(told.slo_class)
        self._end[row] = request.num_prompt_tokens + request.max_tokens
        self._computed[row] = request.num_computed_tokens
        self._predicted[row] = np.nan if told.predicted_output_tokens is None else told.predicted_output_tokens
        return row

    def _grow(self) -> None:
        old, new = len(self._predicted), max(64, 2 * len(self._predicted))
        more = np.zeros(new - old, dtype=np.int64)
        self._prompt, self._class = np.concatenate((self._prompt, more)), np.concatenate((self._class, more))
        self._end, self._computed = np.concatenate((self._end, more)), np.concatenate((self._computed, more))
        self._predicted = np.concatenate((self._predicted, np.full(new - old, np.nan)))
        self._free_rows = list(range(old, new))

    # The waiting queue

    def _waiting(self, clock_offset_s: float, free_slots: int) -> tuple[tuple[RequestView, ...], int]:
        """The head of the queue, as far as the next steps could start it, and the length of the whole queue."""
        scheduler = self._scheduler
        total = len(scheduler.kv_holding_waiting)
        if scheduler.pause_state == PauseState.UNPAUSED:
            total += len(scheduler.waiting)
        if not total:
            return (), 0
        deferred = scheduler.deferred_waiting
        blocked = {request for request in deferred if self._is_blocked(request)} if deferred else deferred
        views: list[RequestView] = []
        tokens = 0
        for request in islice(self._queue(), max(1, min(free_slots, _WINDOW)) + len(blocked)):
            if request not in blocked:
                views.append(self._view(request, clock_offset_s))
                tokens += views[-1].prefill_tokens
                if tokens >= 2 * self.max_batch_tokens:
                    break
        return tuple(views), max(total - len(blocked), len(views))

    def _queue(self) -> Iterator[Request]:
        scheduler = self._scheduler
        if scheduler.pause_state == PauseState.UNPAUSED:
            return chain(scheduler.kv_holding_waiting, scheduler.waiting)
        return iter(scheduler.kv_holding_waiting)

    def _is_blocked(self, request: Request) -> bool:
        """Whether vLLM would skip it, by the conditions of its own scan."""
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            return True
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id not in self._scheduler.finished_recving_kv_req_ids
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            wanted = request.structured_output_request
            return not wanted or wanted.grammar is None
        return bool(request.num_stale_output_tokens) and not request.drop_stale_output

    def _view(self, request: Request, clock_offset_s: float) -> RequestView:
        known = self._views.get(request)
        if known is None or known.output_tokens != request.num_output_tokens or request.num_computed_tokens:
            known = self._views[request] = self._seen(request, clock_offset_s)
        return known

    def _seen(self, request: Request, clock_offset_s: float) -> RequestView:
        told = self.metadata(request)
        return RequestView(
            request_id=request.request_id,
            arrival_s=request.arrival_time + clock_offset_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            cached_tokens=request.num_computed_tokens,
            predicted_output_tokens=told.predicted_output_tokens,
            max_output_tokens=request.max_tokens,
            class_index=self.class_index(told.slo_class),
            slo_class=told.slo_class,
        )


def _last_token_in_flight(request: Request) -> bool:
    return bool(
        request.num_output_placeholders > 0
        and request.num_computed_tokens + 2 - request.num_output_placeholders
        >= request.num_prompt_tokens + request.max_tokens
    )
