"""What bins of gang batches are worth: throughput and latency, in closed form or of a sample.

Source: Guldogan et al., "Multi-Bin Batching for Increasing LLM Inference Throughput" (paper 000): Proposition 4.1,
Theorems 4.2 and 4.3, Lemma 5.1, section 6.2, Lemma A.1. All of it is about batches that run until their longest request
ends; under continuous batching bins only order the queue.

Departures (ERRATA numbers):
- 0.1 The mean of the largest of B uniform lengths is B/(B+1)*upper + 1/(B+1)*lower; equations 8, 10 and 11 swap the
  ends, with which more bins would lower throughput.
- 0.4 Theorem 4.3's epsilon is absolute; the ceiling is guarded against rounding, and the result is at least 1.
- 0.9 Equation 60 reads log(L_{k-j}); `exponential_service_bound` is equation 27 at equation 28.
- 0.11 `gang_throughput` weighs bins with their own batch sizes: 1 / sum of p_i E[max_i(B_i)] / B_i.
- 0.14 The error model moves a request to each neighbour with probability p_e.

Lengths are service times: tokens, or seconds where a function also takes an arrival rate.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import ROUNDING, check_counts, check_positive, check_range
from policies.errors import InputError
from policies.gang.partition import checked_lengths
from policies.router.bin_edges import exponential_edges, harmonic
from policies.types import FloatArray


def expected_batch_max(lengths: ArrayLike, batch_size: int) -> float:
    """Mean of the largest of ``batch_size`` independent draws from a sample, in the unit of the lengths.

        sum over ranks j of x_(j) * ((j/n)^B - ((j-1)/n)^B)

    Raises:
        InputError: batch_size < 1, or lengths as `policies.gang.partition.checked_lengths` refuses them.
    """
    check_counts(batch_size=batch_size)
    sample = checked_lengths(lengths)
    below = np.linspace(0.0, 1.0, len(sample) + 1) ** batch_size
    return float(sample @ np.diff(below))


def gang_throughput(edges: ArrayLike, lengths: ArrayLike, batch_size: int | Sequence[int]) -> float:
    """Requests per unit of service time on one server that is never idle and only runs full batches.

        1 / sum over bins of p_i * E[max_i(B_i)] / B_i

    With one batch size for all bins it is Proposition 4.1 with equation 2; a sequence gives each bin its own, where the
    paper's form does not hold (ERRATA 0.11). Lengths outside the edges count in the first or last bin.

    Args:
        edges: shape (k + 1,), ascending. lengths: shape (n,).

    Raises:
        InputError: a batch size < 1, not one of them per bin, or bad lengths, such as all 0.
    """
    sample = checked_lengths(lengths)
    check_positive(longest=float(sample[-1]))
    inner = np.asarray(edges, dtype=np.float64)[1:-1]
    sizes = [batch_size] * (len(inner) + 1) if isinstance(batch_size, int) else list(batch_size)
    if len(sizes) != len(inner) + 1:
        raise InputError(f"batch_size must have one entry per bin ({len(inner) + 1}), got {len(sizes)}")
    members = np.split(sample, np.searchsorted(sample, inner, side="left"))
    parts = ((part, size) for part, size in zip(members, sizes, strict=True) if len(part))
    return len(sample) / math.fsum(len(part) * expected_batch_max(part, size) / size for part, size in parts)


def _uniform_moments(batch_size: int, l_min: float, l_max: float) -> tuple[float, float]:
    """Mean length and E[max of a batch] - mean, of the uniform law (ERRATA 0.1)."""
    check_counts(batch_size=batch_size)
    check_range(l_min, l_max)
    mean = (l_min + l_max) / 2.0
    return mean, (batch_size * l_max + l_min) / (batch_size + 1.0) - mean


def throughput_uniform(k: int, batch_size: int, l_min: float, l_max: float) -> float:
    """Requests per unit of service time with k equal bins and uniform lengths (Theorem 4.2, equation 4).

        B / (E[l] + (E[max] - E[l]) / k)

    One server; S servers give S times as much (ERRATA 0.18).

    Raises:
        InputError: k or batch_size < 1, or not 0 <= l_min < l_max.
    """
    check_counts(k=k)
    mean, excess = _uniform_moments(batch_size, l_min, l_max)
    return batch_size / (mean + excess / k)


def min_bins_uniform(epsilon: float, batch_size: int, l_min: float, l_max: float) -> int:
    """Fewest bins whose throughput is at least c_max - epsilon (Theorem 4.3, equation 6); at least 1.

        k = ceil((1 - d) / d * (E[max] - E[l]) / E[l]),  d = epsilon / c_max

    epsilon is absolute, in requests per unit of service time; c_max = B / E[l] (ERRATA 0.4).

    Raises:
        InputError: epsilon not > 0 (no finite number of bins reaches c_max), batch_size < 1, or a bad range.
    """
    if not epsilon > 0.0:
        raise InputError(f"the shortfall from the capacity must be positive, got {epsilon}")
    mean, excess = _uniform_moments(batch_size, l_min, l_max)
    bins = (batch_size / (epsilon * mean) - 1.0) * excess / mean
    return max(1, math.ceil(bins * (1.0 - ROUNDING)))


def latency_uniform(k: int, batch_size: int, l_min: float, l_max: float, arrival_rate: float) -> float:
    """Mean time from arrival to the end of the batch, with unlimited servers (Lemma 5.1, equation 7).

        E[l] + (E[max] - E[l]) / k + k * (B - 1) / (2 * arrival_rate)

    Only full batches start, so a finite run leaves requests behind unless a maximum wait flushes them (ERRATA 0.12).
    arrival_rate is in requests per unit of the lengths.

    Raises:
        InputError: k or batch_size < 1, a bad range, or arrival_rate not positive and finite.
    """
    check_counts(k=k)
    check_positive(arrival_rate=arrival_rate)
    mean, excess = _uniform_moments(batch_size, l_min, l_max)
    return mean + excess / k + k * (batch_size - 1) / (2.0 * arrival_rate)


def exponential_service_bound(k: int, rate: float, batch_size: int) -> float:
    """Upper bound on the mean time of a batch at `exponential_edges` (equation 27); B over it bounds throughput below.

        sum over i < k of p_i * l_i + p_k * (l_{k-1} + H_B / rate)

    Equal to the denominator of equation 60 with log(L_{k-j}) (ERRATA 0.9); at most 0.72 % above the exact mean for
    B = 200 and up to 8 bins (ERRATA 0.10). In units of 1/rate.

    Raises:
        InputError: as `exponential_edges`.
    """
    edges = exponential_edges(k, rate, batch_size)
    reached = np.exp(-rate * edges[:-1])
    ends = np.append(edges[1:-1], edges[-2] + harmonic(batch_size) / rate)
    return float(-np.diff(reached, append=0.0) @ ends)


def bins_for_load(arrival_rate: float, batch_size: int, lengths: ArrayLike, *, max_bins: int | None = None) -> int:
    """The number of bins with the lowest mean latency of gang batches at this load (Lemma 5.1, ERRATA 0.13).

    Latency is (E[max] - E[l])/k + k*(B - 1)/(2*arrival_rate) plus what k does not change, so bin k + 1 pays as long as
    k*(k + 1) < 2*arrival_rate*(E[max] - E[l])/(B - 1): k is about the root of the right side, and a second bin pays
    only above arrival_rate = (B - 1)/(E[max] - E[l]). The first term is exact for the uniform law; on skewed lengths
    `optimal_edges` gain more from their first cuts than it says. Batches of one need no bins.

    Args:
        arrival_rate: requests per unit of the lengths, per server group that shares the bins.
        lengths: shape (n,), service times.

    Raises:
        InputError: batch_size or max_bins < 1, arrival_rate not positive and finite, or bad lengths.
    """
    check_counts(batch_size=batch_size, max_bins=1 if max_bins is None else max_bins)
    check_positive(arrival_rate=arrival_rate)
    sample = checked_lengths(lengths)
    if batch_size == 1:
        return 1
    excess = expected_batch_max(sample, batch_size) - float(sample.mean())
    worth = 2.0 * arrival_rate * excess / (batch_size - 1)
    bins = max(1, math.ceil((math.sqrt(1.0 + 4.0 * max(0.0, worth)) - 1.0) / 2.0))
    return bins if max_bins is None else min(bins, max_bins)


def neighbour_error_matrix(k: int, error_probability: float) -> FloatArray:
    """Chance of each predicted bin given the true one, in the error model of section 6.2.

    Each neighbour gets ``error_probability`` and an edge bin's only neighbour as well (ERRATA 0.14). Columns also sum
    to 1: predicted bins stay equiprobable when the true ones are.

    Returns:
        float64, shape (k, k): row = true bin, column = predicted bin.

    Raises:
        InputError: k < 1, or error_probability outside [0, 0.5].
    """
    check_counts(k=k)
    if not 0.0 <= error_probability <= 0.5:
        raise InputError(f"error_probability must be between 0 and 0.5, got {error_probability}")
    beside = np.eye(k, k=1) + np.eye(k, k=-1)
    shares: FloatArray = error_probability * beside + np.diag(1.0 - error_probability * beside.sum(axis=1))
    return shares


def throughput_uniform_with_errors(
    k: int, batch_size: int, l_min: float, l_max: float, error_probability: float
) -> float:
    """`throughput_uniform` when bins are mispredicted as in section 6.2 (figure 8, in closed form).

    The members of predicted bin j are uniform on true bin i with the matrix's share, so their distribution function F
    is piecewise linear and E[max] = l_max - integral of F^B, piece by piece.

    Raises:
        InputError: as `throughput_uniform` and `neighbour_error_matrix`.
    """
    check_counts(k=k, batch_size=batch_size)
    check_range(l_min, l_max)
    shares = neighbour_error_matrix(k, error_probability)
    width = (l_max - l_min) / k
    upper = np.cumsum(shares, axis=0)
    lower = upper - shares
    power = batch_size + 1
    flat = np.where(shares > 0.0, 0.0, lower**batch_size)
    slope = np.where(shares > 0.0, shares, 1.0) * power
    integrals = width * (flat + (upper**power - lower**power) / slope)
    return float(batch_size / np.mean(l_max - integrals.sum(axis=0)))
