"""Whether what a cache gives up would have been wanted soon."""

import random

import pytest

from policies.engine.returns import Returns


def test_before_anything_was_seen_nothing_is_expected_back() -> None:
    assert Returns().chance(0.0, 300.0) == 0.0


def test_what_never_returns_is_expected_no_more() -> None:
    returns = Returns()
    for age_s in range(1, 400):
        returns.given_up(float(age_s))
    assert returns.chance(10.0, 300.0) == 0.0


def test_the_longer_a_block_lay_the_less_it_is_expected_soon() -> None:
    rng, returns = random.Random(1), Returns()
    for _ in range(20_000):  # half of those left return in every doubling of their age
        returns.returned(rng.paretovariate(1.0))
    chances = [returns.chance(age_s, 300.0) for age_s in (4.0, 40.0, 400.0, 4000.0)]
    assert chances == sorted(chances, reverse=True)
    for age_s, chance in zip((4.0, 40.0, 400.0, 4000.0), chances, strict=True):
        assert chance == pytest.approx(1.0 - age_s / (age_s + 300.0), abs=0.12)


def test_beyond_the_age_at_which_blocks_are_given_up_the_share_of_all_bins_goes_on() -> None:
    rng, returns = random.Random(1), Returns()
    for _ in range(5000):
        age_s = rng.paretovariate(1.0)
        (returns.returned if age_s < 60.0 else returns.given_up)(min(age_s, 60.0))
    assert 0.5 < returns.chance(60.0, 300.0) < 0.9
