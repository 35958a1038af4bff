"""From vLLM's scheduler to the snapshot that policies read.

Departures from the letter of `policies.types`, all of them about what "runs" and "waits" means here:

* With steps in flight, a request whose last token is already being computed cannot be scheduled any more. It is left
  out of the batch and its slot with it, so that no decode step is planned for it alone.
* A session that waits for its client's next input, a grammar still compiled or KV still on its way does not wait for
  us: it is left out of the queue. A session holds its slot meanwhile.
* `output_tokens` counts tokens in flight as generated.
"""

from collections.abc import Iterator, Sequence, Set
from itertools import chain, islice
from math import inf, isfinite, isnan, nan
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.config.scheduler import SchedulerSettings
from deployments.engines.vllm.request_metadata import RequestMetadata, metadata_of
from deployments.engines.vllm.scheduler.blocks import pool_share
from deployments.engines.vllm.scheduler.columns import Columns
from deployments.engines.vllm.scheduler.drafted import DraftedTokens, Place
from deployments.engines.vllm.scheduler.media import encodes_media, next_encoded, unread_media
from policies.engine.promised_queue import NOTHING_LEFT, Waiting
from policies.live import Live
from policies.types import BatchState, Foreseen, IntArray, Left, RequestView, RunningRequests

_computed = attrgetter("num_computed_tokens")
_row = attrgetter("row")
# Most requests of the queue that are shown: no step starts more.
_WINDOW = 256


class Snapshot(NamedTuple):
    """A `BatchState` and what the plug-in needs besides.

    Attributes:
        chunks: running requests in the middle of their prompt.
        idle_slots: slots held by sessions that wait for input and by requests whose last token is in flight.
        most: requests that the engine has room for, those that stand in no batch counted once: these sessions and
            requests, and where a cache has come or is on its way.
    """

    state: BatchState
    chunks: tuple[Request, ...]
    idle_slots: int
    most: int

    @property
    def mean_context_tokens(self) -> float:
        """Mean context of the requests that decode."""
        running, chunks = self.state.running, self.chunks
        decoding = len(running) - len(chunks)
        return (running.total_tokens - sum([one.num_tokens for one in chunks])) / decoding if decoding else 0.0


class StepSeconds(NamedTuple):
    """Seconds of steps: as they were planned, and from begin to result."""

    believed_s: float
    in_steps_s: float


class Known:
    """What is kept of a request until it is forgotten.

    Attributes:
        told: what came with it.
        arrived_s: when it came, by the driver's clock: vLLM's own stamp is that of the router's clock, and from before
            the wait there.
        deadline_s: when its first token is due, by the driver's clock; inf where none was promised.
        ends_by_s: when its last token is due, likewise.
        first_token_s: when it came; NaN before.
        row: of `Columns`.
        at_first: seconds of all steps up to that, as `PromisedGaps` adds them up; None before they are known.
        class_index, slo_class, tpot_s: by the settings in force; slo_class "" where it is of no class.
        view: as it was last shown, or None.
    """

    __slots__ = (
        "arrived_s", "at_first", "class_index", "deadline_s", "ends_by_s", "first_token_s", "row", "slo_class", "told",
        "tpot_s", "view",
    )  # fmt: skip

    def __init__(self, told: RequestMetadata, arrived_s: float, row: int) -> None:
        self.told, self.arrived_s, self.row = told, arrived_s, row
        self.first_token_s = nan
        self.at_first: StepSeconds | None = None

    def judged_by(self, settings: SchedulerSettings, names: Sequence[str | None]) -> None:
        """Take class and promises by these settings, where the request itself brings none. One of a class that is not
        among `names` counts as one of no class."""
        told = self.told
        self.class_index = names.index(told.slo_class) if told.slo_class in names else 0
        self.slo_class = names[self.class_index] or ""
        left_s = settings.ttft_s if told.ttft_left_s is None else told.ttft_left_s
        promised = left_s is not None and isfinite(left_s) and not told.resumed
        self.deadline_s: float = self.arrived_s + left_s if promised and left_s is not None else inf
        self.tpot_s: float = told.tpot_s or settings.tpot_s or inf
        ends_s = settings.e2e_s if told.e2e_left_s is None else told.e2e_left_s
        due = ends_s is not None and isfinite(ends_s) and not told.fills_idle
        self.ends_by_s: float = self.arrived_s + ends_s if due and ends_s is not None else inf
        self.view: RequestView | None = None


def prompts_in_progress(scheduler: Scheduler) -> tuple[Request, ...]:
    """Running requests in the middle of their prompt."""
    begun = scheduler._inflight_prefills
    return tuple([request for request in begun if request.status == RequestStatus.RUNNING]) if begun else ()


