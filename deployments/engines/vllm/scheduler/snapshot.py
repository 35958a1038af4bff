"""From vLLM's scheduler to the snapshot that policies read, at a cost that a step does not notice.

What is known of the requests that run (prompt, class, prediction, tokens so far) is kept in arrays from step to step,
and a snapshot shows those arrays themselves: it is good until the step has been scheduled.

Departures from the letter of `policies.types`, all of them about what "runs" and "waits" means here:

* With steps in flight, a request whose last token is already being computed cannot be scheduled any more. It is left
  out of the batch and its slot with it, so that no decode step is planned for it alone.
* A session that waits for its client's next input, a grammar still compiled or KV still on its way does not wait for
  us: it is left out of the queue. A session holds its slot meanwhile.
* `output_tokens` counts tokens in flight as generated.

Most steps change little: every decode is one token further and a few prompts have been worked on. That much is kept
track of here, step by step; request objects are read again after anything else: a preemption, a budget that cut decodes
off, steps that were not told of.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.engines.vllm.request_metadata import RequestMetadata, metadata_of
from deployments.engines.vllm.scheduler.blocks import pool_share
from deployments.engines.vllm.scheduler.queue import DeadlineQueue
from policies.types import BatchState, FloatArray, IntArray, RequestView, RunningRequests

_computed = attrgetter("num_computed_tokens")
# Most requests of the queue that are shown: no step starts more.
_WINDOW = 256


class Snapshot(NamedTuple):
    """A `BatchState` and what the plug-in needs besides.

    Attributes:
        chunks: running requests in the middle of their prompt.
        idle_slots: slots held by sessions that wait for input and by requests whose last token is in flight.
        apart: requests that hold a cache and stand in no batch: those, and where a cache has come or is on its way.
        joining: of those, where a cache has come or is on its way; they will stand in a batch.
        begun: of those, whoever may start in this step; the slots of the state are for them too.
    """

    state: BatchState
    chunks: tuple[Request, ...]
    idle_slots: int
    apart: int
    joining: int
    begun: int

    @property
    def mean_context_tokens(self) -> float:
        """Of those that decode."""
        running, chunks = self.state.running, self.chunks
        decoding = len(running) - len(chunks)
        return (running.total_tokens - sum([one.num_tokens for one in chunks])) / decoding if decoding else 0.0


class _Head(NamedTuple):
    """The head of the queue as it was last looked at, the tokens that it has to prefill, and how often the queue had
    been popped and otherwise changed by then."""

    views: tuple[RequestView, ...]
    tokens: int
    popped: int
    moved: int


_NOBODY = _Head((), 0, 0, 0)


@lru_cache(maxsize=1)
def _zeros(n: int) -> IntArray:
    return np.zeros(n, dtype=np.int64)


class _Batch:
    """What runs, as columns of which the first ``len`` entries count, in no particular order: who leaves is replaced by
    the last one, so that nothing else has to move.

    Attributes:
        requests, place: who stands at a place, and where somebody stands.
        prompt, class_index, most: int64; what never changes, `most` being output tokens.
        output: int64; output tokens with those in flight.
        predicted: float64; NaN without a prediction.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.place: dict[Request, int] = {}
        self._counts: IntArray = np.zeros((4, 64), dtype=np.int64)
        self._name_columns()
        self.predicted: FloatArray = np.zeros(64)

    def _name_columns(self) -> None:
        self.prompt, self.class_index, self.most, self.output = self._counts

    def __len__(self) -> int:
        return len(self.requests)

    def join(self, request: Request, class_index: int, predicted: float | None) -> int:
        """Returns its place."""
        at = len(self.requests)
        if at == len(self.predicted):
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
            self.predicted = np.concatenate((self.predicted, np.zeros_like(self.predicted)))
            self._name_columns()
        self.requests.append(request)
        self.place[request] = at
        self.prompt[at], self.class_index[at], self.most[at] = (
            request.num_prompt_tokens,
            class_index,
            request.max_tokens,
        )
        self.output[at] = request.num_computed_tokens - request.num_prompt_tokens + 1
        self.predicted[at] = np.nan if predicted is None else predicted
        return at

    def leave(self, request: Request) -> None:
        at = self.place.pop(request, None)
        if at is None:
            return
        last = self.requests.pop()
        if last is not request:
            self.requests[at], self.place[last] = last, at
            self._counts[:, at] = self._counts[:, len(self.requests)]
            self.predicted[at] = self.predicted[len(self.requests)]


