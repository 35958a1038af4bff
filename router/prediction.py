"""What is predicted of a request as it is queued, by what replicas said last."""

from collections.abc import Mapping

from policies.router.explanation import Foreseen
from policies.router.tickets import Ticket
from router.state_store import ReplicaLoad


def foreseen(ticket: Ticket, wait_s: float, replica_id: str | None, loads: Mapping[str, ReplicaLoad]) -> Foreseen:
    """Args:
    wait_s: until its turn, as the store predicts it.
    replica_id: that started it at once; None where it waits.
    loads: of the replicas that serve its class.
    """
    own_s = {each: ticket.step_s + load.reads_s(ticket, ticket.unread_at(each)) for each, load in loads.items()}
    now_s = {each: own_s[each] + load.reads_s(ticket, load.unread_tokens) for each, load in loads.items()}
    with_slots = [now_s[each] for each, load in loads.items() if load.credit and each != replica_id]
    return Foreseen(
        wait_s=wait_s,
        reading_s=now_s[replica_id]
        if replica_id is not None and replica_id in loads
        else min(own_s.values(), default=0.0),
        elsewhere_s=min(with_slots, default=None),
        replicas=len(loads),
    )
