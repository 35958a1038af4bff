"""Which slots of a replica are to be given back to the shared state.

The shared state counts a slot of this replica for every request that it assigned here. The relay gives it back when the
request has ended. A request that was assigned and never comes must give its slot back too; but the answer to a
heartbeat, which names the assigned requests, may be older than an end that the relay knows of. So requests that left
are remembered until two more heartbeats were sent.
"""

from collections.abc import Iterable, Set
from enum import IntEnum, auto

MAX_ENDED = 100_000  # slots that wait while the shared state is away; those beyond come free by the leases


class Slot(IntEnum):
    """Where the slot of a request stands."""

    HELD = auto()
    """The request is in the engine."""
    ENDED = auto()
    """The request has ended, and the slot is to be released."""
    RELEASING = auto()
    """A call to the shared state releases it, and is not answered."""
    LEFT = auto()
    """It is released, or its router gives it back."""
    LEFT_BEFORE = auto()
    """It had left before the last heartbeat was sent; the next one forgets it."""


# By where it stands, None for a request that is not known: it may come again at any time.
_MOVES: dict[Slot | None, Set[Slot]] = {
    None: {Slot.HELD},
    Slot.HELD: {Slot.ENDED, Slot.LEFT},
    Slot.ENDED: {Slot.HELD, Slot.RELEASING, Slot.LEFT},
    Slot.RELEASING: {Slot.HELD, Slot.ENDED, Slot.LEFT},
    Slot.LEFT: {Slot.HELD, Slot.LEFT_BEFORE},
    Slot.LEFT_BEFORE: {Slot.HELD},
}


class SlotLedger:
    """The slots of one replica, by the ids of their requests."""

    def __init__(self) -> None:
        self._stands: dict[str, Slot] = {}
        self._at: dict[Slot, set[str]] = {slot: set() for slot in Slot}

    def _move(self, request_id: str, to: Slot) -> None:
        before = self._stands.get(request_id)
        assert to in _MOVES[before], f"{request_id}: from {before} to {to}"
        if before is not None:
            self._at[before].discard(request_id)
        self._stands[request_id] = to
        self._at[to].add(request_id)

    def _move_all(self, before: Slot, to: Slot) -> None:
        assert to in _MOVES[before]
        self._at[to] |= self._at[before]
        self._stands.update(dict.fromkeys(self._at[before], to))
        self._at[before].clear()

    @property
    def held(self) -> Set[str]:
        """Requests in the engine."""
        return self._at[Slot.HELD]

    def came(self, request_id: str) -> None:
        """A slot that waits to be released is the request's own again."""
        self._move(request_id, Slot.HELD)

    def ended(self, request_id: str, *, frees_slot: bool = True) -> None:
        """frees_slot: False where its router gives the slot back."""
        has_room = len(self._at[Slot.ENDED]) < MAX_ENDED
        self._move(request_id, Slot.ENDED if frees_slot and has_room else Slot.LEFT)

    def recalled(self, request_ids: Iterable[str]) -> None:
        """Routers give these slots back, also where the request has ended meanwhile."""
        for request_id in request_ids:
            if self._stands.get(request_id) in (Slot.ENDED, Slot.RELEASING):
                self._move(request_id, Slot.LEFT)

    def to_release(self) -> list[str]:
        """Those that the next call releases; `released` or `not_released` once it has ended."""
        ended = sorted(self._at[Slot.ENDED])
        self._move_all(Slot.ENDED, Slot.RELEASING)
        return ended

    def released(self) -> None:
        self._move_all(Slot.RELEASING, Slot.LEFT)

    def not_released(self) -> None:
        """The shared state has not answered: the next call releases them."""
        self._move_all(Slot.RELEASING, Slot.ENDED)

    def sends_heartbeat(self) -> None:
        for request_id in self._at[Slot.LEFT_BEFORE]:
            del self._stands[request_id]
        self._at[Slot.LEFT_BEFORE].clear()
        self._move_all(Slot.LEFT, Slot.LEFT_BEFORE)

    def never_came(self, assigned: Iterable[str]) -> list[str]:
        """Those that neither are here nor have left lately."""
        return [request_id for request_id in assigned if request_id not in self._stands]
