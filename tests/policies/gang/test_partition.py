"""Cutting a sample: the dynamic programme against brute force, and what ties and coarse points do."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.gang.partition import Atoms, checked_lengths, least_cost_cuts


@given(points=st.integers(1, 7), data=st.data())
def test_cuts_cost_as_little_as_the_best_of_all_cuts(points: int, data: st.DataObject) -> None:
    groups = data.draw(st.integers(1, points))
    entries = st.lists(st.integers(0, 50), min_size=(points + 1) ** 2, max_size=(points + 1) ** 2)
    cost = np.array(data.draw(entries), dtype=np.float64).reshape(points + 1, points + 1)
    cost[np.tril_indices(points + 1)] = np.inf

    def total(cuts: tuple[int, ...]) -> float:
        bounds = (0, *cuts, points)
        return sum(float(cost[a, b]) for a, b in zip(bounds, bounds[1:], strict=False))

    best = min(total(cuts) for cuts in combinations(range(1, points), groups - 1))
    assert total(tuple(least_cost_cuts(cost, groups))) == best


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200), st.integers(1, 30))
def test_points_are_at_most_the_resolution_and_keep_the_sample(lengths: list[int], resolution: int) -> None:
    atoms = Atoms.of(lengths, resolution)
    assert len(atoms) <= resolution
    assert atoms.counts.sum() == len(lengths)
    assert float(atoms.counts @ atoms.values) == pytest.approx(sum(lengths))
    assert (atoms.lows <= atoms.highs).all()
    assert (atoms.highs[:-1] < atoms.lows[1:]).all()


def test_an_edge_separates_neighbours_that_differ_by_one_bit() -> None:
    low = 1.0
    high = float(np.nextafter(low, 2.0))
    edges = Atoms.of([low, high]).edges([1], 2)
    assert low < edges[1] <= high


def test_edges_without_a_length_to_stand_on_lie_above_the_longest() -> None:
    assert Atoms.of([100, 100]).edges([], 4).tolist() == [0.0, 200.0, 300.0, 400.0, np.inf]
    assert Atoms.of([0]).edges([], 3).tolist() == [0.0, 1.0, 2.0, np.inf]


@pytest.mark.parametrize("lengths", [[], [[1.0, 2.0]], [-1.0], [1.0, np.nan], [np.inf]])
def test_a_sample_that_is_none_is_refused(lengths: list[float]) -> None:
    with pytest.raises(InputError, match="lengths must be"):
        checked_lengths(lengths)


def test_more_groups_than_points_are_refused() -> None:
    with pytest.raises(InputError, match="groups must be between 1 and the 2 points, got 3"):
        least_cost_cuts(np.zeros((3, 3)), 3)
