"""Which ticket starts where, and when: the one decision of all routers together.

Pure: a driver gives it the time with each question, and does what it answers. `router.memory_store` serves from it
while Redis is away, `simulator.router` simulates with it, and the scripts in router/lua say the same in Lua, call by
call; a contract test holds them to it.

While a replica has credit and a ticket waits that it may take, the most urgent ticket starts, where its first token is
predicted to come soonest; where replicas take rolling batches, the next ones of its lane start beside it. A ticket that
turns out to be late when it is its turn moves behind. One start in ten is owed to those behind. Among late tickets API
keys take turns, and of one key the one starts of whose prompt a replica has most cached. Replicas that take whole
batches get one when they are idle. Then slots are called back for urgent tickets that no replica could take.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.gang.batches import GangConfig, LaneView, next_batch
from policies.router.admission import Foreseen, Limits, Queue, Refusal, no_room, predicted_wait_s
from policies.router.lanes import LaneName, Lanes
from policies.router.late import looked_at, most_saved
from policies.router.ledger import Ledger, Place, Replica, Tally
from policies.router.order import BAND_S, Band, is_late, is_owed_a_start
from policies.router.placement import Offer, Placement, soonest_first_token
from policies.router.recall import RecallableView, WaitingView, recalls
from policies.router.starts import Starts
from policies.router.tickets import Reading, ReplicaTerms, Ticket, unknown_ticket
from policies.router.turns import Turns, band_of

# In one call, which then takes a Lua script a millisecond at most; later ones start although they are late.
MOST_CALLED_LATE = 64


class Moves(NamedTuple):
    """What the driver is to do.

    Attributes:
        started: places of the tickets that got a slot, in the order in which they did.
        recalled: tickets whose slots are called back.
    """

    started: list[Place]
    recalled: list[Ticket]


class Dispatcher:
    """Tickets, credits and turns; `dispatch` decides after whatever has changed.

    Attributes:
        places: where each ticket is, by its id.
        lanes: what waits.
        ledger: what runs, and what replicas may still be given.
        turns: what API keys were served.
        tally: what has been seen since the beginning.
        starts: what is known of replicas that start.
    """

    def __init__(self, placement: Placement = soonest_first_token) -> None:
        self.places: dict[str, Place] = {}
        self.lanes, self.ledger = Lanes(), Ledger()
        self.turns, self.tally, self.starts = Turns(), Tally(), Starts()
        self._placement = placement

    # What changes

    def queue(self, ticket: Ticket, now_s: float) -> None:
        """A ticket that is not known waits from now on."""
        place = self.places[ticket.request_id] = Place(ticket, now_s)
        self.lanes.add(place)

    def forget(self, request_id: str) -> Ticket | None:
        """Take a ticket out, wherever it is."""
        place = self.places.pop(request_id, None)
        if place is None:
            return None
        if place.replica_id:
            self.ledger.take_off(place)
        else:
            self.lanes.remove(place)
        return place.ticket

    def forget_router(self, router_id: str) -> None:
        """Take out what waits of a router."""
        for place in [place for place in self.lanes if place.ticket.router_id == router_id]:
            self.forget(place.ticket.request_id)

    def rebin(self, bins: Sequence[float], buckets: Sequence[float]) -> None:
        """Move what waits to the lanes between new edges, as far as its lengths are known.

        Args:
            bins: ascending edges, in predicted output tokens.
            buckets: likewise in prompt tokens.
        """
        for place in list(self.lanes):
            ticket = place.ticket
            bin_index, bucket = ticket.bin_index, ticket.bucket
            if ticket.predicted_output_tokens is not None and bins:
                bin_index = bisect_right(bins[1:-1], ticket.predicted_output_tokens)
            if ticket.prompt_tokens is not None:
                bucket = bisect_right(buckets[1:-1], ticket.prompt_tokens)
            if (bin_index, bucket) != (ticket.bin_index, ticket.bucket):
                self.lanes.change(place, replace(ticket, bin_index=bin_index, bucket=bucket))

    def register(
        self,
        replica_id: str,
        terms: ReplicaTerms,
        slots: int,
        now_s: float,
        *,
        slowness: float = 1.0,
        running: Iterable[str] = (),
        start_s: float = 0.0,
    ) -> None:
        """A replica joins, or comes back.

        Args:
            running: what it runs already, even if it waits as far as is known.
            start_s: how long its start took.
        """
        self.starts.came(start_s, now_s)
        replica = self.ledger.replicas.setdefault(replica_id, Replica(replica_id, terms, slots))
        replica.terms, replica.slowness = terms, slowness
        self.ledger.set_slots(replica, slots)
        for request_id in running:
            place = self.places.get(request_id)
            if place is None:
                place = self.places[request_id] = Place(unknown_ticket(request_id), now_s)
            elif place.replica_id:
                continue
            else:
                self.lanes.remove(place)
            self.ledger.put_on(place, replica, now_s)

    def offer(self, replica_id: str, slots: int, reading: Reading | None = None) -> None:
        """What a replica may be given from now on; None has nothing new to say of its prompts."""
        replica = self.ledger.replicas[replica_id]
        self.ledger.set_slots(replica, slots)
        if reading is not None:
            replica.note_reading(reading)

    def drop(self, replica_id: str) -> None:
        """A replica is gone, and what it held with it."""
        for request_id in self.ledger.drop(replica_id):
            del self.places[request_id]

    # What is decided

    def foreseen(self, ticket: Ticket, limits: Limits, now_s: float) -> Foreseen | Refusal:
        """What is predicted of a ticket that comes now; why it may not queue, where no replica can start it.

        Also one that may not asks for a replica where none is. One that waits finds as much to be read before it, when
        its turn comes, as there is now.
        """
        offers = self._offers(ticket)
        if offers and (chosen := self._placement(ticket, offers)) is not None:
            first_s = {each: offer.first_token_s for each, offer in offers.items()}
            own_s = first_s.pop(chosen)
            return Foreseen(0.0, own_s, min(first_s.values(), default=None))
        lanes, serving = self.lanes, self.ledger.serving(ticket.slo_class)
        pace = [replica.slowness for replica in serving]
        of_key = lanes.of_key[ticket.slo_class, ticket.api_key] if ticket.api_key else 0
        of_key_s = of_key and predicted_wait_s(of_key * lanes.mean_work_s(ticket.slo_class), pace)
        is_there = bool(self.ledger.replicas)
        wait_s = _predicted_wait_s(ticket, lanes, serving) if is_there else self.starts.asked(now_s)
        waiting = lanes.waiting[ticket.slo_class]
        refusal = no_room(limits, Queue(waiting=waiting, wait_s=wait_s, of_key=of_key, of_key_s=of_key_s))
        reading_s = min((replica.offer(ticket).first_token_s for replica in serving), default=0.0)
        foreseen = Foreseen(wait_s, reading_s)
        return foreseen if refusal is None else replace(refusal, foreseen=foreseen)

    def dispatch(self, now_s: float) -> Moves:
        """Hand out what can be handed out.

        Afterwards no replica has credit for what waits, late ones aside that wait for the replica with their prompt.
        """
        if not self.lanes:
            return Moves([], [])
        started = [*self._start_singles(now_s), *self._start_gangs(now_s)]
        return Moves(started, self._recalls())

    def _start_singles(self, now_s: float) -> list[Place]:
        started: list[Place] = []
        called = 0
        while self.lanes and (found := self._next_start(now_s)) is not None:
            place, replica = found
            if called < MOST_CALLED_LATE and _turns_out_late(place.ticket, replica, now_s):
                called += 1
                self._call_late(place, now_s)
                continue
            is_first = replica.terms.rolling_size > 1 and self._is_most_urgent(place)
            self._start(place, replica, now_s)
            started.append(place)
            if is_first:
                started += self._companions(place.ticket, replica, now_s)
        return started

    def _is_most_urgent(self, place: Place) -> bool:
        """In terms of bands: it was not owed its start."""
        return self.lanes.heads()[0].ticket.deadline_key // BAND_S == place.ticket.deadline_key // BAND_S

    def _companions(self, first: Ticket, replica: Replica, now_s: float) -> list[Place]:
        """The rest of a rolling batch: the next ones of the lane and band of its first, but for those that are late."""
        started: list[Place] = []
        while len(started) + 1 < replica.terms.rolling_size and replica.takes_singles:
            place = self.lanes.first_like(first)
            if place is None or place.ticket.deadline_key // BAND_S != first.deadline_key // BAND_S:
                break
            if _turns_out_late(place.ticket, replica, now_s) or not _may_start_at(place.ticket, replica):
                break
            self._start(place, replica, now_s)
            started.append(place)
        return started

    def _start(self, place: Place, replica: Replica, now_s: float) -> None:
        self.lanes.remove(place)
        self.ledger.put_on(place, replica, now_s)
        self.turns.started(place.ticket.api_key, place.ticket.work_s)
        self.tally.started(place.ticket.arrival_s)

    def _call_late(self, place: Place, now_s: float) -> None:
        ticket = place.ticket
        assert ticket.late_key is not None and ticket.deadline_s is not None
        self.tally.late[ticket.slo_class, "passed" if now_s > ticket.deadline_s else "reading"] += 1
        self.lanes.change(place, replace(ticket, deadline_key=ticket.late_key))

    def _next_start(self, now_s: float) -> tuple[Place, Replica] | None:
        """The most urgent ticket that a replica with credit may take, unless another has a turn before it."""
        if not any(replica.takes_singles for replica in self.ledger.replicas.values()):
            return None  # the usual case under load, told without a look at the queue
        if (owed := self._next_owed(now_s)) is not None:
            self.tally.owed[owed[0].ticket.slo_class] += 1
            return owed
        for place in self.lanes.heads():
            if (replica := self._choose(place.ticket)) is not None:
                found = self._in_turn(place, replica)
                if not _is_behind(found[0].ticket):
                    return found
                if (saving := self._most_saved(found[0])) is not None:
                    return saving
        return None

    def _most_saved(self, first: Place) -> tuple[Place, Replica] | None:
        """Of the late tickets beside it, of which it is the first."""
        late = looked_at(self.lanes.late_like(first.ticket))
        places = [each for each in late if each.ticket.api_key == first.ticket.api_key]
        replicas = [each for each in self.ledger.serving(first.ticket.slo_class) if each.has_room]
        found = most_saved([each.ticket for each in places], replicas)
        return None if found is None else (places[found.place], found.replica)

    def _next_owed(self, now_s: float) -> tuple[Place, Replica] | None:
        """The ticket behind whose patience ended first, over the first one of each lane."""
        behind = self.lanes.first_behind()
        owed = [place for place in behind if is_owed_a_start(self.tally.starts, place.ticket.deadline_key, now_s)]
        if not owed:
            return None
        place = min(owed, key=lambda each: (each.ticket.deadline_key % BAND_S, each.ticket.request_id))
        if place.ticket.late_key != place.ticket.deadline_key:
            return None  # of an order without bands
        replica = self._choose(place.ticket, owed=True)
        return None if replica is None else self._in_turn(place, replica, owed=True)

    def _in_turn(self, place: Place, replica: Replica, *, owed: bool = False) -> tuple[Place, Replica]:
        """The ticket that starts in the place of this one, where API keys take turns."""
        band, slo_class = _band_of(place.ticket), place.ticket.slo_class
        if band is None:
            return place, replica
        late = [each for each in self.lanes.in_band(Band.LATE) if _band_of(each.ticket) is Band.LATE]
        if all(each.ticket.slo_class != slo_class for each in late):
            return place, replica
        taking_turns = late  # this ticket is among them, so one of them has a replica
        if band is Band.IN_TIME:
            taking_turns = [each for each in self.lanes.in_band(band, slo_class) if _band_of(each.ticket) is band]
        found = ((each, self._choose(each.ticket, owed=owed)) for each in sorted(taking_turns, key=self._turn))
        return next((each, its_replica) for each, its_replica in found if its_replica is not None)

    def _turn(self, place: Place) -> tuple[float, str, str, float, str]:
        ticket = place.ticket
        served_s = self.turns.served_s.get(ticket.api_key, 0.0)
        return served_s, ticket.slo_class, ticket.api_key, ticket.deadline_key, ticket.request_id

    def _choose(self, ticket: Ticket, *, owed: bool = False) -> Replica | None:
        offers = self._offers(ticket, owed=owed)
        chosen = self._placement(ticket, offers) if offers else None
        return None if chosen is None else self.ledger.replicas[chosen]

    def _offers(self, ticket: Ticket, *, owed: bool = False) -> dict[str, Offer]:
        """A late ticket goes where nothing is to be read, unless a start is owed to it."""
        offers = {
            replica_id: replica.offer(ticket)
            for replica_id, replica in self.ledger.replicas.items()
            if replica.takes_singles
            and replica.terms.takes(ticket.slo_class)
            and (owed or _may_start_at(ticket, replica))
        }
        if ticket.avoids:
            offers = {each: offer for each, offer in offers.items() if each not in ticket.avoids} or offers
        return offers

    def _start_gangs(self, now_s: float) -> list[Place]:
        """Each idle replica that takes gang batches, the fastest first, takes one if one is formed."""
        started: list[Place] = []
        idle = [replica for replica in self.ledger.replicas.values() if replica.takes_a_gang]
        for replica in sorted(idle, key=lambda each: (each.slowness, each.replica_id)):
            batch = self._next_gang(replica, now_s)
            for place in batch:
                self._start(place, replica, now_s)
            started += batch
        return started

    def _next_gang(self, replica: Replica, now_s: float) -> Sequence[Place]:
        assert replica.terms.gang_max_wait_s is not None
        config = GangConfig(
            batch_size=replica.slots,
            max_wait_s=replica.terms.gang_max_wait_s,
            bin_sizes=replica.gang_sizes,
            patience_s=replica.terms.gang_patience_s,
        )
        batches = {
            name: lane[: config.size_of(name.bin_index)]
            for name, lane in self.lanes.items()
            if replica.terms.takes(name.slo_class)
        }
        chosen = next_batch((_lane_view(name, batch, now_s) for name, batch in batches.items()), config)
        if chosen is None:
            return []
        is_full = len(chosen.keys) == config.size_of(chosen.bin_index)
        self.tally.batches[chosen.bin_index, "full" if is_full else "waited"] += 1
        return batches[LaneName(chosen.slo_class, chosen.bin_index, chosen.bucket)]

    def _recalls(self) -> list[Ticket]:
        """Tickets whose slots go to urgent ones that no replica could take."""
        ledger = self.ledger
        if not ledger.recallable or not self.lanes or ledger.slots_wait:
            return []
        waiting = (each.ticket for each in self.lanes.by_urgency())
        views = (WaitingView(key=ticket.deadline_key, fills_idle=ticket.fills_idle) for ticket in waiting)
        running = (
            RecallableView(key=self.places[each].ticket.deadline_key, request_id=each) for each in ledger.recallable
        )
        called = recalls(views, running, len(ledger.recalled))
        for request_id in called:
            ledger.call_back(request_id)
        return [self.places[request_id].ticket for request_id in called]


def _predicted_wait_s(ticket: Ticket, lanes: Lanes, serving: Sequence[Replica]) -> float:
    """Every waiting ticket counts as the mean of its class."""
    ahead_s = {name: count * lanes.mean_work_s(name) for name, count in lanes.earlier(ticket.deadline_key).items()}
    own = [replica.slowness for replica in serving if replica.terms.classes == (ticket.slo_class,)]
    own_ahead_s = ahead_s.get(ticket.slo_class, 0.0)
    return predicted_wait_s(sum(ahead_s.values()), [replica.slowness for replica in serving], own_ahead_s, own)


def _turns_out_late(ticket: Ticket, replica: Replica, now_s: float) -> bool:
    """It was not called late before."""
    if ticket.late_key in (None, ticket.deadline_key) or ticket.deadline_s is None:
        return False
    return is_late(ticket.deadline_s, replica.reading_s(ticket), now_s)


def _may_start_at(ticket: Ticket, replica: Replica) -> bool:
    """A late ticket goes where nothing is to be read."""
    return not (_is_behind(ticket) and replica.has_prompts_to_read)


def _is_behind(ticket: Ticket) -> bool:
    """It was called late, in an order that knows late tickets."""
    return ticket.late_key is not None and ticket.deadline_key // BAND_S == Band.LATE


def _band_of(ticket: Ticket) -> Band | None:
    return band_of(ticket.deadline_key, ticket.late_key) if ticket.api_key else None


def _lane_view(name: LaneName, batch: Sequence[Place], now_s: float) -> LaneView:
    return LaneView(
        slo_class=name.slo_class,
        bin_index=name.bin_index,
        bucket=name.bucket,
        keys=[place.ticket.deadline_key for place in batch],
        waited_s=now_s - min(place.since_s for place in batch),
    )
