"""The number of requests in flight follows what other classes leave."""

from dataclasses import replace

import pytest

from policies.batches.in_flight import InFlight, InFlightConfig, Load
from policies.errors import ConfigError

IDLE = Load(slots=64)
BUSY = Load(slots=64, waiting_promised=1)


def after(*loads: Load, config: InFlightConfig | None = None) -> int:
    in_flight = InFlight(config or InFlightConfig())
    for load in loads:
        in_flight.observe(load, in_flight.limit)
    return in_flight.limit


def test_it_doubles_until_it_was_too_large_for_the_first_time_then_it_grows_slowly() -> None:
    assert after(IDLE, IDLE, IDLE) == 8
    assert after(*[IDLE] * 6, BUSY) == 32
    assert after(*[IDLE] * 6, BUSY, *[IDLE] * 60) == int(32 * 1.01**60) == 58


def test_it_is_never_more_than_there_are_slots() -> None:
    assert after(*[IDLE] * 20) == 64
    assert after(*[IDLE] * 20, config=InFlightConfig(most=50)) == 50
    assert after(*[IDLE] * 20, Load(slots=0), Load(slots=16, waiting_idle=5)) == 16


def test_it_stays_while_what_was_sent_waits() -> None:
    assert after(IDLE, IDLE, Load(slots=64, waiting_idle=5)) == 4


def test_it_halves_while_others_wait_and_never_ends() -> None:
    assert after(IDLE, IDLE, IDLE, BUSY) == 4
    assert after(IDLE, IDLE, IDLE, *[BUSY] * 20) == 1


def test_it_halves_once_for_promises_that_were_missed_since_the_last_look_at_that_router() -> None:
    one, other = Load(slots=64, router_id="a"), Load(slots=64, router_id="b", missed=7)
    missed = replace(one, missed=3)
    assert after(one, other, one, missed) == 4
    assert after(one, other, one, missed, other, missed) == 4


def test_routers_that_are_gone_are_forgotten() -> None:
    in_flight = InFlight(InFlightConfig())
    for number in range(1000):
        in_flight.observe(Load(slots=64, router_id=str(number)), 0)
    assert len(in_flight._missed) <= 64


def test_nothing_is_sent_while_there_is_no_engine_and_one_once_there_is() -> None:
    assert after(IDLE, Load(slots=0)) == 0
    assert after(*[Load(slots=0)] * 10, Load(slots=4, waiting_idle=1)) == 1


def test_it_does_not_grow_while_it_is_not_used_up() -> None:
    in_flight = InFlight(InFlightConfig())
    in_flight.observe(IDLE, 1)
    in_flight.observe(IDLE, 1)
    assert in_flight.limit == 2
    in_flight.observe(IDLE, 2)
    assert in_flight.limit == 4


@pytest.mark.parametrize("wrong", [{"most": 0}, {"backoff": 1.0}, {"growth": 0.0}])
def test_wrong_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        InFlightConfig(**wrong)  # type: ignore[arg-type]
