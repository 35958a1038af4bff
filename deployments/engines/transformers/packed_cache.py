"""The keys and values of a gang batch whose requests share rows while they generate: paper 004, section 4.8.

A step takes as many tokens of every row as the fullest row has requests; a 4-D mask keeps them apart, and a sliding
window acts within a request. Each request has room behind its tokens; when that is used up, the batch is laid out anew.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Self

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from deployments.engines.transformers.cache import Place, move
from policies.gang.packing import PackedBatch, Span


class _PackedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not checked
    """One layer's keys and values, shape (rows, heads, columns, width of a head).

    Attributes:
        at: of every request, its row, its slot in a step and the column of its next token; int64, shape (requests,).
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.keys, self.values, self._at = keys, values, at
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, slots, columns = self._at
        self.keys[rows, :, columns] = key_states[rows, :, slots]
        self.values[rows, :, columns] = value_states[rows, :, slots]
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset for a mask: the columns to come are there already."""
        return self.keys.shape[-2], 0


class PackedCache:
    """Attributes:
    cache: for the model.
    lengths: int64, shape (requests,); tokens held of each.
    rows, slots: int64, shape (requests,); where each request's token stands in a step's input, shape (R, slots).
    room: steps until it must be laid out anew.
    """

    def __init__(self, layout: PackedBatch, moved: Sequence[tuple[torch.Tensor, torch.Tensor]], room: int) -> None:
        """Spans of the layout end with the room for tokens to come."""
        self.room, self._layout = room, layout
        spans, device = layout.spans, moved[0][0].device
        free = [count() for _ in range(layout.row_count)]
        self.rows = torch.tensor([span.row for span in spans], device=device)
        self.slots = torch.tensor([next(free[span.row]) for span in spans], device=device)
        self._starts = torch.tensor([span.start for span in spans], device=device)
        self._columns = torch.tensor([span.stop - room for span in spans], device=device)  # of the next tokens
        self._shape = (layout.row_count, layout.most_in_a_row)
        at = (self.rows, self.slots, self._columns)
        self.cache = Cache(layers=[_PackedLayer(keys, values, at) for keys, values in moved])

    @classmethod
    def of(cls, places: Sequence[Place], layout: PackedBatch, room: int) -> Self:
        """Out of other caches, which are emptied."""
        held = [Span(span.row, span.start, span.stop - room) for span in layout.spans]
        return cls(layout, move(places, held, layout.row_count, layout.capacity), room)

    @property
    def lengths(self) -> torch.Tensor:
        return self._columns - self._starts

    def places(self) -> list[Place]:
        return [Place(self.cache, span.row, span.start) for span in self._layout.spans]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """What belongs to each request, shape (requests,), as a step's input; empty slots hold 0."""
        inputs = values.new_zeros(self._shape)
        inputs[self.rows, self.slots] = values
        return inputs

    def mask(self, window: int | None) -> torch.Tensor:
        """What each slot sees of its row, the token to come included: bool, shape (R, 1, slots, columns).

        Empty slots see the first column, so that no softmax runs over nothing.
        """
        columns = torch.arange(self._layout.capacity, device=self.rows.device)
        first = self._starts if window is None else torch.maximum(self._starts, self._columns - window + 1)
        mask = (columns == 0).repeat(self._shape[0], 1, self._shape[1], 1)
        mask[self.rows, 0, self.slots] = (columns >= first[:, None]) & (columns <= self._columns[:, None])
        return mask

    def grown(self) -> None:
        """A step has added one token to every request."""
        self._columns += 1
        self.room -= 1
