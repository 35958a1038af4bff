"""Axes of the charts in reports."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.charts import from_zero, seconds


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5))
def test_an_axis_of_seconds_holds_all_values_between_round_numbers(values: list[float]) -> None:
    axis = seconds("s", values)
    assert axis.low <= min(values) <= max(values) < axis.high
    assert all(0 <= axis.at(value) <= 1 for value in values)
    assert {f"{tick:e}"[0] for tick in axis.ticks} <= {"1", "2", "5"}


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=5))
def test_an_axis_from_zero_holds_all_values_with_few_ticks(values: list[float]) -> None:
    axis = from_zero("cost", values)
    assert axis.low == 0 and axis.high >= max(values) * (1 - 1e-6)
    assert 2 <= len(axis.ticks) <= 7
    assert axis.at(axis.ticks[1]) == pytest.approx(1 / (len(axis.ticks) - 1))


def test_nothing_to_show_has_axes_all_the_same() -> None:
    assert seconds("s", []).low < seconds("s", []).high
    assert math.isfinite(from_zero("cost", [0.0]).at(0.0))
