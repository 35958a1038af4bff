"""Cuts a sorted sample into neighbouring groups at least total cost.

Shared by the bins over output lengths (paper 000) and the buckets over prompt lengths (paper 002): both want k ranges
of lengths whose summed cost (expected batch maximum, padded tokens) is smallest, and both papers give a rule that is
optimal for the uniform law only (ERRATA 0.5, 2.3, 2.5). The optimum for any law is a dynamic programme over cuts.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from policies.errors import InputError
from policies.types import FloatArray, IntArray


def checked_lengths(lengths: ArrayLike) -> FloatArray:
    """The sample as float64, shape (n,), ascending.

    Raises:
        InputError: it is empty, not one-dimensional, or holds a negative or non-finite length.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise InputError(f"lengths must be a non-empty one-dimensional sample, got shape {values.shape}")
    values = np.sort(values)
    if not (values[0] >= 0.0 and np.isfinite(values[-1])):
        raise InputError(f"lengths must be finite and >= 0, got {values[0]} to {values[-1]}")
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """A sample as weighted points between which it may be cut; all arrays have shape (d,) and ascend.

    Attributes:
        values: mean length of each point; counts: how many lengths it stands for.
        lows, highs: its smallest and largest length; equal unless distinct lengths had to share a point.
    """

    values: FloatArray
    counts: IntArray
    lows: FloatArray
    highs: FloatArray

    @classmethod
    def of(cls, lengths: ArrayLike, resolution: int | None = None) -> Self:
        """One point per distinct length, or at most ``resolution`` points.

        Where there are more distinct lengths, neighbours share a point: half of the resolution is spent evenly by
        mass and half evenly by value, so neither the crowd nor the tail is coarse.
        """
        sample = checked_lengths(lengths)
        distinct, counts = np.unique(sample, return_counts=True)
        if resolution is None or len(distinct) <= resolution:
            return cls(distinct, counts, distinct, distinct)
        mass = (np.cumsum(counts) - 0.5 * counts) / len(sample)
        reach = (distinct - distinct[0]) / (distinct[-1] - distinct[0])
        group = np.floor(0.5 * (mass + reach) * (resolution - 1)).astype(np.int64)
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        merged = np.add.reduceat(counts, starts)
        values = np.add.reduceat(distinct * counts, starts) / merged
        return cls(values, merged, distinct[starts], distinct[np.append(starts[1:], len(distinct)) - 1])

    def __len__(self) -> int:
        return len(self.values)

    def edges(self, cuts: list[int], k: int) -> FloatArray:
        """k + 1 strictly ascending edges, from 0 to infinity, out of at most k - 1 ascending cuts.

        Cut c separates points c - 1 and c halfway between their lengths. Groups that the ties of a sample make
        unrealisable (ERRATA 0.17) become empty ranges above the longest length, each one longest length wide.
        """
        inner = [self._edge_at(cut) for cut in cuts]
        top = float(self.highs[-1])
        beyond = [top + step * max(1.0, top) for step in range(1, k - len(inner))]
        return np.array([0.0, *inner, *beyond, np.inf])

    def _edge_at(self, cut: int) -> float:
        below, above = float(self.highs[cut - 1]), float(self.lows[cut])
        middle = below + (above - below) / 2.0
        return middle if middle > below else above


def least_cost_cuts(cost: FloatArray, groups: int) -> list[int]:
    """The ``groups`` - 1 ascending cuts of d points with the smallest summed cost.

        best_g(b) = min over a < b of best_{g-1}(a) + cost[a, b]

    Args:
        cost: shape (d + 1, d + 1); cost[a, b] is that of points a to b - 1 as one group, infinite where b <= a.
        groups: 1 to d; each group gets at least one point. Of equal optima the one with the lowest cuts wins.
    """
    points = len(cost) - 1
    if not 1 <= groups <= points:
        raise InputError(f"groups must be between 1 and the {points} points, got {groups}")
    best, choices = cost[0], []
    for _ in range(groups - 1):
        total = best[:, None] + cost
        choices.append(total.argmin(axis=0))
        best = total[choices[-1], np.arange(points + 1)]
    cuts = [points]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return cuts[:0:-1]