class _Known:
    """What is kept of a request until it is forgotten.

    Attributes:
        told: what came with it.
        arrived_s: when it came, by the driver's clock: vLLM's own stamp is that of the router's clock, and from before
            the wait there. None until somebody has said so, or has asked for its view.
        view: as it was last shown, or None.
    """

    __slots__ = ("arrived_s", "told", "view")

    def __init__(self, told: RequestMetadata) -> None:
        self.told = told
        self.arrived_s: float | None = None
        self.view: RequestView | None = None


def prompts_in_progress(scheduler: Scheduler) -> tuple[Request, ...]:
    """Running requests in the middle of their prompt."""
    begun = scheduler._inflight_prefills
    return tuple([request for request in begun if request.status == RequestStatus.RUNNING]) if begun else ()


class SnapshotTaker:
    """Takes snapshots of one scheduler; keeps a place for each request that runs and a view for each that was shown."""

    def __init__(self, scheduler: Scheduler, max_batch_tokens: int) -> None:
        """Call `adopt` before the first snapshot."""
        self._scheduler = scheduler
        self.slots, self.max_batch_tokens = 0, max_batch_tokens
        self._class_index: dict[str | None, int] = {}
        self._pool = pool_share(scheduler)
        # With these vLLM takes computed tokens back, and a step is not one token for each.
        self._always_reads = scheduler.connector is not None or scheduler.num_spec_tokens > 0
        one_group = len(scheduler.kv_cache_manager.coordinator.single_type_managers) == 1
        # Whether what a step takes of the cache are its tokens, and nothing else.
        self.is_foreseeable = one_group and not self._always_reads
        self._known: dict[Request, _Known] = {}
        self._head = _NOBODY
        self._batch = _Batch()
        # The step up to which the batch is followed, or None: it must be read. Of the steps since it was brought up to
        # date, those that decoded, and who got a part of their prompt.
        self._followed_to: int | None = None
        self._decode_steps = 0
        self._prefilled: list[str] = []
        # Who ran and got no token in the last step: their last one was in flight, if they have left before the next.
        self._left_out = 0
        # They still run for vLLM, but their last token is in flight: they stand in no batch any more.
        self._ending: set[Request] = set()
        self._begun = 0  # times that a request came into the batch
        self._decoding: int | None = None  # how many of a snapshot can decode, until its first step is told of

    def adopt(self, slots: int, class_names: Sequence[str | None]) -> None:
        """The most that may run, and the classes, for requests seen from now on and for those seen before."""
        self.slots = slots
        self._class_index = {name: index for index, name in enumerate(class_names)}
        for known in self._known.values():
            known.view = None  # which shows its class
        self._head, self._batch, self._followed_to = _NOBODY, _Batch(), None

    def take(self, now_s: float, *, in_flight: bool) -> Snapshot:
        """now_s: the driver's clock; in_flight: whether steps have no result yet."""
        scheduler = self._scheduler
        chunks = prompts_in_progress(scheduler)
        running = self._running(chunks, in_flight)
        idle = len(self._ending) + scheduler.num_waiting_for_streaming_input
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        blocked = {request for request in scheduler.deferred_waiting if self._is_blocked(request)}
        holding = len(scheduler.kv_holding_waiting)
        begun = holding - sum(map(scheduler._holds_kv_blocks, blocked))
        slots = self._pool.slots(max(1, self.slots - idle), free, running, begun)
        waiting, waiting_count = self._waiting(now_s, slots - len(running), blocked)
        # vLLM keeps one block for padding. Who has begun holds theirs, and stands before who has not.
        free, total = self._pool.count(free, pool.num_gpu_blocks - 1, running, waiting[begun:])
        state = BatchState(
            now_s=now_s,
            running=running,
            waiting=waiting,
            waiting_count=waiting_count,
            slots=slots,
            free_blocks=free,
            total_blocks=total,
            block_size=self._pool.block_size,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=scheduler.max_model_len,
            departed=self.departed,
        )
        joining = holding - scheduler.num_waiting_for_streaming_input
        return Snapshot(state, chunks, idle, len(self._ending) + holding, joining, begun)

    @property
    def departed(self) -> int:
        """Requests that have left the batch so far, in whatever way; one whose last token is in flight has."""
        return self._begun - len(self._scheduler.running) + len(self._ending)

    def step_taken(self, prefills: Sequence[str], scheduled: Mapping[str, int], *, begun: int, preempted: bool) -> None:
        """After a step was scheduled, the first since a snapshot or a later one, before vLLM counts its tokens. Without
        this, or where it was not told of the step before, requests are read again for the next snapshot.

        prefills: ids of those that got a part of their prompt; scheduled: tokens by id; begun: how many came into the
        batch; preempted: whether any request lost its cache.
        """
        self._begun += begun
        scheduler, decodes = self._scheduler, len(scheduled) - len(prefills)
        could_decode, self._decoding = self._decoding, None
        left_out = 0
        if decodes:
            left_out = (len(scheduler.running) - len(prefills) if could_decode is None else could_decode) - decodes
        is_followed = self._followed_to == scheduler.current_step - 1 and not self._left_out and not preempted
        if self._always_reads or not is_followed or (left_out and could_decode is not None):
            self._followed_to = None
            return
        self._followed_to, self._left_out = scheduler.current_step, left_out
        self._decode_steps += decodes > 0
        self._prefilled.extend(prefills)

    def steps_to_an_end(self) -> int:
        """Until the first of those who decode has its last token in flight, where it ends at its limit."""
        n = len(self._batch)
        return max(1, int((self._batch.most[:n] - self._batch.output[:n]).min(initial=_WINDOW)))

    def arrived(self, request: Request, now_s: float) -> None:
        """It has come to the scheduler; one that nobody said this of counts from when it was first shown."""
        self._known_of(request).arrived_s = now_s

    def leave(self, request: Request) -> None:
        """It has ended, and is forgotten before the next snapshot."""
        if self._left_out and request.num_output_tokens >= request.max_tokens:
            self._left_out -= 1
        self._ending.discard(request)

    def forget(self, request: Request) -> None:
        self._batch.leave(request)
        self._ending.discard(request)
        self._known.pop(request, None)

    def goes_on(self, session: Request) -> None:
        """It waits with its next part, another request to all who look at it."""
        self.forget(session)
        self._head = _NOBODY

    def metadata(self, request: Request) -> RequestMetadata:
        """What came with it, until it is forgotten."""
        return self._known_of(request).told

    def _known_of(self, request: Request) -> _Known:
        known = self._known.get(request)
        if known is None:
            params = request.sampling_params
            known = self._known[request] = _Known(metadata_of(params.extra_args if params else None))
        return known

    def class_index(self, slo_class: str | None) -> int:
        return self._class_index.get(slo_class, 0)

    # The running batch

    def _running(self, chunks: tuple[Request, ...], in_flight: bool) -> RunningRequests:
        """The batch as arrays."""
        self._bring_up_to_date()
        batch = self._batch
        if in_flight:
            self._set_ending_apart()
        n = len(batch)
        output, left = batch.output[:n], _zeros(n)
        if chunks:
            left = left.copy()
            for request in chunks:
                at = batch.place[request]
                left[at] = request.num_tokens - request.num_computed_tokens
                output[at] = request.num_output_tokens
        self._decoding = n - (int(np.count_nonzero(left)) if chunks else 0)
        return RunningRequests(batch.prompt[:n], output, left, batch.class_index[:n], batch.predicted[:n])

    def _bring_up_to_date(self) -> None:
        scheduler, batch = self._scheduler, self._batch
        if self._followed_to == scheduler.current_step and not self._left_out and not self._always_reads:
            output = batch.output[: len(batch)]
            output += self._decode_steps
            for request in map(scheduler.requests.get, self._prefilled):
                if request is not None and request.status == RequestStatus.RUNNING:
                    at = self._place(request)  # may make the columns longer
                    batch.output[at] = request.num_computed_tokens - request.num_prompt_tokens + 1
            if len(batch) + len(self._ending) != len(scheduler.running):
                self._read()
        else:
            self._read()
        self._followed_to, self._left_out, self._decode_steps = scheduler.current_step, 0, 0
        self._prefilled.clear()

    def _set_ending_apart(self) -> None:
        """Take out of the batch those that vLLM will not schedule again, by its own rule."""
        batch, n = self._batch, len(self._batch)
        near = (batch.output[:n] >= batch.most[:n]).nonzero()[0].tolist()
        for at in reversed(near):  # who takes the place of one that leaves comes from behind
            request = batch.requests[at]
            if _last_token_in_flight(request):
                batch.leave(request)
                self._ending.add(request)

    def _read(self) -> None:
        """The batch as vLLM has it now."""
        batch, running = self._batch, self._scheduler.running
        self._ending.clear()
        self._head = _NOBODY  # somebody of it may have run and come back
        for request in [request for request in running if request not in batch.place]:
            self._place(request)
        if len(batch) > len(running):
            for request in [request for request in batch.requests if request.status != RequestStatus.RUNNING]:
                batch.leave(request)
        n = len(batch)
        batch.output[:n] = np.fromiter(map(_computed, batch.requests), np.int64, n) - batch.prompt[:n] + 1

    def _place(self, request: Request) -> int:
        at = self._batch.place.get(request)
        if at is None:
            told = self.metadata(request)
            at = self._batch.join(request, self.class_index(told.slo_class), told.predicted_output_tokens)
        return at

    # The waiting queue

    def _waiting(self, now_s: float, free_slots: int, blocked: Set[Request]) -> tuple[tuple[RequestView, ...], int]:
        """The head of the queue, as far as the next steps could start it, and the length of the whole queue; without
        those that are blocked."""
        scheduler = self._scheduler
        total = len(scheduler.kv_holding_waiting)
        if scheduler.pause_state == PauseState.UNPAUSED:
            total += len(scheduler.waiting)
        if not total:
            self._head = _NOBODY
            return (), 0
        most = max(1, min(free_slots, _WINDOW))
        head = self._still_ahead(blocked)
        if head.tokens < 2 * self.max_batch_tokens and len(head.views) < most:
            head = self._longer(head, most, blocked, now_s)
        views = head.views[:most]
        return views, max(total - len(blocked), len(views))

    def _still_ahead(self, blocked: Set[Request]) -> _Head:
        """What was shown before, without those in front who have started since; nobody if others may stand there."""
        head, queue = self._head, self._scheduler.waiting
        if head is _NOBODY or blocked or self._scheduler.kv_holding_waiting or queue.moved != head.moved:
            return _NOBODY
        gone = queue.popped - head.popped
        if gone:
            started = sum([view.prefill_tokens for view in head.views[:gone]])
            self._head = head = _Head(head.views[gone:], head.tokens - started, queue.popped, queue.moved)
        return head

    def _longer(self, head: _Head, most: int, blocked: Set[Request], now_s: float) -> _Head:
        """With those behind it, as far as three steps could hold them: enough for many snapshots."""
        scheduler, views, tokens = self._scheduler, list(head.views), head.tokens
        queue = scheduler.waiting
        told = isinstance(queue, DeadlineQueue) and not blocked and not scheduler.kv_holding_waiting
        steady = told and not self._always_reads  # whether the queue says what becomes of these
        for request in self._front(most, blocked)[len(views) :]:
            if tokens >= 3 * self.max_batch_tokens:
                break
            view = self._view(request, now_s)
            steady = steady and not view.output_tokens and not view.cached_tokens
            tokens += view.prefill_tokens
            views.append(view)
        if not steady:
            self._head = _NOBODY
            return _Head(tuple(views), tokens, 0, 0)
        queue.watch(len(views))
        self._head = _Head(tuple(views), tokens, queue.popped, queue.moved)
        return self._head

    def _front(self, count: int, blocked: Set[Request]) -> tuple[Request, ...]:
        """The first of the queue, without those that are blocked."""
        requests = islice(self._queue(), count + len(blocked))
        return tuple([one for one in requests if one not in blocked][:count] if blocked else requests)

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

    def _view(self, request: Request, now_s: float) -> RequestView:
        known = self._known_of(request)
        view = known.view
        if view is None or view.output_tokens != request.num_output_tokens or request.num_computed_tokens:
            if known.arrived_s is None:
                known.arrived_s = now_s
            view = known.view = self._seen(request, known.told, known.arrived_s)
        return view

    def _seen(self, request: Request, told: RequestMetadata, arrived_s: float) -> RequestView:
        return RequestView(
            request_id=request.request_id,
            arrival_s=arrived_s,
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
