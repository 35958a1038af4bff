"""Phases of decodes and refills, simulated by brute force: what the closed forms of 003 are held to."""

from dataclasses import dataclass

import numpy as np

from policies.types import FloatArray, IntArray


@dataclass(frozen=True)
class Cycle:
    """Means over simulated cycles of refill and decode phase."""

    requests: float
    seconds: float


def simulate_phases(
    lengths: IntArray, slots: int, steps: int, prefill_s: float, decode_s: float, *, total_steps: int = 40_000
) -> Cycle:
    """Every slot is refilled at the start of a phase of ``steps`` decode steps, if its request has ended.

    Knows nothing of the formula: it draws lengths, counts refills and adds up seconds. A phase that finds no free
    slot skips the prefill. Marginal costs per token are the same for every T and left out.
    """
    rng = np.random.default_rng(1)
    left = rng.choice(lengths, slots)
    requests, seconds, cycles = 0, 0.0, total_steps // steps
    for cycle in range(-cycles // 8, cycles):
        free = np.flatnonzero(left <= 0)
        if cycle >= 0:
            requests += len(free)
            seconds += decode_s * steps + (prefill_s if len(free) else 0.0)
        left[free] = lengths[rng.integers(len(lengths), size=len(free))]  # choice() is three times as slow
        left = left - steps
    return Cycle(requests=requests / cycles, seconds=seconds / cycles)


def survival_of(lengths: IntArray) -> FloatArray:
    """P(O > t), t = 0, 1, ..., of a sample of lengths."""
    return np.asarray(1.0 - np.cumsum(np.bincount(lengths)) / len(lengths))
