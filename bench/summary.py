"""Percentiles within a run; medians and paired ratios over repeated runs."""

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


def paired_ratios(contender: Sequence[float], baseline: Sequence[float]) -> Spread:
    """contender_r / baseline_r for every repeat r, then their median and range.

    The two runs of a repeat follow each other at once, so what slows the machine down for minutes falls out.
    Raises: ValueError: not one baseline value for each contender value.
    """
    return Spread.of([ours / theirs for ours, theirs in zip(contender, baseline, strict=True)])


def paired_differences(contender: Sequence[float], baseline: Sequence[float]) -> Spread:
    """contender_r - baseline_r for every repeat r, then their median and range; raises as `paired_ratios`."""
    return Spread.of([ours - theirs for ours, theirs in zip(contender, baseline, strict=True)])
