"""The number of requests in flight follows what other classes leave."""

import pytest

from policies.batches.in_flight import InFlight, InFlightConfig, Load
from policies.errors import ConfigError

IDLE = Load(slots=64)


def after(*loads: Load, config: InFlightConfig | None = None) -> int:
    in_flight = InFlight(config or InFlightConfig())
    for load in loads:
        in_flight.observe(load, in_flight.limit)
    return in_flight.limit


def test_it_grows_by_a_part_of_the_slots_while_everything_that_is_sent_runs() -> None:
    assert after(IDLE, IDLE, IDLE) == 1 + 3 * 8


def test_it_stays_while_what_was_sent_waits() -> None:
    assert after(IDLE, IDLE, Load(slots=64, waiting_idle=5)) == 17


def test_it_halves_while_others_wait_and_never_ends() -> None:
    busy = Load(slots=64, waiting_promised=1)
    assert after(IDLE, IDLE, busy) == 8
    assert after(IDLE, IDLE, *[busy] * 20) == 1


def test_it_halves_once_for_what_came_late_since_the_last_look() -> None:
    late = Load(slots=64, late=3)
    assert after(IDLE, IDLE, late) == 8
    assert after(IDLE, IDLE, late, late) == 16


def test_what_was_late_before_the_first_look_is_no_matter() -> None:
    assert after(Load(slots=64, late=3)) == 9


def test_nothing_is_sent_while_there_is_no_engine_and_one_once_there_is() -> None:
    assert after(IDLE, Load(slots=0)) == 0
    assert after(IDLE, Load(slots=0), Load(slots=4)) == 1


def test_it_does_not_grow_while_it_is_not_used_up() -> None:
    in_flight = InFlight(InFlightConfig())
    in_flight.observe(IDLE, 1)
    in_flight.observe(IDLE, 8)
    assert in_flight.limit == 9
    in_flight.observe(IDLE, 9)
    assert in_flight.limit == 17


def test_it_has_a_bound() -> None:
    assert after(*[IDLE] * 100, config=InFlightConfig(most=20)) == 20


@pytest.mark.parametrize("wrong", [{"most": 0}, {"backoff": 1.0}, {"growth_fraction": 0.0}])
def test_wrong_settings_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        InFlightConfig(**wrong)  # type: ignore[arg-type]
