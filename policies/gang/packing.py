"""Prepacking: several prompts share a row of a padded batch, kept apart by a mask and by positions that restart.

Source: Zhao et al., "Prepacking: A Simple Method for Fast Prefilling and Increased Throughput in Large Language Models"
(paper 004), sections 3.1 and 3.2. It pays where attention is padded and dense (the predictor, the Transformers engine):
a row costs its capacity squared, so the capacity is the longest prompt. Variable-length kernels have nothing to win.

Departures (ERRATA numbers):
- 4.1 The paper says first-fit decreasing; the library its authors call is best-fit. Both are here (`PACKERS`); counts
  of rows are what compares.
- 4.5 The authors key prompts by the index at which their positions restart, where a one-token prompt overwrites its
  predecessor. Here every prompt has a span of its own, in the original order, and may be one token long or empty.
- 4.6 Pad tokens attend to themselves only, so no softmax runs over an empty row; their position is 0.
- 4.7 Positions may start at an offset (tokens already in a prefix cache); a sliding window acts within a prompt.

Layout of a batch, R rows of C tokens (a, b, c prompts; . padding):

    row 0   a a a a a a a a      positions   0 1 2 3 4 5 6 7
    row 1   b b b b b c c .                  0 1 2 3 4 0 1 0
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.errors import InputError
from policies.types import BoolArray, IntArray

Scalar = TypeVar("Scalar", bound=np.generic)

Packing = Literal["first_fit", "best_fit"]


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put prompts, longest first, each into the first row with room; O(n log n).

    A tree over the rows holds the most room left below each node, so the first row with room is one walk down. Uses at
    most 11/9 of the fewest possible rows plus 6/9 (ERRATA 4.3).

    Returns:
        Rows of indices into ``lengths``: every index once, each row's lengths summing to at most ``capacity``. Equal
        lengths keep their order.

    Raises:
        InputError: a length is negative or above the capacity.
    """
    decreasing = _decreasing(lengths, capacity)
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for index in decreasing:
        row = _first_with_room(room, leaves, lengths[index])
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        _take(room, leaves + row, lengths[index])
    return rows


def _decreasing(lengths: Sequence[int], capacity: int) -> list[int]:
    if lengths and not 0 <= min(lengths) <= max(lengths) <= capacity:
        raise InputError(f"lengths must be between 0 and {capacity}, got {min(lengths)} to {max(lengths)}")
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _first_with_room(room: list[int], leaves: int, length: int) -> int:
    node = 1
    while node < leaves:
        node *= 2
        if room[node] < length:
            node += 1
    return node - leaves


