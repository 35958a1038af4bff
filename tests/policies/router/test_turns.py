import pytest

from policies.router.order import Band, banded
from policies.router.turns import FORGOTTEN_S, band_of, halved


@pytest.mark.parametrize("band", list(Band))
def test_keys_take_turns_in_time_and_late(band: Band) -> None:
    key = banded(band, 5.0)
    assert band_of(key, key) == (band if band in (Band.IN_TIME, Band.LATE) else None)


def test_in_an_order_without_bands_nobody_takes_turns() -> None:
    assert band_of(banded(Band.LATE, 5.0), None) is None
    assert band_of(-7.0, -7.0) is None


def test_what_is_next_to_nothing_is_forgotten() -> None:
    assert halved({"a": 3.0, "b": 2 * FORGOTTEN_S, "c": 1.9 * FORGOTTEN_S, "d": 0.0}) == {"a": 1.5, "b": FORGOTTEN_S}
