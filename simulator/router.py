"""A router: bins, order and placement by the policies, credit by the engines' slots.

It does what the live router's dispatch does: while something waits and a replica has credit, the request with the
lowest key goes where the placement says. Requests whose class no replica with credit serves stay, and do not hold up
the others. `BatchRouter` gives replicas that are idle whole batches.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

from policies.checks import require_at_least, require_positive
from policies.engine.promised_queue import PromisedQueue, Waiting
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.router.autoscale import FleetState
from policies.router.credit import late_uncounted, lookahead
from policies.router.multi_bin import MultiBin
from policies.router.order import Band, IdleOrder, Order, deadline_keys
from policies.router.placement import LeastOutstandingWork, LeastOutstandingWorkConfig, Placement
from policies.types import ReplicaView, StepTimes
from simulator.core import Event, Kind
from simulator.engine import Engine
from simulator.gang import Lanes
from simulator.requests import Request


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
        fills_idle: the classes that take what others leave, and their orders; what runs goes on, for no slot is called
            back here.
        promises: whether requests go by their promises, those that cannot be in time behind; else by the order's key.
        batches: idle replicas take whole batches of one bin and class, formed in this way (paper 000); None gives out
            single requests.

    Raises:
        ConfigError: a value is out of bounds; batches would wait for ever, or go with what is of single requests.
    """

    credit_lookahead: int | None = 0
    credit_s: float | None = None
    class_by_bin: bool = False
    class_names: tuple[str, ...] = ()
    fills_idle: Mapping[str, IdleOrder] = field(default_factory=dict)
    promises: bool = False
    batches: GangConfig | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "credit_lookahead")
        require_positive(self, "credit_s")
        if self.batches is None:
            return
        if self.batches.max_wait_s == inf:
            raise ConfigError("batches.max_wait_s must be finite: the last requests would wait for ever")
        if self.promises or self.credit_s is not None or self.credit_lookahead != 0:
            raise ConfigError("promises, credit_s and credit_lookahead are of single requests, and batches is set")