def _take(room: list[int], node: int, length: int) -> None:
    room[node] -= length
    while node > 1:
        node //= 2
        room[node] = max(room[2 * node], room[2 * node + 1])


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put prompts, longest first, each into the fullest row with room; what the authors' code does (ERRATA 4.1).

    Same bound, order of ties, return value and errors as `first_fit_decreasing`; of equally full rows the earliest.
    """
    rows: list[list[int]] = []
    by_room: list[tuple[int, int]] = []
    for index in _decreasing(lengths, capacity):
        place = bisect_left(by_room, (lengths[index], 0))
        if place == len(by_room):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = by_room.pop(place)
        rows[row].append(index)
        insort(by_room, (room - lengths[index], row))
    return rows


PACKERS: Mapping[Packing, Callable[[Sequence[int], int], list[list[int]]]] = {
    "first_fit": first_fit_decreasing,
    "best_fit": best_fit_decreasing,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Where a prompt's tokens lie: tokens start to stop - 1 of a row; start == stop for an empty prompt."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Prompts laid out in rows.

    Attributes:
        spans: one per prompt, in the original order.
        row_count: R; capacity: C, tokens per row.
    """

    spans: tuple[Span, ...]
    row_count: int
    capacity: int

    @classmethod
    def of(cls, lengths: Sequence[int], capacity: int | None = None, packing: Packing = "first_fit") -> Self:
        """Pack; without a capacity rows are as long as the longest prompt.

        Raises:
            InputError: a length is negative or above the capacity.
        """
        longest = max(lengths, default=0) if capacity is None else capacity
        return cls.from_rows(PACKERS[packing](lengths, longest), lengths, longest)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> Self:
        """Lay out given rows of prompt indices, each row's prompts one after the other.

        Raises:
            InputError: an index is missing or doubled, or a row overflows.
        """
        spans: dict[int, Span] = {}
        for row, indices in enumerate(rows):
            stop = 0
            for index in indices:
                start, stop = stop, stop + lengths[index]
                spans[index] = Span(row, start, stop)
            if stop > capacity:
                raise InputError(f"row {row} holds {stop} tokens, capacity is {capacity}")
        if sorted(index for indices in rows for index in indices) != list(range(len(lengths))):
            raise InputError(f"rows must hold each of the {len(lengths)} prompts once, got {rows}")
        return cls(tuple(spans[index] for index in range(len(lengths))), len(rows), capacity)

    @property
    def places(self) -> int:
        """Tokens that a kernel computes, padding included: R * C."""
        return self.row_count * self.capacity

    @property
    def most_in_a_row(self) -> int:
        """Prompts of the row that holds most of them."""
        return max(Counter(span.row for span in self.spans).values(), default=0)

    def segments(self) -> IntArray:
        """Which prompt each token belongs to, counted from 1; 0 is padding. Shape (R, C)."""
        segments = np.zeros((self.row_count, self.capacity), dtype=np.int64)
        for number, span in enumerate(self.spans, start=1):
            segments[span.row, span.start : span.stop] = number
        return segments

    def positions(self, offsets: Sequence[int] | None = None) -> IntArray:
        """Restart positions: each prompt counts from 0, or from its offset; padding stays 0. Shape (R, C).

        Args:
            offsets: per prompt, tokens of it that were computed before.

        Raises:
            InputError: not one offset per prompt.
        """
        if offsets is not None and len(offsets) != len(self.spans):
            raise InputError(f"offsets must have one entry per prompt ({len(self.spans)}), got {len(offsets)}")
        positions = np.zeros((self.row_count, self.capacity), dtype=np.int64)
        for number, span in enumerate(self.spans):
            first = offsets[number] if offsets is not None else 0
            positions[span.row, span.start : span.stop] = np.arange(first, first + span.stop - span.start)
        return positions

    def attention_mask(self, window: int | None = None, *, causal: bool = True) -> BoolArray:
        """Independent mask: True where query q (second axis) may attend to key k (third). Shape (R, C, C).

        Only tokens of one prompt see each other: those before and itself if causal, all of them otherwise (an encoder
        such as BERT); with a window only keys less than ``window`` tokens away. Padding sees itself.

        Raises:
            InputError: window < 1.
        """
        if window is not None and window < 1:
            raise InputError(f"window must be >= 1, got {window}")
        segments = self.segments()
        mask: BoolArray = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
        columns = np.arange(self.capacity)
        distance = columns[:, None] - columns
        if causal:
            mask &= distance >= 0
        if window is not None:
            mask &= np.abs(distance) < window
        mask |= distance == 0
        return mask

    def pack(self, prompts: Sequence[ArrayLike], padding: int) -> IntArray:
        """Token ids in rows, shape (R, C), gaps filled with ``padding``.

        Raises:
            InputError: a prompt has not the length that it was packed with, or their number differs.
        """
        if len(prompts) != len(self.spans):
            raise InputError(f"prompts must be the {len(self.spans)} that were packed, got {len(prompts)}")
        tokens = np.full((self.row_count, self.capacity), padding, dtype=np.int64)
        for span, prompt in zip(self.spans, prompts, strict=True):
            if np.size(prompt) != span.stop - span.start:
                raise InputError(f"prompt must have {span.stop - span.start} tokens, got {np.size(prompt)}")
            tokens[span.row, span.start : span.stop] = prompt
        return tokens

    def unpack(self, rows: NDArray[Scalar]) -> list[NDArray[Scalar]]:
        """Each prompt's own part of a result of shape (R, C, ...), in the original order, as views."""
        return [rows[span.row, span.start : span.stop] for span in self.spans]
