"""A router: bins, order and placement by the policies, credit by the engines' slots.

It does what the live router's dispatch does: while something waits and a replica has credit, the request with the
lowest key goes where the placement says. Requests whose class no replica with credit serves stay, and do not hold up
the others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Literal

from policies.checks import require_at_least
from policies.router.autoscale import FleetState
from policies.router.multi_bin import MultiBin
from policies.router.order import Order
from policies.router.placement import LeastOutstandingWork, LeastOutstandingWorkConfig, Placement
from policies.types import ReplicaView, StepTimes
from simulator.core import Event
from simulator.engine import Engine
from simulator.requests import Request

HEARTBEAT_S = 1.0  # as live: `router.routed_client.RoutedClientConfig`
_Queue = list[tuple[float, int, int, Request]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How requests are handed out.

    Attributes:
        credit_lookahead: requests a replica is given beyond what it offers; None sets no limit, so that nothing waits
            in the router (a plain load balancer).
        credit: what a replica offers: all its slots, or those that its policy would fill as things stand, asked for
            with every heartbeat.
        class_by_bin: whether the engines' policies tell requests apart by their bin.
        class_names: service classes that they tell apart otherwise, from index 1; 0 is for all others.

    Raises:
        ConfigError: a value is out of bounds.
    """

    credit_lookahead: int | None = 0
    credit: Literal["slots", "admitted"] = "slots"
    class_by_bin: bool = False
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_at_least(0, self, "credit_lookahead")


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
        self._queues: dict[str | None, _Queue] = {}
        self._sequence = 0
        self._class_index = {name: index for index, name in enumerate(config.class_names, start=1)}
        self._offered: dict[str, int] = {}
        self._asked_s: dict[str, float] = {}

    def state(self) -> FleetState:
        """What scaling goes by; replicas that are leaving do not count, nor what runs there."""
        here = [self._engines[replica_id] for replica_id in self._views]
        return FleetState(
            replicas=len(here),
            slots=sum(engine.config.slots for engine in here),
            running=sum(engine.holds for engine in here),
            waiting=self.waiting,
            waiting_s=sum(entry[-1].work_s for queue in self._queues.values() for entry in queue),
        )

    def join(self, engine: Engine, now_s: float, slo_classes: frozenset[str] | None = None) -> list[Event]:
        """A replica offers its slots from now on."""
        ahead = self.config.credit_lookahead
        self._engines[engine.replica_id] = engine
        self._offered[engine.replica_id], self._asked_s[engine.replica_id] = engine.config.slots, now_s
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
        self._ask_again(now_s)
        self._enqueue(request)
        return self._dispatch(now_s)

    def _enqueue(self, request: Request) -> None:
        request.work_s = self._work.request_work_s(self._empty_view, request.view())
        request.key = self._order.key(request.arrival_s, request.slo_class, request.work_s, request.prompt_tokens)
        self._sequence += 1
        queue = self._queues.setdefault(request.slo_class, [])
        heappush(queue, (request.key, request.class_index, self._sequence, request))
        self.waiting += 1

    def _ask_again(self, now_s: float) -> None:
        """What replicas offer, of those whose last heartbeat is over."""
        if self.config.credit == "slots":
            return
        for replica_id, view in self._views.items():
            if now_s - self._asked_s[replica_id] >= HEARTBEAT_S:
                offered = self._engines[replica_id].offered(now_s)
                more, self._offered[replica_id] = offered - self._offered[replica_id], offered
                self._views[replica_id] = replace(view, credit=view.credit + more)
                self._asked_s[replica_id] = now_s

    def _dispatch(self, now_s: float) -> list[Event]:
        events: list[Event] = []
        while self.waiting and (placed := self._place()):
            request, replica_id = placed
            engine = self._engines[replica_id]
            events += engine.submit(request, now_s) if engine.takes_more() else self._refuse(request, now_s)
        return events

    def _refuse(self, request: Request, now_s: float) -> Iterable[Event]:
        """The engine that it was given to has too many: the client is told so, and the slot is free again."""
        request.refused = True
        self._give_back(str(request.replica_id), 1, request.work_s)
        return self._on_refused(request, now_s)

    def _place(self) -> tuple[Request, str] | None:
        """Take the lowest key that some replica with credit serves."""
        for queue in sorted((queue for queue in self._queues.values() if queue), key=lambda queue: queue[0][:3]):
            request = queue[0][-1]
            replica_id = self._placement.choose(list(self._views.values()), request.view())
            if replica_id is not None:
                heappop(queue)
                self.waiting -= 1
                self._put_on(request, replica_id)
                return request, replica_id
        return None

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
        self._ask_again(now_s)
        return self._dispatch(now_s)

    def _give_back(self, replica_id: str, count: int, work_s: float) -> None:
        view = self._views.get(replica_id)
        if view is not None:
            left_s = max(0.0, view.outstanding_s - work_s)
            self._views[replica_id] = replace(view, credit=view.credit + count, outstanding_s=left_s)
