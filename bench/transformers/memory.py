"""How much memory something takes at its peak, and the largest batch that a given amount of memory holds.

On an accelerator PyTorch counts. On a CPU the kernel does (Linux), from outside: there memory must come from the system
and return to it at once.
"""

import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

import torch

_M_MMAP_THRESHOLD = -3
SMALL_BLOCK, LARGEST_THRESHOLD = 1 << 16, 1 << 25


class Peak:
    """The most memory in use since it was made, or since `again`, above what was in use when it was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        map_blocks_from(SMALL_BLOCK)
        gc.collect()
        self._before = self.again()

    def again(self) -> int:
        """Bytes in use, from which the peak is counted anew."""
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return int(torch.accelerator.memory_allocated())
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts again
        return _status_bytes("VmRSS")

    def bytes(self) -> int:
        on_cpu = self._device.type == "cpu"
        return (_status_bytes("VmHWM") if on_cpu else int(torch.accelerator.max_memory_allocated())) - self._before


def map_blocks_from(threshold_bytes: int) -> None:
    """glibc: blocks from this size on are mapped, and unmapped when they are freed; what is free now goes back."""
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    library.malloc_trim(0)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def largest_batch(peak_bytes: Callable[[int], int], most_bytes: int, first: int = 1) -> int:
    """The largest of the batches of first, 2 first, 4 first, ... requests that takes at most so much; 0 if none does.

    Args:
        peak_bytes: of a batch of that size; asked until the first that takes more.
    """
    size = first
    while peak_bytes(size) <= most_bytes:
        size *= 2
    return size // 2 if size > first else 0
