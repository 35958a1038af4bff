"""Prefill of the same batches by each layout, in turn: CPU or device time, and how much memory it takes at its peak."""

import gc
import time
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import torch

from bench.session import turns
from bench.transformers.memory import LARGEST_THRESHOLD, Peak, map_blocks_from
from deployments.engines.transformers.model import GangModel
from policies.gang.prefill import PrefillConfig, PrefillMode, prefill_passes

MODES: tuple[PrefillMode, ...] = get_args(PrefillMode)
WHOLE_BATCH = 1 << 30  # one pass for a batch, as in the paper


class Prefills:
    """One model under every layout."""

    def __init__(self, model: Any) -> None:
        self._models = {mode: GangModel(model, PrefillConfig(mode=mode, max_pass_tokens=WHOLE_BATCH)) for mode in MODES}

    def measure(self, lengths: Sequence[int], turn: int, with_memory: bool) -> dict[str, float]:
        """Seconds, tokens and peak bytes by layout, for a batch of random prompts of these lengths.

        Args:
            turn: the layouts take turns at being first.
        """
        prompts = self.prompts(lengths, turn)
        found: dict[str, float] = {"tokens": float(sum(lengths))}
        for mode in turns(MODES, turn):
            found[f"{mode}_s"] = self._seconds(mode, prompts)
            if with_memory:
                found[f"{mode}_bytes"] = float(self.peak_bytes(mode, prompts))
            found[f"{mode}_tokens"] = float(_computed_tokens(mode, lengths))
        return found

    def _seconds(self, mode: PrefillMode, prompts: Sequence[Sequence[int]]) -> float:
        model = self._models[mode]
        map_blocks_from(LARGEST_THRESHOLD)
        gc.collect()
        start_s = _now_s(model.device)
        model.prefill(prompts)
        return _now_s(model.device) - start_s

    def peak_bytes(self, mode: PrefillMode, prompts: Sequence[Sequence[int]]) -> int:
        """In a run of its own."""
        model = self._models[mode]
        peak = Peak(model.device)
        model.prefill(prompts)
        return peak.bytes()

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random ones of these lengths."""
        generator, vocabulary = np.random.default_rng(seed), self._models["padded"].vocab_size
        return [generator.integers(vocabulary, size=length).tolist() for length in lengths]


def _computed_tokens(mode: PrefillMode, lengths: Sequence[int]) -> int:
    passes = prefill_passes(lengths, PrefillConfig(mode=mode, max_pass_tokens=WHOLE_BATCH))
    return sum(each.layout.places for each in passes)


def _now_s(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()
