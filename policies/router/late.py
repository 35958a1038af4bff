"""Which of the late requests starts, once promises can't be kept any more: that of whose prompt a replica saves most.

By age alone sessions come round one after the other: when one is back, others have taken its place in the cache, and
all prompts are read again. What is cached makes room for all the sooner the sooner it is used. No paper of the five
treats late requests. One start in ten goes by age all the same (`policies.router.order.is_owed_a_start`), so that none
is passed over for longer than its patience and ten starts for each that is older.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from policies.router.ledger import Replica
from policies.router.tickets import Ticket

T = TypeVar("T")

OLDEST, NEWEST = 4, 12
"""How many of the late tickets are compared: a Lua script loads each of them. Those whose sessions are in the cache yet
came last."""


class Saving(NamedTuple):
    """Attributes:
    place: of the ticket among those compared.
    replica: where it starts.
    saved_s: seconds in which that would read what it has cached of the prompt.
    """

    place: int
    replica: Replica
    saved_s: float


def looked_at(late: Sequence[T]) -> Sequence[T]:
    """Of all late ones, the oldest first, those that are compared, in the same order."""
    return late if len(late) <= OLDEST + NEWEST else [*late[:OLDEST], *late[-NEWEST:]]


def most_saved(tickets: Sequence[Ticket], replicas: Sequence[Replica]) -> Saving | None:
    """Each ticket belongs where its first token would come soonest, behind those before it, whether it may start there
    now or only when prompts have been read:

        own = argmin over replicas of (unread tokens + those of earlier tickets there + its own) * pace

    of equal ones where the least work is, then the first; one that its router can't reach comes last. It starts there
    or not at all, as long as that replica has room: elsewhere its prompt would be read again, though its own replica
    comes to it before.

    Args:
        tickets: late ones, the oldest first; of equal savings the oldest starts.
        replicas: that have room for them.

    Returns:
        None where no ticket may start at its own replica.
    """
    unread = [replica.unread_tokens for replica in replicas]
    best: Saving | None = None
    for index, ticket in enumerate(tickets):
        own = min(range(len(replicas)), key=lambda each: _order(ticket, replicas[each], unread[each]), default=None)
        if own is None:
            return None
        replica = replicas[own]
        unread[own] += ticket.unread_at(replica.replica_id)
        if not replica.takes_singles or replica.has_prompts_to_read:
            continue
        saved_s = (ticket.unread_tokens - ticket.unread_at(replica.replica_id)) * replica.pace_s(ticket)
        if best is None or saved_s > best.saved_s:
            best = Saving(index, replica, saved_s)
    return best


def _order(ticket: Ticket, replica: Replica, unread_tokens: int) -> tuple[bool, float, float]:
    replica_id = replica.replica_id
    seconds = (unread_tokens + ticket.unread_at(replica_id)) * replica.pace_s(ticket)
    return replica_id in ticket.avoids, seconds, replica.work_s
