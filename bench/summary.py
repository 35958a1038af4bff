"""Percentiles within a run; medians and paired ratios over repeated runs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks; None for no values."""
    return float(np.percentile(values, percent)) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of the repeats with the least and the greatest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Raises: statistics.StatisticsError: no values."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def __format__(self, each: str) -> str:
        """Median [least, greatest], every number in the format `each`."""
        return f"{self.median:{each}} [{self.low:{each}}, {self.high:{each}}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianInterval:
    """Between two order statistics; `coverage` is the probability that it holds the true median."""

    low: float
    high: float
    rank: int
    coverage: float


def median_interval(values: Sequence[float], least_coverage: float = 0.9) -> MedianInterval | None:
    """From the k-th least to the k-th greatest of n values, by the greatest k with enough coverage.

    Coverage is 1 - 2 P(Binomial(n, 1/2) < k) for any distribution. None where k would be 1, which is the range:
    below 8 values.
    """
    ordered, count = sorted(values), len(values)
    rank, coverage = 0, 1.0
    while 2 * (rank + 1) <= count:
        narrower = coverage - 2.0 * math.comb(count, rank) / 2.0**count
        if narrower < least_coverage:
            break
        rank, coverage = rank + 1, narrower
    if rank < 2:
        return None
    return MedianInterval(low=ordered[rank - 1], high=ordered[-rank], rank=rank, coverage=coverage)


def spread(values: Sequence[float], each: str, least_coverage: float = 0.9) -> str:
    """Median [least, greatest], then in round brackets the interval of the median where there are values enough."""
    interval = median_interval(values, least_coverage)
    inner = "" if interval is None else f" ({interval.low:{each}}, {interval.high:{each}})"
    return f"{Spread.of(values):{each}}{inner}"


def ratios(contender: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """contender_r / baseline_r for every repeat r.

    Raises: ValueError: not one baseline value for each contender value.
    """
    return [ours / theirs for ours, theirs in zip(contender, baseline, strict=True)]


def differences(contender: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """contender_r - baseline_r for every repeat r; raises as `ratios`."""
    return [ours - theirs for ours, theirs in zip(contender, baseline, strict=True)]


def paired_ratios(contender: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The spread of `ratios`. The two runs of a repeat follow each other, so slow minutes of a machine cancel out."""
    return Spread.of(ratios(contender, baseline))
