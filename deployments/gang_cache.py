"""The keys and values of a gang batch: one row for each request, right-aligned, so that all rows grow at the same end.

Prefill leaves them wherever its layout put the prompts; here each request's own part is moved into a row of its own.
Room for new columns is kept ahead: a step writes one column instead of copying all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from policies.prefill import PrefillPass

AHEAD_COLUMNS = 64


class RowsLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not checked
    """One layer's keys and values, shape (rows, heads, columns, width of a head), in buffers with room ahead."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, columns: int) -> None:
        super().__init__()
        self._buffers = [keys, values]
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self._show(columns)

    def _show(self, columns: int) -> None:
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self._buffers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[-2]
        stop = start + key_states.shape[-2]
        if stop > self._buffers[0].shape[-2]:
            for index, shown in enumerate((self.keys, self.values)):
                self._buffers[index] = shown.new_zeros(*shown.shape[:2], stop + AHEAD_COLUMNS, shown.shape[-1])
                self._buffers[index][:, :, :start] = shown
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values

    def keep(self, rows: torch.Tensor, first_column: int) -> None:
        """Only these rows, without the columns before first_column."""
        columns = self.keys.shape[-2] - first_column
        self._buffers = [buffer[rows, :, first_column:] for buffer in self._buffers]
        self._show(columns)


class RowsCache:
    """Attributes:
    cache: for the model.
    lengths: int64, shape (rows,); tokens held of each request. What lies before them in its row is padding.
    columns: of every row.
    """

    def __init__(self, cache: Cache, lengths: torch.Tensor, columns: int) -> None:
        self.cache, self.lengths, self.columns = cache, lengths, columns

    def mask(self, new_columns: int = 1) -> torch.Tensor:
        """Which columns are tokens and not padding, those to come included: bool, shape (rows, columns + new)."""
        columns = torch.arange(self.columns + new_columns, device=self.lengths.device)
        return columns >= (self.columns - self.lengths)[:, None]

    def grown(self) -> None:
        """A step has added one token to every row."""
        self.lengths += 1
        self.columns += 1

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all others, and the columns that are padding for everyone then."""
        index = torch.tensor(rows, device=self.lengths.device)
        self.lengths = self.lengths[index]
        first_column = self.columns - int(self.lengths.max())
        for layer in self.cache.layers:
            layer.keep(index, first_column)
        self.columns -= first_column


def unpack(passes: Sequence[PrefillPass], caches: Sequence[Cache], lengths: Sequence[int]) -> RowsCache:
    """Each request's keys and values out of the passes' caches, which are emptied, into a row of its own.

    Args:
        lengths: tokens of every prompt, in the batch's order.
    """
    columns = max(lengths)
    layers = [_unpack_layer(passes, caches, layer, len(lengths), columns) for layer in range(len(caches[0].layers))]
    device = layers[0].keys.device
    return RowsCache(Cache(layers=layers), torch.tensor(lengths, device=device), columns)


def _unpack_layer(
    passes: Sequence[PrefillPass], caches: Sequence[Cache], layer: int, rows: int, columns: int
) -> RowsLayer:
    packed = [(cache.layers[layer].keys, cache.layers[layer].values) for cache in caches]
    keys, values = buffers = [
        like.new_zeros(rows, like.shape[1], columns + AHEAD_COLUMNS, like.shape[-1]) for like in packed[0]
    ]  # keys and values may differ in width
    for row, number, source, start, stop in _places(passes):
        for buffer, states in zip(buffers, packed[number], strict=True):
            buffer[row, :, columns - (stop - start) : columns] = states[source, :, start:stop]
    for cache in caches:  # layer by layer, so that never all of it is there twice
        cache.layers[layer] = None
    return RowsLayer(keys, values, columns)


def _places(passes: Sequence[PrefillPass]) -> Iterator[tuple[int, int, int, int, int]]:
    """Of every request: its row, and its pass, row, start and stop there."""
    for number, each in enumerate(passes):
        for row, span in zip(each.prompts, each.layout.spans, strict=True):
            yield row, number, span.row, span.start, span.stop
