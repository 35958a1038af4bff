"""Where to cut lengths into bins.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000): Lemma 4.1 for uniform
lengths, section 6.1 for bins of equal mass, Lemma A.1 for exponential lengths.

Departures (ERRATA numbers):
- 0.5 Equal mass is best for the uniform law only. `optimal_edges` minimises the expected batch maximum of any sample.
- 0.17 Bins of samples are open above; edges that ties make unrealisable enclose empty bins, so there are always k + 1.

Lengths are service times, in tokens or seconds. A bin i (from 0) holds edges[i] <= length < edges[i + 1].
"""

import math

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import check_counts, check_positive, check_range
from policies.gang.partition import Atoms, least_cost_cuts
from policies.types import FloatArray

# More points than this change the expected batch maximum of a sample by less than its own sampling error.
_RESOLUTION = 1024


def uniform_edges(k: int, l_min: float, l_max: float) -> FloatArray:
    """k bins of equal width, best for lengths uniform on [l_min, l_max] (Lemma 4.1, equation 3).

    Returns:
        float64, shape (k + 1,), ascending from l_min to l_max, in the unit of the lengths.

    Raises:
        InputError: k < 1, or not 0 <= l_min < l_max.
    """
    check_counts(k=k)
    check_range(l_min, l_max)
    return np.linspace(l_min, l_max, k + 1)


def harmonic(n: int) -> float:
    return math.fsum(1.0 / i for i in range(1, n + 1))


def _exponential_levels(k: int, batch_size: int) -> list[float]:
    """L_1 to L_{k-1} of equation 29: L_1 = H_B, L_m = 1 + ln L_{m-1}."""
    levels = [harmonic(batch_size)]
    while len(levels) < k - 1:
        levels.append(1.0 + math.log(levels[-1]))
    return levels[: k - 1]


def exponential_edges(k: int, rate: float, batch_size: int) -> FloatArray:
    """Edges for exponential lengths with mean 1/rate (Lemma A.1, equation 28).

        l_i = (1/rate) * sum over j <= i of ln L_{k-j},  L_1 = H_B,  L_m = 1 + ln L_{m-1}

    They minimise the paper's bound, whose optimum is within 0.014 % of the exact one (ERRATA 0.10). A batch of one has
    no maximum to lower and every edge is optimal (the formula would put all of them at 0): equal mass is returned.

    Returns:
        float64, shape (k + 1,), ascending from 0 to infinity, in units of 1/rate.

    Raises:
        InputError: k < 1, batch_size < 1, or rate not positive and finite.
    """
    check_counts(k=k, batch_size=batch_size)
    check_positive(rate=rate)
    if batch_size == 1:
        inner = -np.log1p(-np.arange(1, k) / k)
    else:
        inner = np.cumsum(np.log(_exponential_levels(k, batch_size)[::-1]))
    return np.concatenate(([0.0], inner / rate, [np.inf]))


def equal_mass_edges(lengths: ArrayLike, k: int) -> FloatArray:
    """k bins that hold equal shares of a sample, as in section 6.1 and appendix C.1.

    Each bin takes the share of what the bins before it left, so a tie that overfills one bin (ERRATA 0.17) does not
    starve the next. With fewer than k distinct lengths the surplus bins lie empty above the longest.

    Args:
        lengths: shape (n,), n >= 1, any order, >= 0.

    Returns:
        float64, shape (k + 1,), strictly ascending from 0 to infinity.

    Raises:
        InputError: k < 1, or lengths as `policies.gang.partition.checked_lengths` refuses them.
    """
    check_counts(k=k)
    atoms = Atoms.of(lengths)
    filled = np.cumsum(atoms.counts)
    cuts = [0]
    for bins_left in range(min(k, len(atoms)), 1, -1):
        before = filled[cuts[-1] - 1] if cuts[-1] else 0
        share = before + (filled[-1] - before) / bins_left
        # The bins still to come need one point each.
        reachable = filled[cuts[-1] : len(atoms) - bins_left + 1]
        cuts.append(cuts[-1] + int(np.abs(reachable - share).argmin()) + 1)
    return atoms.edges(cuts[1:], k)


def optimal_edges(lengths: ArrayLike, k: int, batch_size: int, *, resolution: int = _RESOLUTION) -> FloatArray:
    """The k bins that minimise the expected batch maximum of a sample (equation 2 for its empirical law).

        sum over bins of Pr(bin) * E[max of batch_size lengths drawn from the bin]

    A dynamic programme over the cuts between distinct lengths: exact up to ``resolution`` of them, O(resolution^2 * k)
    time and O(resolution^2) memory. Replaces equal mass, which loses throughput on skewed lengths (ERRATA 0.5).

    Args:
        lengths: shape (n,), n >= 1, any order, >= 0.

    Returns:
        float64, shape (k + 1,), strictly ascending from 0 to infinity.

    Raises:
        InputError: k, batch_size or resolution < 1, or lengths as `policies.gang.partition.checked_lengths` refuses
        them.
    """
    check_counts(k=k, batch_size=batch_size, resolution=resolution)
    atoms = Atoms.of(lengths, resolution)
    cost = _batch_maximum_cost(atoms, batch_size)
    return atoms.edges(least_cost_cuts(cost, min(k, len(atoms))), k)


def _batch_maximum_cost(atoms: Atoms, batch_size: int) -> FloatArray:
    """cost[a, b] = mass * E[max of a batch] of points a to b - 1; shape (d + 1, d + 1), infinite where b <= a.

    With N the cumulated counts, E[max] = u_last - sum over j of (u_{j+1} - u_j) * ((N_{j+1} - N_a)/(N_b - N_a))^B.
    The sum for b follows from that for b - 1 by one factor and one term, which keeps the powers from underflowing.
    """
    values, filled = atoms.values, np.concatenate(([0.0], np.cumsum(atoms.counts)))
    cost = np.full((len(atoms) + 1, len(atoms) + 1), np.inf)
    shortfall = np.zeros(len(atoms))
    for b in range(1, len(atoms) + 1):
        held = filled[b] - filled[:b]
        if b > 1:
            fraction = (filled[b - 1] - filled[: b - 1]) / held[:-1]
            shortfall[: b - 1] += values[b - 1] - values[b - 2]
            shortfall[: b - 1] *= fraction**batch_size
        cost[:b, b] = held * (values[b - 1] - shortfall[:b])
    cost /= filled[-1]
    return cost
