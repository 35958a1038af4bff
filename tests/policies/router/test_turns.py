import pytest

from policies.router.order import Band, banded
from policies.router.turns import FORGOTTEN_S, HALF_LIFE_S, Turns, band_of


@pytest.mark.parametrize("band", list(Band))
def test_keys_take_turns_in_time_and_late(band: Band) -> None:
    key = banded(band, 5.0)
    assert band_of(key, key) == (band if band in (Band.IN_TIME, Band.LATE) else None)


def test_in_an_order_without_bands_nobody_takes_turns() -> None:
    assert band_of(banded(Band.LATE, 5.0), None) is None
    assert band_of(-7.0, -7.0) is None


def test_what_is_next_to_nothing_is_forgotten() -> None:
    turns = Turns()
    turns.note_time(0.0)
    for key, work_s in {"a": 3.0, "b": 2 * FORGOTTEN_S, "c": 1.9 * FORGOTTEN_S, "": 9.0}.items():
        turns.started(key, work_s)
    turns.note_time(HALF_LIFE_S - 0.1)
    assert turns.served_s["a"] == 3.0
    turns.note_time(HALF_LIFE_S)
    assert turns.served_s == {"a": 1.5, "b": FORGOTTEN_S}
