"""A router of the simulator: a translator to the dispatcher that serves.

Requests become tickets as `router.classifier` writes them, and what an engine holds becomes the credit and the reading
that its relay would tell. `policies.router.dispatcher` decides. Departures from the live system: replicas tell whenever
something is to be decided, not at heartbeats, and what they tell is true at once.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from policies.checks import require_at_least, require_positive
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.router.admission import NO_LIMITS, ClassLimits, Refusal
from policies.router.autoscale import FleetState
from policies.router.completion import Due, MeanCost, due
from policies.router.credit import late_uncounted, lookahead, max_unread_tokens
from policies.router.dispatcher import Dispatcher
from policies.router.ledger import Place
from policies.router.multi_bin import MultiBin
from policies.router.order import Band, IdleOrder, Order, banded, deadline_keys
from policies.router.placement import Placement, soonest_first_token, work_s
from policies.router.tickets import Reading, ReplicaTerms, Ticket
from policies.types import StepTimes
from simulator.core import Event, Kind
from simulator.engine import Engine
from simulator.requests import Request
from simulator.scale_need import ScaleNeed

_UNLIMITED_SLOTS = 1 << 40
# As live routers take by default for the work of a request (`work` in the configuration).
_DEFAULT_OUTPUT_TOKENS = 256.0
SHARED_BATCH_SIZE = 32
_SHORT_OF_PREDICTED = 0.5  # as live routers take it without quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are handed out.

    Attributes:
        credit_lookahead: requests a replica is given beyond what it offers; None sets no limit, so that nothing waits
            in the router (a plain load balancer).
        credit_s: a replica is given requests while the prompts in time that it has not read take less than this; None
            is any number.
        class_by_bin: whether the engines' policies tell requests apart by their bin.
        class_names: service classes that they tell apart otherwise, from index 1; 0 is for all others.
        fills_idle: the classes that take what others leave, and their orders.
        max_recalls: how often one request of these may lose its slot to a more urgent one.
        late_patience_s: after which a request behind those in time is owed a start.
        limits: how much of a class may wait; without any, all of it.
        batches: idle replicas take whole batches of one bin and class, formed in this way (paper 000); None gives out
            single requests.
        rolling_size: of the rolling batches of one bin and class that replicas take; 1 gives out each request as it
            comes.
        foresees: each request's first token is predicted as it comes, as it is live; with scaling by promises always.

    Raises:
        ConfigError: a value is out of bounds; batches would wait for ever, or go with what is of single requests.
    """

    credit_lookahead: int | None = 0
    credit_s: float | None = None
    class_by_bin: bool = False
    class_names: tuple[str, ...] = ()
    fills_idle: Mapping[str, IdleOrder] = field(default_factory=dict)
    max_recalls: int = 3
    late_patience_s: float = 60.0
    limits: Mapping[str, ClassLimits] = field(default_factory=dict)
    batches: GangConfig | None = None
    rolling_size: int = 1
    foresees: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, self, "credit_lookahead", "max_recalls", "late_patience_s")
        require_at_least(1, self, "rolling_size")
        require_positive(self, "credit_s")
        if self.batches is None:
            return
        if self.batches.max_wait_s == math.inf:
            raise ConfigError("batches.max_wait_s must be finite: the last requests would wait for ever")
        if self.credit_s is not None or self.credit_lookahead != 0 or self.rolling_size > 1:
            raise ConfigError("credit_s, credit_lookahead and rolling_size are of single requests, and batches is set")

    def terms(self, slo_classes: frozenset[str] | None) -> ReplicaTerms:
        """The terms of a replica that is reserved for these classes."""
        classes = tuple(sorted(slo_classes or ()))
        if self.batches is None:
            return ReplicaTerms(classes=classes, rolling_size=self.rolling_size)
        max_wait_s, patience_s = self.batches.max_wait_s, self.batches.patience_s
        return ReplicaTerms(classes=classes, gang_max_wait_s=max_wait_s, gang_patience_s=patience_s)