class SnapshotTaker:
    """Takes snapshots of one scheduler, and keeps what is known of each request that it holds.

    Attributes:
        drafted: tokens that are drafted; None where none are.
    """

    def __init__(self, scheduler: Any, max_batch_tokens: int, *, cuts_prompts: bool) -> None:
        self._scheduler: Scheduler = scheduler
        self._settings: Live[SchedulerSettings] = scheduler.live_settings
        self._slots: Live[int] = scheduler.slots
        self._cuts_prompts = cuts_prompts
        self.max_batch_tokens = max_batch_tokens
        self._class_names = self._settings.now.class_names  # by class_index
        self._pool = pool_share(scheduler)
        self._known: dict[Request, Known] = {}
        self._columns = Columns()
        self.drafted = DraftedTokens(scheduler, self._place) if scheduler.num_spec_tokens else None
        self._columns.drafts = self.drafted.drafts if self.drafted else None
        self._started = 0  # times that a request came into the batch

    def settings_changed(self) -> list[int]:
        """Judge the requests that are known by the settings in force. Returns the class_index that each class of before
        has now."""
        before = self._class_names
        if self._settings.now.policy is None:  # one of somebody's own knows the classes that it began with
            self._class_names = self._settings.now.class_names
        names = self._class_names
        for request, known in self._known.items():
            known.judged_by(self._settings.now, names)
            self._note(request, known)
        return [names.index(name) if name in names else 0 for name in before]

    def take(self, now_s: float, *, in_flight: bool) -> Snapshot:
        """now_s: the driver's clock; in_flight: whether steps have no result yet."""
        scheduler = self._scheduler
        chunks = prompts_in_progress(scheduler)
        requests = scheduler.running
        if in_flight:
            requests = [one for one in requests if not _last_token_in_flight(one)]
        ending = len(scheduler.running) - len(requests)
        running = self._running(requests, chunks, now_s)
        idle = ending + scheduler.num_waiting_for_streaming_input
        pool = scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        blocked = {request for request in scheduler.deferred_waiting if self._is_blocked(request)}
        holding = len(scheduler.kv_holding_waiting)
        begun = holding - sum(map(scheduler._holds_kv_blocks, blocked))
        slots = self._pool.slots(max(1, self._slots.now - idle), free, running, begun)
        waiting, waiting_count = self._waiting(now_s, slots - len(running), blocked)
        # vLLM keeps one block for padding. Requests that began hold theirs, and stand before the others.
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
            departed=self.departed + ending,
            cuts_prompts=self._cuts_prompts,
            encoder_tokens=self._next_encoded(chunks, blocked) if encodes_media(scheduler) else 0,
        )
        return Snapshot(state, chunks, idle, slots - begun + ending + holding)

    def _next_encoded(self, chunks: Sequence[Request], blocked: Set[Request]) -> int:
        """Tokens of media that the next step that reads a prompt encodes."""
        request = next(chain(chunks, (one for one in self._queue() if one not in blocked)), None)
        return 0 if request is None else next_encoded(self._scheduler, request)

    @property
    def departed(self) -> int:
        """Requests that have left the batch so far, in whatever way."""
        return self._started - len(self._scheduler.running)

    def started(self, count: int) -> None:
        """So many came into the batch with a step."""
        self._started += count

    # Requests

    def known(self, request: Request, now_s: float) -> Known:
        """What is known of it; one that is new came now."""
        known = self._known.get(request)
        if known is None:
            params = request.sampling_params
            told = metadata_of(params.extra_args if params else None)
            known = self._known[request] = Known(told, now_s, self._columns.add())
            known.judged_by(self._settings.now, self._class_names)
            self._note(request, known)
            if self.drafted is not None:
                self.drafted.drafts.add(known.row, known.slo_class)
        return known

    def _place(self, request: Request) -> Place | None:
        known = self._known.get(request)
        return None if known is None else Place(known.row, known.slo_class)

    def _note(self, request: Request, known: Known) -> None:
        """What is known of it has changed."""
        self._columns.write(
            known.row,
            prompt_tokens=request.num_prompt_tokens,
            class_index=known.class_index,
            predicted_output_tokens=known.told.predicted_output_tokens,
            deadline_s=known.deadline_s,
            first_token_s=known.first_token_s,
            tpot_s=known.tpot_s,
            ends_by_s=known.ends_by_s,
        )

    def forget(self, request: Request) -> None:
        known = self._known.pop(request, None)
        if known is not None:
            self._columns.remove(known.row)

    def has_first_token(self, request_ids: Sequence[str], now_s: float) -> Iterator[Known]:
        """These have got a token; those for which it is the first, as far as they are still there."""
        for request_id in request_ids:
            if (request := self._scheduler.requests.get(request_id)) is None:
                continue
            known = self._known.get(request)
            if known is not None and isnan(known.first_token_s):
                known.first_token_s = now_s
                self._note(request, known)
                yield known

    def waiting(
        self, request: Request, now_s: float, answers: Foreseen | None, media_price: float = 0.0
    ) -> Waiting[Request]:
        """As it stands in the queue.

        Args:
            media_price: of a token of images or sounds that are to be encoded, in tokens of a prompt.
        """
        known = self.known(request, now_s)
        return Waiting(
            request,
            arrival_s=known.arrived_s,
            deadline_s=known.deadline_s if isnan(known.first_token_s) else inf,
            ends_by_s=known.ends_by_s,
            unread_tokens=request.num_tokens - self._hit_tokens(request) + _priced(request, media_price),
            left=_left(request, known, answers),
            resumed=known.told.resumed,
            fills_idle=known.told.fills_idle,
        )

    def reading(
        self, chunks: Sequence[Request], now_s: float, answers: Foreseen, media_price: float = 0.0
    ) -> list[Waiting[Request]]:
        """Prompts in progress, with what is left of them."""
        known = [(request, self.known(request, now_s)) for request in chunks]
        return [
            Waiting(
                request,
                arrival_s=one.arrived_s,
                deadline_s=one.deadline_s,
                ends_by_s=one.ends_by_s,
                unread_tokens=request.num_tokens - request.num_computed_tokens + _priced(request, media_price),
                left=_left(request, one, answers),
                resumed=one.told.resumed or not isnan(one.first_token_s),
                fills_idle=one.told.fills_idle,
                reads=True,
            )
            for request, one in known
        ]

    def foretold(self, request: Request, known: Known, answers: Foreseen, media_price: float = 0.0) -> None:
        """Let it be known that this one has come."""
        left = _left(request, known, answers)
        unread_tokens = request.num_tokens - self._hit_tokens(request) + _priced(request, media_price)
        answers.come(known.arrived_s, known.ends_by_s, unread_tokens, left)

    def _hit_tokens(self, request: Request) -> int:
        """Tokens of the prompt that vLLM's cache holds. Does not change the cache."""
        cache = self._scheduler.kv_cache_manager
        if request.num_computed_tokens or not cache.prefix_cache_lookup_enabled(request):
            return int(request.num_computed_tokens)
        return int(cache.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)[1])

    # The running batch

    def _running(self, requests: Sequence[Request], chunks: tuple[Request, ...], now_s: float) -> RunningRequests:
        """The batch as arrays."""
        n = len(requests)
        rows = self._rows(requests, now_s)
        counts, times = self._columns.pick(rows)
        brought = self._columns.tokens_per_step(rows)
        computed = np.fromiter(map(_computed, requests), np.int64, n)
        output, left = computed - counts[0] + 1, np.zeros(n, dtype=np.int64)
        for request in chunks:
            at = requests.index(request)
            left[at] = request.num_tokens - request.num_computed_tokens
            output[at] = request.num_output_tokens
        predicted, deadline_s, first_token_s, tpot_s, ends_by_s = times
        return RunningRequests(
            counts[0], output, left, counts[1], predicted, deadline_s, first_token_s, tpot_s, ends_by_s, brought
        )

    def _rows(self, requests: Sequence[Request], now_s: float) -> IntArray:
        """Where they stand in the columns."""
        try:
            known = map(self._known.__getitem__, requests)
            return np.fromiter(map(_row, known), np.int64, len(requests))
        except KeyError:  # some came while nothing was planned
            return np.array([self.known(request, now_s).row for request in requests], dtype=np.int64)

    # The waiting queue

    def _waiting(self, now_s: float, free_slots: int, blocked: Set[Request]) -> tuple[tuple[RequestView, ...], int]:
        """The head of the queue, as far as the next steps could start it, and the length of the whole queue; without
        those that are blocked."""
        scheduler = self._scheduler
        total = len(scheduler.kv_holding_waiting)
        if scheduler.pause_state == PauseState.UNPAUSED:
            total += len(scheduler.waiting)
        if not total:
            return (), 0
        views: list[RequestView] = []
        tokens, most = 0, max(1, min(free_slots, _WINDOW))
        for request in islice(self._queue(), most + len(blocked)):
            if request in blocked:
                continue
            if len(views) == most or tokens >= 2 * self.max_batch_tokens:
                break
            view = self._view(request, now_s)
            tokens += view.prefill_tokens
            views.append(view)
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

    def _view(self, request: Request, now_s: float) -> RequestView:
        known = self.known(request, now_s)
        view = known.view
        if view is None or view.output_tokens != request.num_output_tokens or request.num_computed_tokens:
            view = known.view = RequestView(
                request_id=request.request_id,
                arrival_s=known.arrived_s,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                cached_tokens=request.num_computed_tokens,
                predicted_output_tokens=known.told.predicted_output_tokens,
                max_output_tokens=request.max_tokens,
                class_index=known.class_index,
                slo_class=known.told.slo_class,
                deadline_s=known.deadline_s,
                tpot_s=known.tpot_s,
                ends_by_s=known.ends_by_s,
            )
        return view


def _priced(request: Request, media_price: float) -> int:
    """Its media, in tokens of a prompt."""
    return round(media_price * unread_media(request)) if media_price else 0


def _left(request: Request, known: Known, answers: Foreseen | None) -> Left:
    """Tokens that its answer has left, within its own limit: others like it may have had none."""
    if answers is None:
        return NOTHING_LEFT
    made = request.num_output_tokens
    left = answers.left(known.class_index, known.told.predicted_output_tokens, made)
    most = float(max(1, request.max_tokens - made))
    return left if max(left) <= most else Left(*[min(each, most) for each in left])


def _last_token_in_flight(request: Request) -> bool:
    return bool(
        request.num_output_placeholders > 0
        and request.num_computed_tokens + 2 - request.num_output_placeholders
        >= request.num_prompt_tokens + request.max_tokens
    )
