"""Decode steps of a gang whose requests have rows of their own, against packed rows: paper 004, section 4.8.

Whole steps of the model, masks and all, from the same keys and values, and the move to a new layout shared out over the
steps until the next. In turn, at several moments of a gang's life: when every request has as many answered tokens.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import Cache

from bench.session import turns
from bench.transformers.memory import Peak
from deployments.engines.transformers.cache import AHEAD_COLUMNS, RowsCache, RowsLayer
from deployments.engines.transformers.model import PACKED_ROOM, GangCache, GangModel
from deployments.engines.transformers.packed_cache import PackedCache
from policies.gang.packing import PackedBatch


class Decodes:
    """One model whose layers all have full attention."""

    def __init__(self, model: Any, gang: GangModel) -> None:
        self._model, self._gang = model, gang

    def measure(self, lengths: Sequence[int], steps: int, turn: int) -> dict[str, float]:
        """CPU seconds of a step by layout; places of the cache, and tokens that a step computes.

        Args:
            lengths: tokens held of every request.
            steps: at most PACKED_ROOM.
            turn: the layouts take turns at being first.
        """
        layout = _layout(lengths)
        makers = _makers(layout)
        found = {}
        for name in turns(sorted(makers), turn):
            found[f"{name}_s"] = self._step_s(lengths, steps, makers[name])
        return found | {
            "requests": float(len(lengths)),
            "padded_places": float(len(lengths) * layout.capacity),
            "packed_places": float(layout.row_count * layout.capacity),
            "packed_tokens": float(layout.row_count * layout.most_in_a_row),
        }

    def memory(self, lengths: Sequence[int], steps: int) -> dict[str, float]:
        """Bytes of keys and values and of steps at their peak, by layout, without the move from one to the other."""
        return {f"{name}_bytes": self._bytes(lengths, steps, made) for name, made in _makers(_layout(lengths)).items()}

    def _bytes(self, lengths: Sequence[int], steps: int, lay_out: Callable[[RowsCache], GangCache]) -> float:
        token_ids = torch.ones(len(lengths), dtype=torch.long)
        peak = Peak(self._gang.device)
        with torch.inference_mode():
            held = lay_out(self._rows(lengths))
            peak.again()
            for _ in range(steps):
                _, held = self._gang.decode(token_ids, held)
        return float(peak.bytes())

    def _step_s(self, lengths: Sequence[int], steps: int, lay_out: Callable[[RowsCache], GangCache]) -> float:
        rows = self._rows(lengths)
        token_ids = torch.ones(len(lengths), dtype=torch.long)
        with torch.inference_mode():
            start_s = time.thread_time()
            held = lay_out(rows)
            moved_s = time.thread_time()
            for _ in range(steps):
                _, held = self._gang.decode(token_ids, held)
            return (time.thread_time() - moved_s) / steps + (moved_s - start_s) / PACKED_ROOM

    def _rows(self, lengths: Sequence[int]) -> RowsCache:
        """Random keys and values."""
        config, columns = self._model.config.get_text_config(), max(lengths)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (2, len(lengths), config.num_key_value_heads, columns + AHEAD_COLUMNS, width)
        made = (torch.randn(shape, dtype=self._model.dtype) for _ in range(config.num_hidden_layers))
        layers = [RowsLayer(keys, values, columns) for keys, values in made]
        return RowsCache(Cache(layers=layers), torch.tensor(lengths), columns)


def _layout(lengths: Sequence[int]) -> PackedBatch:
    return PackedBatch.of([length + PACKED_ROOM for length in lengths])


def _makers(layout: PackedBatch) -> dict[str, Callable[[RowsCache], GangCache]]:
    return {
        "padded": lambda rows: rows,
        "packed": lambda rows: PackedCache.of(rows.places(), layout, PACKED_ROOM),
    }
