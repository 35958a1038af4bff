"""What a router of the simulator knows for scaling by promises, as `router.scale_need` does."""

from math import inf

from policies.router.promised_scale import Ratios
from policies.router.tickets import Ticket
from simulator.requests import Request


class ScaleNeed:
    """Attributes:
    arrived_s: predicted seconds of all work that came.
    """

    def __init__(self) -> None:
        self.ratios, self.arrived_s = Ratios(), 0.0

    def queued(self, request: Request, ticket: Ticket, now_s: float) -> None:
        """Once its first token is predicted. What takes what others leave needs no replica."""
        if ticket.fills_idle:
            return
        self.arrived_s += ticket.work_s
        if request.promised_ttft_s < inf and request.foreseen_ttft_s is not None:
            self.ratios.note(now_s, ticket.slo_class, "ttft_s", request.foreseen_ttft_s / request.promised_ttft_s)

    def ended(self, request: Request, now_s: float) -> None:
        took = {
            "tpot_s": (request.tpot_s, request.promised_tpot_s),
            "e2e_s": (request.latency_s, request.promised_e2e_s),
        }
        for kind, (seconds, promised_s) in took.items():
            if seconds is not None and promised_s < inf:
                self.ratios.note(now_s, request.slo_class or "", kind, seconds / promised_s)
