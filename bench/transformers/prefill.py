"""Prefill of the same batches by each layout, in turn: CPU or device time, and how much memory it takes at its peak."""

import ctypes
import gc
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from bench.session import turns
from deployments.engines.transformers.model import GangModel
from policies.gang.prefill import PrefillConfig, PrefillMode, prefill_passes

MODES: tuple[PrefillMode, ...] = get_args(PrefillMode)
_M_MMAP_THRESHOLD = -3
SMALL_BLOCK, LARGEST_THRESHOLD = 1 << 16, 1 << 25
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
        generator, vocabulary = np.random.default_rng(turn), self._models["padded"].vocab_size
        prompts = [generator.integers(vocabulary, size=length).tolist() for length in lengths]
        found: dict[str, float] = {"tokens": float(sum(lengths))}
        for mode in turns(MODES, turn):
            found[f"{mode}_s"] = self._seconds(mode, prompts)
            if with_memory:
                found[f"{mode}_bytes"] = float(self._peak_bytes(mode, prompts))
            found[f"{mode}_tokens"] = float(_computed_tokens(mode, lengths))
        return found

    def _seconds(self, mode: PrefillMode, prompts: Sequence[Sequence[int]]) -> float:
        model = self._models[mode]
        _map_blocks_from(LARGEST_THRESHOLD)
        gc.collect()
        start_s = _now_s(model.device)
        model.prefill(prompts)
        return _now_s(model.device) - start_s

    def _peak_bytes(self, mode: PrefillMode, prompts: Sequence[Sequence[int]]) -> int:
        """In a run of its own: to be seen from outside, memory must come from the system and return to it at once."""
        model = self._models[mode]
        _map_blocks_from(SMALL_BLOCK)
        gc.collect()
        before = _start_of_peak(model.device)
        model.prefill(prompts)
        return _peak(model.device) - before


def _computed_tokens(mode: PrefillMode, lengths: Sequence[int]) -> int:
    passes = prefill_passes(lengths, PrefillConfig(mode=mode, max_pass_tokens=WHOLE_BATCH))
    return sum(each.layout.places for each in passes)


def _map_blocks_from(threshold_bytes: int) -> None:
    """glibc: blocks from this size on are mapped, and unmapped when they are freed; what is free now goes back."""
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    library.malloc_trim(0)


def _now_s(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def _start_of_peak(device: torch.device) -> int:
    """Bytes in use, from which a peak is counted anew."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return int(torch.accelerator.memory_allocated())
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again
    return _status_bytes("VmRSS")


def _peak(device: torch.device) -> int:
    return _status_bytes("VmHWM") if device.type == "cpu" else int(torch.accelerator.max_memory_allocated())


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
