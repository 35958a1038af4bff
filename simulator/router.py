"""A router: bins, order and placement by the policies, credit by the engines' slots.

It does what the live router's dispatch does: while something waits and a replica has credit, the request with the
lowest key goes where the placement says. Requests whose class no replica with credit serves stay, and do not hold up
the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf

from policies.checks import require_at_least, require_positive
from policies.engine.promised_queue import PromisedQueue, Rank, Waiting
from policies.router.autoscale import FleetState
from policies.router.credit import late_uncounted, lookahead
from policies.router.multi_bin import MultiBin
from policies.router.order import Order
from policies.router.placement import LeastOutstandingWork, LeastOutstandingWorkConfig, Placement
from policies.types import ReplicaView, StepTimes
from simulator.core import Event
from simulator.engine import Engine
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
        promises: whether requests go by their promises, those that cannot be in time behind; else by the order's key.

    Raises:
        ConfigError: a value is out of bounds.
    """

    credit_lookahead: int | None = 0
    credit_s: float | None = None
    class_by_bin: bool = False
    class_names: tuple[str, ...] = ()
    promises: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, self, "credit_lookahead")
        require_positive(self, "credit_s")


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
            waiting_s=sum(one.item.work_s for queue in self._queues.values() for one in queue),
        )

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
            self._enqueue(request)
        return self._dispatch(now_s)

    def arrive(self, request: Request, now_s: float) -> list[Event]:
        if self._bins is not None:
            bin_index = self._bins.assign(request.predicted_output_tokens, slo_class=request.slo_class)
            if self.config.class_by_bin:
                request.class_index = bin_index
        if self._class_index:
            request.class_index = self._class_index.get(request.slo_class or "", 0)
        self._enqueue(request)
        return self._dispatch(now_s)

    def _enqueue(self, request: Request) -> None:
        request.work_s = self._work.request_work_s(self._empty_view, request.view())
        request.key = self._order.key(request.arrival_s, request.slo_class, request.work_s, request.prompt_tokens)
        queue = self._queues.setdefault(request.slo_class, PromisedQueue())
        promised = self.config.promises
        unread_tokens = request.view().prefill_tokens
        deadline_s = request.deadline_s if promised else inf
        queue.add(Waiting(request, arrival_s=request.key, deadline_s=deadline_s, unread_tokens=unread_tokens))
        self.waiting += 1

    def _dispatch(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self.waiting and (placed := self._place(now_s)):
            request, replica_id = placed
            engine = self._engines[replica_id]
            events += engine.submit(request, now_s) if engine.takes_more() else self._refuse(request, now_s)
        return events

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
            replica_id = self._placement.choose(self._offering(head), head.item.view())
            if replica_id is not None:
                queue.pop()
                self.waiting -= 1
                self._put_on(head.item, replica_id)
                return head.item, replica_id
        return None

    def _put_late_behind(self, now_s: float) -> None:
        """Heads that no replica could read in time."""
        paces = [pace for each in self._views if (pace := self._engines[each].seconds_per_prompt_token)]
        for queue in self._queues.values():
            while queue and (head := queue.head()).rank is Rank.IN_TIME:
                if now_s + head.unread_tokens * min(paces, default=0.0) <= head.deadline_s:
                    break
                queue.put_behind()

    def _offering(self, head: Waiting[Request]) -> list[ReplicaView]:
        """Replicas with what they offer to this request."""
        if self.config.credit_s is None:
            return list(self._views.values())
        late = head.rank is Rank.LATE
        return [replace(view, credit=self._credit(self._engines[each], late)) for each, view in self._views.items()]

    def _credit(self, engine: Engine, late: bool) -> int:
        """Requests that an engine takes beside those that it holds. A late one only where nothing is to be read; those
        that wait there stand in nobody's way."""
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