class Router:
    """Queues and hands out requests.

    Args:
        order: None goes by what each request is promised.
        on_refused: is told of a request that no engine had room for, or that might not wait.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        order: Order | None,
        step_times: StepTimes,
        placement: Placement = soonest_first_token,
        bins: MultiBin | None = None,
        on_refused: Callable[[Request, float], Iterable[Event]] = lambda request, now_s: (),
    ) -> None:
        self.config = config
        self._order, self._step_times, self._bins = order, step_times, bins
        self._on_refused = on_refused
        self._dispatcher = Dispatcher(placement)
        self._lanes = self._dispatcher.lanes
        self._engines: dict[str, Engine] = {}
        self._leaving: set[str] = set()
        self._numbers = count()
        self._ids: dict[Request, str] = {}  # of tickets, in order of arrival
        self._requests: dict[str, Request] = {}
        self._recalls: dict[Request, int] = {}
        self._edges = () if bins is None else bins.edges
        self._timers: list[Event] = []
        self._costs = MeanCost()
        self._class_index = {name: index for index, name in enumerate(config.class_names, start=1)}
        self.need: ScaleNeed | None = None  # where replicas are scaled by promises

    def state(self) -> FleetState:
        """What scaling goes by; replicas that are leaving do not count, nor what runs there."""
        here = [engine for engine in self._engines.values() if engine.replica_id not in self._leaving]
        return FleetState(
            replicas=len(here),
            slots=sum(engine.config.slots for engine in here),
            running=sum(engine.holds for engine in here),
            waiting=self.waiting,
            waiting_s=sum(self._lanes.ahead_s.values()),
        )

    @property
    def waiting(self) -> int:
        return sum(self._lanes.waiting.values())

    def waiting_of(self, slo_class: str) -> int:
        return self._lanes.waiting[slo_class]

    def holds(self, replica_id: str) -> int:
        """Requests that a replica has and has not ended."""
        return self._engines[replica_id].holds

    def join(self, engine: Engine, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Event]:
        """A replica offers its slots from now on."""
        self._engines[engine.replica_id] = engine
        self._dispatcher.register(engine.replica_id, self.config.terms(slo_classes), self._slots(engine), now_s)
        return self._dispatch(now_s)

    def leave(self, replica_id: str) -> None:
        """Give a replica nothing more; what it holds it ends."""
        self._leaving.add(replica_id)
        self._dispatcher.offer(replica_id, 0)

    def lose(self, replica_id: str, now_s: float) -> list[Event]:
        """A replica is gone; what it held waits again, with the tokens that were sent."""
        self._dispatcher.drop(replica_id)
        for request in self._engines.pop(replica_id).stop():
            request.moves += 1
            self._queue_again(request, now_s)
        return self._dispatch(now_s)

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        self._ids[request] = ticket_id = f"{next(self._numbers):09}"
        self._requests[ticket_id] = request
        ticket = self._ticket(request)
        if self.config.class_by_bin:
            request.class_index = ticket.bin_index
        if self._class_index:
            request.class_index = self._class_index.get(ticket.slo_class, 0)
        if self._may_not_wait(ticket, now_s):
            return [*self._refuse(request, now_s)]
        if self.config.foresees or self.need is not None:
            self._foresee(request, ticket, now_s)
        self._dispatcher.queue(ticket, now_s)
        if self.config.batches is not None:
            # The next number, for of the rounded sum less now_s may be left a little less than max_wait_s.
            due_s = math.nextafter(now_s + self.config.batches.max_wait_s, math.inf)
            self._timers.append(Event(due_s, Kind.TIMER, self._dispatch))
        return self._dispatch(now_s)

    def _may_not_wait(self, ticket: Ticket, now_s: float) -> bool:
        limits, spare_s = self.config.limits.get(ticket.slo_class), math.inf
        if limits is None:
            return False
        self._tell_offers(now_s)
        if ticket.deadline_s is not None:
            replicas = self._dispatcher.ledger.replicas.values()
            least_reading_s = min((replica.reading_s(ticket) for replica in replicas), default=0.0)
            spare_s = ticket.deadline_s - now_s - least_reading_s
        asked = limits.of(spare_s, has_key=bool(ticket.api_key))
        return isinstance(self._dispatcher.foreseen(ticket, asked, now_s), Refusal)

    def _foresee(self, request: Request, ticket: Ticket, now_s: float) -> None:
        self._tell_offers(now_s)
        foreseen = self._dispatcher.foreseen(ticket, NO_LIMITS, now_s)
        assert not isinstance(foreseen, Refusal), "without limits everything may wait"
        request.foreseen_ttft_s = foreseen.first_token_s
        if self.need is not None:
            self.need.queued(request, ticket, now_s)

    def _queue_again(self, request: Request, now_s: float) -> None:
        """Under its old key, or before all others if its client has a part of the answer."""
        ticket = replace(self._ticket(request), arrival_s=None)
        if request.generated_tokens and ticket.late_key is not None and not ticket.fills_idle:
            ticket = replace(ticket, deadline_key=banded(Band.RESUMED, request.arrival_s), late_key=None)
        self._dispatcher.queue(ticket, now_s)

    def _ticket(self, request: Request) -> Ticket:
        slo_class, view, times = request.slo_class or "", request.view(), self._step_times
        order = self.config.fills_idle.get(slo_class)
        request.fills_idle = order is not None
        bin_index = 0
        if self._bins is not None:
            bin_index = self._bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
        prefixes = self._prefixes(request)
        seen = view._replace(cached_tokens=max((tokens for _, tokens in prefixes), default=view.cached_tokens))
        answer = request.predicted_output_tokens
        left = (_DEFAULT_OUTPUT_TOKENS if answer is None else answer) - request.generated_tokens
        work = work_s(seen, times, output_tokens=max(1.0, left), shared_batch_size=SHARED_BATCH_SIZE)
        due = self._due(request, work)
        key, late_key = self._keys(request, order, work, due.due_s)
        return Ticket(
            request_id=self._ids[request],
            bin_index=bin_index,
            deadline_key=key,
            late_key=late_key,
            work_s=work,
            router_id="",
            slo_class=slo_class,
            arrival_s=request.arrival_s,
            deadline_s=None if request.fills_idle else due.starts_by_s,
            unread_tokens=view.prompt_tokens + view.output_tokens - (0 if request.session else request.prefix_tokens),
            prefixes=prefixes,
            prompt_token_s=times.prefill.prefill_s,
            step_s=times.decode.overhead_s,
            predicted_output_tokens=request.predicted_output_tokens,
            fills_idle=request.fills_idle,
            recallable=request.fills_idle and self._recalls.get(request, 0) < self.config.max_recalls,
            api_key=request.api_key,
        )

    def _due(self, request: Request, work: float) -> Due:
        promise, times = request.promised(), self._step_times
        if promise.e2e_s is None:
            return due(request.arrival_s, promise)
        # Replicas know better which answers may be short: they judge it anew.
        short = _SHORT_OF_PREDICTED * (request.predicted_output_tokens or 0.0)
        step_s = times.decode.step_s(decode_requests=SHARED_BATCH_SIZE, kv_tokens=0)
        return due(request.arrival_s, promise, relative_cost=self._costs.relative(work), short_s=short * step_s)

    def _keys(
        self, request: Request, fills_idle: IdleOrder | None, work: float, due_s: float | None
    ) -> tuple[float, float | None]:
        if self._order is not None:
            return self._order.key(request.arrival_s, request.slo_class, work, request.prompt_tokens), None
        return deadline_keys(
            request.arrival_s,
            request.promised().ttft_s,
            due_s=due_s,
            fills_idle=fills_idle,
            prompt_tokens=request.prompt_tokens,
            late_patience_s=self.config.late_patience_s,
        )

    def _prefixes(self, request: Request) -> tuple[tuple[str, int], ...]:
        """Leading tokens of its prompt that replicas hold; the last token is read in any case."""
        if request.session is None:
            return ()
        prompt_token_s = self._step_times.prefill.prefill_s
        known = ((each, engine.spared_tokens(request, prompt_token_s)) for each, engine in self._engines.items())
        return tuple((each, min(tokens, request.prompt_tokens - 1)) for each, tokens in known if tokens)

    # Carrying out what is decided

    def _dispatch(self, now_s: float) -> list[Event]:
        events, self._timers = self._timers, []
        self._dispatcher.turns.note_time(now_s)
        if not self._lanes:
            return events
        self._tell_offers(now_s)
        started, recalled = self._dispatcher.dispatch(now_s)
        for ticket in recalled:
            place = self._dispatcher.places[ticket.request_id]
            self._engines[place.replica_id].recall(self._requests[ticket.request_id])
        for place in started:
            events += self._submit(place, now_s)
        return events

    def _submit(self, place: Place, now_s: float) -> Iterable[Event]:
        request, engine = self._requests[place.ticket.request_id], self._engines[place.replica_id]
        request.replica_id = engine.replica_id
        if engine.takes_more():
            return engine.submit(request, now_s)
        events = [*self._refuse(request, now_s)]
        return [*events, Event(now_s, Kind.TIMER, self._dispatch)] if self._lanes else events  # its slot is free

    def _refuse(self, request: Request, now_s: float) -> Iterable[Event]:
        """Its client is told so; if it had a slot, that is free again."""
        request.refused = True
        self._forget(request)
        return self._on_refused(request, now_s)

    def _forget(self, request: Request) -> None:
        ticket_id = self._ids.pop(request)
        del self._requests[ticket_id]
        self._recalls.pop(request, None)
        self._dispatcher.forget(ticket_id)

    def _tell_offers(self, now_s: float) -> None:
        """As relays do."""
        for replica_id, engine in self._engines.items():
            if replica_id not in self._leaving:
                self._dispatcher.offer(replica_id, self._slots(engine), self._reading(engine, now_s))

    def _slots(self, engine: Engine) -> int:
        """Requests that an engine takes in all. Late ones that wait there stand in no other's way."""
        slots, ahead = engine.config.slots, self.config.credit_lookahead
        if self.config.batches is not None:
            return self.config.batches.batch_size
        if ahead is None:
            return _UNLIMITED_SLOTS
        if self.config.credit_s is None:
            return slots + ahead
        more = lookahead(slots) if self.config.rolling_size == 1 else 0  # a rolling batch waits for slots in the router
        return int(min(slots, engine.memory.requests)) + more + late_uncounted(engine.late, slots)

    def _reading(self, engine: Engine, now_s: float) -> Reading:
        replica, pace_s = self._dispatcher.ledger.replicas[engine.replica_id], engine.seconds_per_prompt_token
        return Reading(
            known_tokens=replica.given_tokens - engine.in_time_tokens,
            max_unread_tokens=max_unread_tokens(self.config.credit_s, pace_s),
            prompt_token_s=pace_s,
            return_chance=engine.return_chance(now_s),
        )

    def finished(self, now_s: float, engine: Engine, requests: Iterable[Request]) -> list[Event]:
        """A replica ended requests, read prompts, or gave slots back that were called back."""
        replica = self._dispatcher.ledger.replicas.get(engine.replica_id)
        for request in engine.take_read():
            if replica is not None and request in self._ids:
                replica.note_read(self._ids[request])
        for request in requests:
            if self.need is not None:
                self.need.ended(request, now_s)
            self._forget(request)
            if self._bins is not None:
                self._bins.observe(request.output_tokens, slo_class=request.slo_class)
        for request in engine.take_recalled():
            self._recalls[request] = self._recalls.get(request, 0) + 1
            self._dispatcher.forget(self._ids[request])
            self._queue_again(request, now_s)
        if self._bins is not None and self._bins.edges != self._edges:
            self._edges = self._bins.edges
            self._dispatcher.rebin(self._edges, ())
        return self._dispatch(now_s)
