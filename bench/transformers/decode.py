"""Would packed decode pay? Paper 004, section 4.8: requests share rows of the cache while they generate as well.

Only attention differs between the two, so only attention is measured: one query per request over its keys. Padded, a
row for each request as long as the longest; packed, rows by first-fit decreasing with room for the tokens to come, and
a mask, because every query of a row scans all of it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from policies.packing import PackedBatch

HEADS, WIDTH = 8, 64


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """CPU seconds of a step's attention, and places of the cache, by layout."""

    padded_s: float
    packed_s: float
    padded_places: int
    packed_places: int


def decode_cost(lengths: Sequence[int], new_tokens: int, steps: int = 30) -> DecodeCost:
    """Args:
    lengths: of the prompts.
    new_tokens: room for so many more after each.
    """
    spans = [length + new_tokens for length in lengths]
    packed = PackedBatch.of(spans)
    padded = PackedBatch.from_rows([[index] for index in range(len(spans))], spans, max(spans))
    return DecodeCost(
        _attention_s(padded, steps),
        _attention_s(packed, steps),
        padded.row_count * padded.capacity,
        packed.row_count * packed.capacity,
    )


def _attention_s(layout: PackedBatch, steps: int) -> float:
    """As many queries in each row as the fullest row has requests: rows of a batch are equal."""
    by_row = [[span for span in layout.spans if span.row == row] for row in range(layout.row_count)]
    queries = max(map(len, by_row))
    mask = torch.zeros(layout.row_count, 1, queries, layout.capacity, dtype=torch.bool)
    for row, spans in enumerate(by_row):
        for place in range(queries):
            span = spans[min(place, len(spans) - 1)]
            mask[row, 0, place, span.start : span.stop] = True
    query = torch.randn(layout.row_count, HEADS, queries, WIDTH)
    keys, values = (torch.randn(layout.row_count, HEADS, layout.capacity, WIDTH) for _ in range(2))
    with torch.inference_mode():
        F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        start_s = time.process_time()
        for _ in range(steps):
            F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return (time.process_time() - start_s) / steps
