import math

import numpy as np
import pytest

from policies.errors import ConfigError
from policies.lengths.drift import DriftConfig, DriftSwitch, Judged

CONFIG = DriftConfig(window_requests=64, margin=0.05, patience=16)


def judged(challenger: float, reference: float, actual: float = 100.0) -> Judged:
    bins = [int(tokens >= 100.0) for tokens in (actual, challenger, reference)]
    return Judged(
        actual_tokens=actual,
        challenger_tokens=challenger,
        reference_tokens=reference,
        actual_bin=bins[0],
        challenger_bin=bins[1],
        reference_bin=bins[2],
        low_tokens=0.5 * challenger,
        high_tokens=2.0 * challenger,
    )


def fed(switch: DriftSwitch, request: Judged, times: int) -> DriftSwitch:
    for _ in range(times):
        switch.observe(request)
    return switch


def test_a_challenger_that_is_worse_for_long_enough_is_turned_off() -> None:
    switch = fed(DriftSwitch(CONFIG), judged(challenger=400.0, reference=120.0), 15)
    assert switch.is_on
    assert not fed(switch, judged(challenger=400.0, reference=120.0), 1).is_on


def test_it_returns_when_it_is_better_for_long_enough() -> None:
    switch = fed(DriftSwitch(CONFIG), judged(challenger=400.0, reference=120.0), 64)
    assert not switch.is_on
    fed(switch, judged(challenger=105.0, reference=400.0), 40)
    assert not switch.is_on
    assert fed(switch, judged(challenger=105.0, reference=400.0), 64).is_on


def test_one_that_must_prove_itself_starts_off() -> None:
    switch = DriftSwitch(DriftConfig(window_requests=64, margin=0.05, patience=16, starts_on=False))
    assert not fed(switch, judged(challenger=100.0, reference=300.0), 15).is_on
    assert fed(switch, judged(challenger=100.0, reference=300.0), 1).is_on


def test_equals_never_toggle() -> None:
    for starts_on in (True, False):
        switch = DriftSwitch(DriftConfig(window_requests=64, margin=0.05, patience=16, starts_on=starts_on))
        chance = np.random.default_rng(0)
        for _ in range(3000):
            first, second = np.exp(chance.normal(4.6, 0.2, 2))
            switch.observe(judged(challenger=first, reference=second))
            assert switch.is_on is starts_on


def test_a_few_bad_requests_do_not_turn_it_off() -> None:
    switch = fed(DriftSwitch(CONFIG), judged(challenger=100.0, reference=200.0), 64)
    for _ in range(20):
        fed(switch, judged(challenger=1000.0, reference=100.0), 1)
        assert fed(switch, judged(challenger=100.0, reference=200.0), 9).is_on


def test_accuracy_is_what_the_window_saw() -> None:
    switch = DriftSwitch(CONFIG)
    fed(switch, judged(challenger=110.0, reference=50.0), 3)
    fed(switch, judged(challenger=10.0, reference=100.0), 1)
    accuracy = switch.accuracy()
    assert (accuracy.requests, accuracy.hit_fraction, accuracy.reference_hit_fraction) == (4, 0.75, 0.25)
    assert accuracy.bias == pytest.approx((3 * math.log(1.1) + math.log(0.1)) / 4)
    assert accuracy.advantage == pytest.approx((3 * (math.log(2.0) - math.log(1.1)) - math.log(10.0)) / 4)
    assert accuracy.coverage_fraction == 0.75


def test_only_the_window_counts() -> None:
    switch = fed(DriftSwitch(CONFIG), judged(challenger=100.0, reference=200.0), 100)
    assert switch.accuracy().requests == 64
    assert fed(switch, judged(challenger=200.0, reference=200.0), 64).accuracy().advantage == pytest.approx(
        0.0, abs=1e-9
    )


def test_nothing_is_known_of_nothing() -> None:
    accuracy = DriftSwitch(CONFIG).accuracy()
    assert accuracy.requests == 0
    assert all(math.isnan(value) for value in (accuracy.hit_fraction, accuracy.bias, accuracy.coverage_fraction))


def test_an_empty_answer_counts_as_one_token() -> None:
    assert fed(DriftSwitch(CONFIG), judged(challenger=1.0, reference=1.0, actual=0.0), 1).accuracy().bias == 0.0


def test_settings_out_of_bounds_are_refused() -> None:
    with pytest.raises(ConfigError, match="margin"):
        DriftConfig(margin=0.0)
    with pytest.raises(ConfigError, match="patience"):
        DriftConfig(patience=0)
