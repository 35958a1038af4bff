"""The keys and values of a gang batch: one row for each request, right-aligned, so that all rows grow at the same end.

Prefill leaves them wherever its layout put the prompts; here each request's own part is moved into a row of its own.
Room for new columns is kept ahead: a step writes one column instead of copying all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from policies.gang.packing import Span

AHEAD_COLUMNS = 64  # steps between two copies of the cache into larger buffers


@dataclass(frozen=True, slots=True)
class Place:
    """Where one request's first token lies in a cache."""

    cache: Cache
    row: int
    start: int


def move(
    places: Sequence[Place], spans: Sequence[Span], rows: int, columns: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every request's keys and values, by layer, to its span of new buffers. Where they come from is emptied."""
    caches = {id(place.cache): place.cache for place in places}.values()
    moved = []
    for number in range(len(places[0].cache.layers)):
        moved.append(_move_layer(places, spans, (rows, columns), number))
        for cache in caches:  # layer by layer, so that never all of it is there twice
            cache.layers[number] = None
    return moved


def _move_layer(
    places: Sequence[Place], spans: Sequence[Span], shape: tuple[int, int], number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    like = places[0].cache.layers[number]
    keys, values = (
        held.new_zeros(shape[0], held.shape[1], shape[1], held.shape[-1]) for held in (like.keys, like.values)
    )  # they may differ in width
    for place, span in zip(places, spans, strict=True):
        layer, stop = place.cache.layers[number], place.start + span.stop - span.start
        keys[span.row, :, span.start : span.stop] = layer.keys[place.row, :, place.start : stop]
        values[span.row, :, span.start : span.stop] = layer.values[place.row, :, place.start : stop]
    return keys, values


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

    @classmethod
    def of(cls, places: Sequence[Place], lengths: Sequence[int]) -> Self:
        """Out of other caches, which are emptied. Lengths are tokens of each request."""
        columns = max(lengths)
        spans = [Span(row, columns - length, columns) for row, length in enumerate(lengths)]
        layers = [RowsLayer(*moved, columns) for moved in move(places, spans, len(spans), columns + AHEAD_COLUMNS)]
        return cls(Cache(layers=layers), torch.tensor(lengths, device=layers[0].device), columns)

    def places(self) -> list[Place]:
        return [Place(self.cache, row, self.columns - length) for row, length in enumerate(self.lengths.tolist())]

    def mask(self) -> torch.Tensor:
        """Which columns are tokens and not padding, the one to come included: bool, shape (rows, columns + 1)."""
        columns = torch.arange(self.columns + 1, device=self.lengths.device)
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
