"""What a request is expected to cost, and the ticket that follows from it.

A driver: it asks the predictors and the policies and puts their answers together; it decides nothing itself. Lengths of
finished requests are exchanged with all routers, and the edges of the bins are those in force for all, so that every
router's bins and predictions rest on the same.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from policies.errors import StateStoreError
from policies.gang.buckets import PromptBuckets
from policies.live import Live
from policies.router.completion import Due, MeanCost, due
from policies.router.multi_bin import MultiBin
from policies.router.order import deadline_keys
from policies.router.placement import PrefixIndex, work_s
from policies.router.promise import NO_PROMISE, Promise
from policies.router.sessions import Sessions, Turn
from policies.router.tickets import Ticket
from policies.types import RequestView, StepTimes
from predictor.base import LengthPrediction, LengthPredictor
from predictor.calibration import LOW
from predictor.learned import Foresight, LearnedPredictor, Question
from predictor.metrics import PredictorMetrics
from router.codec import RequestSize
from router.metrics import RouterMetrics
from router.prefix_hits import PrefixHits
from router.state_store import FinishedLength, StateStore
from router.terms import TicketTerms

MAX_UNSENT_LENGTHS = 4096
Mode = Literal["full", "shadow", "stock"]


@dataclass(frozen=True, slots=True)
class Classified:
    """A ticket, and what is known besides.

    Attributes:
        prompt_tokens: of the prompt, with what encoding its images takes in such tokens.
        tokens: of these and the predicted answer together.
        planned_key: the deadline key by the policies when the ticket does not follow them, else None.
    """

    ticket: Ticket
    prompt_tokens: int
    tokens: float
    planned_key: float | None = None


class TicketWriter(Protocol):
    """What a routed client needs of the writer of its tickets; see `Classifier`."""

    @property
    def prefixes(self) -> PrefixHits:
        """What replicas have of prompts."""

    @property
    def sessions(self) -> Sessions:
        """What is known of sessions."""

    @property
    def prompt_token_s(self) -> float:
        """Predicted seconds in which a replica of slowness 1 reads a prompt token."""

    async def foresee(self, question: Question, promise: Promise) -> Foresight | None: ...

    def ticket(
        self,
        size: RequestSize,
        slo_class: str,
        router_id: str,
        arrival_s: float,
        replica_ids: Iterable[str] = (),
        foresight: Foresight | None = None,
        promise: Promise = NO_PROMISE,
    ) -> Classified: ...

    def observe(
        self,
        slo_class: str,
        output_tokens: int,
        foresight: Foresight | None = None,
        *,
        is_cut: bool = False,
        turn: Turn | None = None,
    ) -> None: ...

    async def exchange(self, store: StateStore, now_s: float) -> None: ...


class Classifier:
    """From a request's size to its ticket.

    `mode`: "full" follows the policies; "stock" is first come, first served, to the replica with the fewest requests;
    "shadow" serves as stock does and tells what the policies would have done.
    `prefixes`: what replicas are taken to have in their caches; None where they have none.
    `buckets`: by which prompts of like length share a lane; None does not tell them apart.
    """

    def __init__(
        self,
        *,
        predictor: LengthPredictor,
        bins: MultiBin,
        terms: Live[TicketTerms],
        step_times: StepTimes,
        shared_batch_size: int,
        default_output_tokens: int,
        metrics: RouterMetrics,
        prefixes: PrefixIndex | None,
        mode: Mode = "full",
        learned: LearnedPredictor | None = None,
        buckets: PromptBuckets | None = None,
    ) -> None:
        self.prefixes, self._mode = PrefixHits(prefixes if mode == "full" else None), mode
        self.sessions = Sessions()
        self._predictor, self._bins, self._buckets = predictor, bins, buckets
        self._terms = terms
        self._step_times, self._shared_batch_size = step_times, shared_batch_size
        self._default_output_tokens = default_output_tokens
        self._metrics, self._learned = metrics, learned
        if learned is not None:
            metrics.registry.register(PredictorMetrics(learned))
        self._costs = MeanCost()
        self._unsent: deque[FinishedLength] = deque(maxlen=MAX_UNSENT_LENGTHS)
        self._seen = 0
        # Of routers that bin otherwise, as before and after a redeploy, each kind keeps to edges of its own.
        self._shape = f"{bins.config} {None if buckets is None else buckets.config}"
        self._edges_version, self._edges_in_force = 0, (bins.edges, self.bucket_edges)

    @property
    def prompt_token_s(self) -> float:
        """As `TicketWriter`."""
        return self._step_times.prefill.prefill_s

    @property
    def bin_edges(self) -> tuple[float, ...]:
        return self._bins.edges

    @property
    def bucket_edges(self) -> tuple[float, ...]:
        """In prompt tokens; none where prompts are not told apart."""
        return () if self._buckets is None else self._buckets.edges

    async def foresee(self, question: Question, promise: Promise) -> Foresight | None:
        """What the learned predictor says, within its deadline; None where there is none."""
        return None if self._learned is None else await self._learned.foresee(question, promise)

    def ticket(
        self,
        size: RequestSize,
        slo_class: str,
        router_id: str,
        arrival_s: float,
        replica_ids: Iterable[str] = (),
        foresight: Foresight | None = None,
        promise: Promise = NO_PROMISE,
    ) -> Classified:
        """Args:
        arrival_s: of its HTTP request, on the store's clock.
        replica_ids: those that may know a prefix of it.
        foresight: what `foresee` said of it.
        """
        prediction = self._predict(slo_class, foresight)
        predicted = None if prediction is None else _within(prediction.mean_tokens, size)
        output_tokens = _within(self._default_output_tokens, size) if predicted is None else predicted
        prefixes = self.prefixes.hits(size, replica_ids)
        priced_tokens = size.prompt_tokens + round(self._step_times.media_price * size.media_tokens)
        hit_tokens = max((hit for _, hit in prefixes), default=0)
        request_work_s = self._work_s(size, priced_tokens, output_tokens, arrival_s, hit_tokens)
        short_tokens = 0.0 if prediction is None else _within(prediction.quantile_tokens.get(LOW, 0.0), size)
        its_due = self._due(arrival_s, promise, request_work_s, short_tokens)
        key, late_key = self._keys(arrival_s, slo_class, promise, its_due, request_work_s, priced_tokens)
        ticket = Ticket(
            request_id=size.request_id,
            bin_index=self._bins.assign(predicted, slo_class=slo_class),
            deadline_key=key,
            work_s=request_work_s,
            router_id=router_id,
            slo_class=slo_class,
            arrival_s=arrival_s,
            deadline_s=its_due.starts_by_s,
            tpot_s=promise.tpot_s,
            late_key=late_key,
            unread_tokens=priced_tokens,
            prefixes=prefixes,
            prompt_token_s=self.prompt_token_s,
            step_s=self._step_times.decode.overhead_s,
            predicted_output_tokens=predicted,
            fills_idle=slo_class in self._terms.now.fills_idle,
            bucket=0 if self._buckets is None else self._buckets.assign(size.prompt_tokens),
            prompt_tokens=None if self._buckets is None else size.prompt_tokens,
        )
        tokens = priced_tokens + output_tokens
        if self._mode == "full":
            return Classified(ticket, priced_tokens, tokens)
        planned_key = ticket.deadline_key if self._mode == "shadow" else None
        return Classified(_as_stock(ticket, arrival_s), priced_tokens, tokens, planned_key)

    def _keys(
        self,
        arrival_s: float,
        slo_class: str,
        promise: Promise,
        its_due: Due,
        request_work_s: float,
        priced_tokens: int,
    ) -> tuple[float, float | None]:
        """Of its order among those that wait, and once it is late; None where nothing changes then."""
        terms = self._terms.now
        if terms.order is not None:
            return terms.order.key(arrival_s, slo_class, request_work_s, priced_tokens), None
        return deadline_keys(
            arrival_s,
            promise.ttft_s,
            due_s=its_due.due_s,
            fills_idle=terms.fills_idle.get(slo_class),
            prompt_tokens=priced_tokens,
            late_patience_s=terms.late_patience_s,
        )

    def _due(self, arrival_s: float, promise: Promise, request_work_s: float, short_tokens: float) -> Due:
        """short_tokens: of its answer, if it is short; 0 where nothing says so."""
        if promise.e2e_s is None:
            return due(arrival_s, promise)
        step_s = self._step_times.decode.step_s(decode_requests=self._shared_batch_size)
        relative = self._costs.relative(request_work_s)
        return due(arrival_s, promise, relative_cost=relative, short_s=short_tokens * step_s)

    def _predict(self, slo_class: str, foresight: Foresight | None) -> LengthPrediction | None:
        prediction = foresight.prediction if foresight is not None else None
        if prediction is None:
            prediction = self._predictor.predict(slo_class)
        if prediction is None:
            self._metrics.predictor_fallbacks.labels(slo_class).inc()
        return prediction

    def _work_s(
        self, size: RequestSize, priced_tokens: int, output_tokens: float, arrival_s: float, hit_tokens: int
    ) -> float:
        """Where most of its prompt is cached; what its images take counts as further tokens of it."""
        view = RequestView(
            request_id=size.request_id,
            arrival_s=arrival_s,
            prompt_tokens=priced_tokens,
            cached_tokens=hit_tokens,
        )
        return work_s(view, self._step_times, output_tokens=output_tokens, shared_batch_size=self._shared_batch_size)

    def observe(
        self,
        slo_class: str,
        output_tokens: int,
        foresight: Foresight | None = None,
        *,
        is_cut: bool = False,
        turn: Turn | None = None,
    ) -> None:
        """Take note of a finished request, cut when it ended at its limit; it counts after the next `exchange`, the
        turn at once."""
        if turn is not None:
            self.sessions.observe(turn)
        scored = None
        if self._learned is not None and foresight is not None:
            scored = self._learned.scored(foresight, output_tokens, is_cut)
            self._learned.observe(
                foresight,
                output_tokens,
                is_cut=is_cut,
                histogram=self._predictor.predict(slo_class),
                bin_of=lambda tokens: self._bins.assign(tokens, slo_class=slo_class),
            )
        self._unsent.append(FinishedLength(slo_class, output_tokens, scored, turn))

    async def exchange(self, store: StateStore, now_s: float) -> None:
        """Share the new lengths, learn from everybody's, and follow the edges in force.

        Args:
            now_s: on any clock, the same at every call.

        Raises:
            StateStoreError: the store does not answer; the lengths wait for the next time.
        """
        new, self._unsent = self._unsent, deque(maxlen=MAX_UNSENT_LENGTHS)
        try:
            self._seen, unseen = await store.exchange_lengths(self._seen, new, self._bins.config.window_requests)
        except StateStoreError:
            self._unsent = deque([*new, *self._unsent], maxlen=MAX_UNSENT_LENGTHS)
            raise
        self._bins.note_time(now_s)
        for length in unseen:
            self._bins.observe(length.output_tokens, slo_class=length.slo_class)
            self._predictor.observe(length.slo_class, length.output_tokens)
            if length.turn is not None:
                self.sessions.observe(length.turn)
        if self._learned is not None:
            self._learned.learn(length.scored for length in unseen if length.scored is not None)
        await self._follow_edges(store)

    async def _follow_edges(self, store: StateStore) -> None:
        """Put what was fitted here in force, or take what another router was first with."""
        mine = self._bins.edges, self.bucket_edges
        new = mine if mine != self._edges_in_force else ()
        in_force = await store.swap_edges(self._shape, self._edges_version, *new)
        if in_force is None:  # none yet, or the tables were lost
            self._edges_version = 0
            return
        self._edges_version, self._edges_in_force = in_force.version, in_force[1:]
        if self._bins.config.rule != "fixed" and self._bins.fits(in_force.bins):
            self._bins.adopt(in_force.bins)
        if self._buckets is not None and self._buckets.fits(in_force.buckets):
            self._buckets.adopt(in_force.buckets)


def _within(output_tokens: float, size: RequestSize) -> float:
    """A length by the lengths of others, between those that the request itself sets."""
    return max(size.min_output_tokens, min(output_tokens, size.max_output_tokens or output_tokens))


def _as_stock(ticket: Ticket, arrival_s: float) -> Ticket:
    return replace(
        ticket,
        deadline_key=arrival_s,
        late_key=None,
        work_s=1.0,
        prompt_token_s=0.0,
        step_s=math.inf,
        fills_idle=False,
        bucket=0,
        prompt_tokens=None,
    )
