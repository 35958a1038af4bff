"""What goes to the Lua scripts, packed: one list of names, by which Python packs and Lua reads.

A ticket is packed as an array. `LUA_NAMES` stands before every script and gives each field's place under its name in
capitals, so that no order is written down twice. False stands for None: Lua's arrays end at nil.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter

import msgspec

from policies.router.admission import Limits, Quota, Settlement
from policies.router.dispatcher import MOST_CALLED_LATE
from policies.router.late import NEWEST, OLDEST
from policies.router.order import BAND_S, STARTS_FOR_THE_PATIENT, Band
from policies.router.tickets import Reading, Ticket

TICKET = tuple(field.name for field in fields(Ticket) if field.name not in ("request_id", "tpot_s"))
"""Fields of a ticket as its router sends it; the id is its key, and no replica is chosen by ``tpot_s``."""
PLACE = ("replica_id", "since_ms", "charge_s")
"""What Lua adds: where it is ("" while it waits), since when, and the seconds that it adds to its replica's work."""


def _lua_names() -> str:
    names = [name.upper() for name in (*TICKET, *PLACE)]
    constants = {
        "BAND_S": f"{BAND_S:.0f}",
        "STARTS_FOR_THE_PATIENT": STARTS_FOR_THE_PATIENT,
        "MOST_CALLED_LATE": MOST_CALLED_LATE,
        "OLDEST": OLDEST,
        "NEWEST": NEWEST,
        **{band.name: band.value for band in (Band.IN_TIME, Band.NO_TARGET, Band.LATE)},
    }
    lines = (
        f"local {', '.join(names)} = {', '.join(map(str, range(1, len(names) + 1)))}",
        f"local {', '.join(constants)} = {', '.join(map(str, constants.values()))}",
    )
    return "\n".join(lines) + "\n"


LUA_NAMES = _lua_names()
_of_ticket = attrgetter(*TICKET)


def packed_ticket(ticket: Ticket) -> bytes:
    return msgspec.msgpack.encode([False if value is None else value for value in _of_ticket(ticket)])


def packed_limits(limits: Limits) -> bytes:
    return msgspec.msgpack.encode((limits.max_waiting, limits.max_wait_s, limits.max_of_key))


def packed_quotas(quotas: Iterable[Quota]) -> bytes:
    return msgspec.msgpack.encode([(quota.name, quota.cost, quota.per_s, quota.burst) for quota in quotas])


def packed_settlements(settlements: Sequence[Settlement]) -> bytes:
    return msgspec.msgpack.encode([(each.name, each.cost, each.per_s) for each in settlements])


def packed_reading(reading: Reading | None) -> bytes:
    """Nothing for None."""
    if reading is None:
        return b""
    most = False if reading.max_unread_tokens is None else reading.max_unread_tokens
    token_s = False if reading.prompt_token_s is None else reading.prompt_token_s
    return msgspec.msgpack.encode((reading.read, reading.known_tokens, most, token_s, reading.return_chance))
