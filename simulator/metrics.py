"""What a run is summed up as, in bounded memory however many tokens it makes."""

import math
from dataclasses import dataclass, field

import numpy as np

from policies.types import FloatArray, Phase

# A percent of resolution from 10 microseconds to 10 000 seconds.
_LEAST_S = 1e-5
_PER_E = 100
_CELLS = int(math.log(1e9) * _PER_E) + 2


class GapHistogram:
    """Counts of seconds on a logarithmic scale; percentiles are right to one percent."""

    def __init__(self) -> None:
        self._counts = np.zeros(_CELLS, dtype=np.int64)
        self.count = 0
        self.total_s = 0.0

    def add(self, gaps_s: FloatArray) -> None:
        count = len(gaps_s)
        self.count += count
        lowest, highest = float(gaps_s.min()), float(gaps_s.max())
        if highest - lowest < 1e-9:
            self.total_s += count * lowest
            self._counts[_cell(lowest)] += count
        else:
            self.total_s += float(gaps_s.sum())
            cells = (np.log(np.maximum(gaps_s, _LEAST_S) / _LEAST_S) * _PER_E).astype(np.int64)
            self._counts += np.bincount(np.minimum(cells, _CELLS - 1), minlength=_CELLS)

    def merge(self, other: "GapHistogram") -> None:
        self._counts += other._counts
        self.count += other.count
        self.total_s += other.total_s

    def mean(self) -> float | None:
        return self.total_s / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Middle of the cell in which that share of the gaps is reached; None without gaps."""
        if not self.count:
            return None
        cell = int(np.searchsorted(np.cumsum(self._counts), percent / 100.0 * self.count))
        return _LEAST_S * math.exp((min(cell, _CELLS - 1) + 0.5) / _PER_E)


def _cell(gap_s: float) -> int:
    return min(_CELLS - 1, int(math.log(max(gap_s, _LEAST_S) / _LEAST_S) * _PER_E))


@dataclass(slots=True)
class EngineTotals:
    """Sums over the steps of one engine.

    Attributes:
        phase_s: seconds by what the step was planned as.
        batch_s, blocks_s: batch size and used blocks, integrated over busy time.
        recomputed_tokens: tokens whose KV was lost to preemption or failure.
    """

    steps: int = 0
    busy_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    batch_s: float = 0.0
    blocks_s: float = 0.0
    peak_blocks: int = 0
    phase_s: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    gaps: GapHistogram = field(default_factory=GapHistogram)

    def add(
        self,
        phase: Phase,
        *,
        step_s: float,
        prefill_tokens: int,
        decodes: int,
        preempted: int,
        batch_size: int,
        used_blocks: int,
    ) -> None:
        self.steps += 1
        self.preemptions += preempted
        if not prefill_tokens and not decodes:
            return
        self.busy_s += step_s
        self.phase_s[phase] += step_s
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decodes
        self.batch_s += step_s * batch_size
        self.blocks_s += step_s * used_blocks
        self.peak_blocks = max(self.peak_blocks, used_blocks)