class Router:
    """Queues and hands out requests, and keeps the books of what each replica holds."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        order: Order,
        placement: Placement,
        step_times: StepTimes,
        bins: MultiBin | None = None,
        on_refused: Callable[[Request, float], Iterable[Event]] = lambda request, now_s: (),
    ) -> None:
        self.config = config
        self.waiting = 0
        self._order, self._placement, self._bins = order, placement, bins
        self._on_refused = on_refused
        self._work = LeastOutstandingWork(LeastOutstandingWorkConfig())
        self._empty_view = ReplicaView(replica_id="", credit=0, step_times=step_times)
        self._engines: dict[str, Engine] = {}
        self._views: dict[str, ReplicaView] = {}
        self._queues: dict[str | None, PromisedQueue[Request]] = {}
        self._class_index = {name: index for index, name in enumerate(config.class_names, start=1)}

    def state(self) -> FleetState:
        """What scaling goes by; replicas that are leaving do not count, nor what runs there."""
        here = [self._engines[replica_id] for replica_id in self._views]
        return FleetState(
            replicas=len(here),
            slots=sum(engine.config.slots for engine in here),
            running=sum(engine.holds for engine in here),
            waiting=self.waiting,
            waiting_s=sum(request.work_s for request in self._that_wait()),
        )

    def _that_wait(self) -> Iterable[Request]:
        return (one.item for queue in self._queues.values() for one in queue)

    def waiting_of(self, slo_class: str) -> int:
        return len(self._queues.get(slo_class, ()))

    def join(self, engine: Engine, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Event]:
        """A replica offers its slots from now on."""
        ahead = self.config.credit_lookahead
        self._engines[engine.replica_id] = engine
        self._views[engine.replica_id] = replace(
            self._empty_view,
            replica_id=engine.replica_id,
            credit=1 << 40 if ahead is None else engine.config.slots + ahead,
            slo_classes=slo_classes,
        )
        return self._dispatch(now_s)

    def leave(self, replica_id: str) -> None:
        """Give a replica nothing more; what it holds it ends."""
        self._views.pop(replica_id, None)

    def lose(self, replica_id: str, now_s: float) -> list[Event]:
        """A replica is gone; what it held waits again, with the tokens that were sent."""
        self.leave(replica_id)
        for request in self._engines.pop(replica_id).stop():
            request.moves += 1
            self._enqueue(request, now_s)
        return self._dispatch(now_s)

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        if self._bins is not None:
            bin_index = self._bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
            if self.config.class_by_bin:
                request.class_index = bin_index
        if self._class_index:
            request.class_index = self._class_index.get(request.slo_class or "", 0)
        self._enqueue(request, now_s)
        return self._dispatch(now_s)

    def _enqueue(self, request: Request, now_s: float) -> None:
        request.work_s = self._work.request_work_s(self._empty_view, request.view())
        request.key = self._key(request)
        self.waiting += 1
        self._wait(request, now_s)

    def _wait(self, request: Request, now_s: float) -> None:
        queue = self._queues.setdefault(request.slo_class, PromisedQueue())
        queue.add(
            Waiting(
                request,
                arrival_s=request.key,
                deadline_s=request.deadline_s if self.config.promises else inf,
                unread_tokens=request.view().prefill_tokens,
                fills_idle=request.fills_idle,
            )
        )

    def _key(self, request: Request) -> float:
        order = self.config.fills_idle.get(request.slo_class or "")
        request.fills_idle = order is not None
        if order is None:
            return self._order.key(request.arrival_s, request.slo_class, request.work_s, request.prompt_tokens)
        ttft_s = request.promised_ttft_s if isfinite(request.promised_ttft_s) else None
        return deadline_keys(request.arrival_s, ttft_s, fills_idle=order, prompt_tokens=request.prompt_tokens).key

    def _dispatch(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self.waiting and (placed := self._place(now_s)):
            events += self._submit(*placed, now_s)
        return events

    def _submit(self, request: Request, replica_id: str, now_s: float) -> Iterable[Event]:
        self._put_on(request, replica_id)
        self.waiting -= 1
        engine = self._engines[replica_id]
        return engine.submit(request, now_s) if engine.takes_more() else self._refuse(request, now_s)

    def _refuse(self, request: Request, now_s: float) -> Iterable[Event]:
        """The engine that it was given to has too many: the client is told so, and the slot is free again."""
        request.refused = True
        self._give_back(str(request.replica_id), 1, request.work_s)
        return self._on_refused(request, now_s)

    def _place(self, now_s: float) -> tuple[Request, str] | None:
        """Take the first that some replica with credit serves."""
        if self.config.promises:
            self._put_late_behind(now_s)
        for queue in sorted((queue for queue in self._queues.values() if queue), key=lambda queue: queue.head().order):
            head = queue.head()
            replica_id = self._placement.choose(self._offering(head), head.item.view(), self._hits(head.item))
            if replica_id is not None:
                queue.pop()
                return head.item, replica_id
        return None

    def _put_late_behind(self, now_s: float) -> None:
        """Heads that no replica could read in time."""
        paces = [pace for each in self._views if (pace := self._engines[each].seconds_per_prompt_token)]
        for queue in self._queues.values():
            while queue and (head := queue.head()).band is Band.IN_TIME:
                held = max(self._hits(head.item).values(), default=0)
                if now_s + (head.unread_tokens - held) * min(paces, default=0.0) <= head.deadline_s:
                    break
                queue.put_behind()

    def _offering(self, head: Waiting[Request]) -> list[ReplicaView]:
        """Replicas with what they offer to this request."""
        late = head.band is Band.LATE
        return [self._offer(self._engines[each], view, late) for each, view in self._views.items()]

    def _offer(self, engine: Engine, view: ReplicaView, late: bool) -> ReplicaView:
        credit = view.credit if self.config.credit_s is None else self._credit(engine, late)
        return replace(
            view,
            credit=credit,
            unread_tokens=engine.unread_tokens,
            unread_prompts=engine.unread_prompts,
            prompt_token_s=engine.seconds_per_prompt_token,
        )

    def _hits(self, request: Request) -> dict[str, int]:
        """Leading tokens of its prompt that replicas hold, by replica."""
        return {each: self._engines[each].known_tokens(request) for each in self._views}

    def _credit(self, engine: Engine, late: bool) -> int:
        """Requests that an engine takes beside those that it holds. A late one only where nothing is to be read; those
        that wait there stand in no other's way."""
        pace, slots, unread = engine.seconds_per_prompt_token, engine.config.slots, engine.in_time_tokens
        has_enough = pace is not None and pace * unread >= (self.config.credit_s or 0.0)
        if has_enough or (late and unread):
            return 0
        offered = int(min(slots, engine.memory.requests)) + lookahead(slots)
        return offered + late_uncounted(engine.late, slots) - engine.holds

    def _put_on(self, request: Request, replica_id: str) -> None:
        view = self._views[replica_id]
        request.replica_id = replica_id
        outstanding_s = view.outstanding_s + request.work_s
        self._views[replica_id] = replace(view, credit=view.credit - 1, outstanding_s=outstanding_s)

    def finished(self, now_s: float, engine: Engine, requests: Iterable[Request]) -> list[Event]:
        """A replica ended requests: their slots and work are free again."""
        work_s, count = 0.0, 0
        for request in requests:
            work_s += request.work_s
            count += 1
            if self._bins is not None:
                self._bins.observe(request.output_tokens, slo_class=request.slo_class)
        self._give_back(engine.replica_id, count, work_s)
        return self._dispatch(now_s)

    def _give_back(self, replica_id: str, count: int, work_s: float) -> None:
        view = self._views.get(replica_id)
        if view is not None:
            left_s = max(0.0, view.outstanding_s - work_s)
            self._views[replica_id] = replace(view, credit=view.credit + count, outstanding_s=left_s)


class BatchRouter(Router):
    """Gives every idle replica a whole batch of one bin and class, when one is formed (`policies.gang.batches`)."""

    def __init__(self, config: RouterConfig, batches: GangConfig, **others: Any) -> None:
        super().__init__(config, **others)
        self._lanes = Lanes(batches)
        self._timers: list[Event] = []

    def _that_wait(self) -> Iterable[Request]:
        return self._lanes

    def _wait(self, request: Request, now_s: float) -> None:
        bins, slo_class = self._bins, request.slo_class
        index = 0 if bins is None else bins.assign(request.predicted_output_tokens, slo_class=slo_class)
        due_s = self._lanes.add(request, index, request.key, now_s, slo_class or "")
        self._timers.append(Event(due_s, Kind.TIMER, self._dispatch))

    def _dispatch(self, now_s: float) -> list[Event]:
        events, self._timers = self._timers, []
        for replica_id, view in self._views.items():
            if not self._engines[replica_id].holds:
                for request in self._lanes.take(now_s, view.slo_classes):
                    events += self._submit(request, replica_id, now_s)
        return events
