"""Packing prompts into rows, the masks and positions that keep them apart, and a real attention over them."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InputError
from policies.gang.packing import BoolArray, PackedBatch, Span, best_fit_decreasing, first_fit_decreasing
from policies.types import FloatArray, IntArray

Packer = Callable[[list[int], int], list[list[int]]]

PACKERS = pytest.mark.parametrize("packer", [first_fit_decreasing, best_fit_decreasing])
PROMPTS = st.lists(st.integers(0, 12), max_size=14)


@PACKERS
@given(lengths=st.lists(st.integers(0, 100), max_size=60), spare=st.integers(0, 100))
def test_rows_are_a_partition_within_capacity(packer: Packer, lengths: list[int], spare: int) -> None:
    capacity = max(lengths, default=0) + spare
    before = list(lengths)
    rows = packer(lengths, capacity)
    assert lengths == before
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[index] for index in row) <= capacity for row in rows)
    assert all(lengths[first] >= lengths[second] for row in rows for first, second in pairwise(row))


@PACKERS
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_rows_are_at_most_eleven_ninths_of_the_fewest(packer: Packer, lengths: list[int]) -> None:
    """The fewest are known where the long half of a pair and its complement fill rows exactly."""
    paired = [part for length in lengths for part in (100 + length, 100 - length) if part]
    assert len(packer(paired, 200)) <= 11 / 9 * len(lengths) + 6 / 9


@PACKERS
@given(lengths=st.lists(st.integers(0, 30), max_size=40), spare=st.integers(0, 20))
def test_rows_are_those_that_a_search_through_all_of_them_finds(packer: Packer, lengths: list[int], spare: int) -> None:
    capacity = max(lengths, default=0) + spare
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= capacity]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        fullest = max(fitting, key=lambda row: sum(lengths[i] for i in row))
        (fitting[0] if packer is first_fit_decreasing else fullest).append(index)
    assert packer(lengths, capacity) == rows


@PACKERS
def test_the_family_on_which_decreasing_heuristics_need_eleven_rows_for_nine(packer: Packer) -> None:
    """ERRATA 4.3: 6 x (501, 252, 251) and 12 x 248 into rows of 1000."""
    lengths = [501, 252, 251] * 6 + [248] * 12
    assert math.ceil(sum(lengths) / 1000) == 9
    assert len(packer(lengths, 1000)) == 11


def test_first_fit_and_best_fit_differ_in_rows_but_not_in_their_number() -> None:
    """ERRATA 4.1: compare counts, not partitions."""
    lengths = np.random.default_rng(7).integers(1, 513, size=400).tolist()
    first, best = first_fit_decreasing(lengths, 512), best_fit_decreasing(lengths, 512)
    assert first != best
    assert len(first) == len(best)


@PACKERS
def test_empty_and_single_token_prompts_are_packed_too(packer: Packer) -> None:
    """ERRATA 4.5: in the authors' code a one-token prompt overwrites its predecessor."""
    assert sorted(index for row in packer([0, 1, 1, 3, 0], 3) for index in row) == [0, 1, 2, 3, 4]
    assert packer([0, 0], 0) == [[0, 1]]
    assert packer([], 8) == []


@PACKERS
@pytest.mark.parametrize("lengths", [[5, 9], [-1, 3]])
def test_a_prompt_that_fits_no_row_is_refused(packer: Packer, lengths: list[int]) -> None:
    with pytest.raises(InputError, match="lengths must be between 0 and 8"):
        packer(lengths, 8)


def test_the_toy_batch_of_the_paper_takes_two_rows() -> None:
    """Table 1: nine prompts of length 1 and one of length 1000 (full batching: ten rows)."""
    packed = PackedBatch.of([1] * 9 + [1000])
    assert (packed.row_count, packed.capacity) == (2, 1000)
    assert [span.stop - span.start for span in packed.spans] == [1] * 9 + [1000]
    assert len(set(packed.spans)) == 10


def test_positions_restart_with_every_prompt() -> None:
    packed = PackedBatch.from_rows([[0], [1, 2]], [8, 5, 2], 8)
    assert packed.spans == (Span(0, 0, 8), Span(1, 0, 5), Span(1, 5, 7))
    assert packed.positions().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 0]]
    assert packed.segments().tolist() == [[1] * 8, [2] * 5 + [3] * 2 + [0]]


def test_positions_continue_after_cached_tokens() -> None:
    """ERRATA 4.7."""
    packed = PackedBatch.from_rows([[0, 1]], [2, 3], 6)
    assert packed.positions([16, 0]).tolist() == [[16, 17, 0, 1, 2, 0]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]]),
        ({"causal": False}, [[1, 1, 1, 0, 0, 0]] * 3 + [[0, 0, 0, 1, 1, 0]] * 2),
        (
            {"window": 2},
            [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0]],
        ),
    ],
    ids=["causal", "encoder", "window"],
)
def test_masks_keep_within_a_prompt_and_padding_sees_itself(
    settings: dict[str, Any], expected: list[list[int]]
) -> None:
    packed = PackedBatch.from_rows([[0, 1]], [3, 2], 6)
    assert packed.attention_mask(**settings)[0].astype(int).tolist() == [*expected, [0, 0, 0, 0, 0, 1]]


@given(PROMPTS, st.integers(0, 5), st.booleans(), st.one_of(st.none(), st.integers(1, 4)))
def test_no_token_sees_another_prompt_and_none_sees_nothing(
    lengths: list[int], spare: int, causal: bool, window: int | None
) -> None:
    """ERRATA 4.6: an all-masked row would make its softmax NaN."""
    packed = PackedBatch.of(lengths, max(lengths, default=0) + spare)
    mask, segments = packed.attention_mask(window, causal=causal), packed.segments()
    assert mask.any(axis=2).all()
    for row, query, key in np.argwhere(mask):
        assert segments[row, query] == segments[row, key]
        assert segments[row, query] > 0 or query == key


@given(PROMPTS, st.integers(0, 5))
def test_every_prompt_comes_back_in_its_order(lengths: list[int], spare: int) -> None:
    prompts: list[IntArray] = [100 * number + np.arange(length) for number, length in enumerate(lengths)]
    packed = PackedBatch.of(lengths, max(lengths, default=0) + spare)
    rows = packed.pack(prompts, padding=-7)
    assert rows.shape == (packed.row_count, packed.capacity)
    assert np.count_nonzero(rows == -7) == rows.size - sum(lengths)
    for prompt, unpacked in zip(prompts, packed.unpack(rows), strict=True):
        assert prompt.tolist() == unpacked.tolist()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0], [1]], "each of the 3 prompts once"),
        ([[0, 1], [1, 2]], "each of the 3 prompts once"),
        ([[0, 1, 2]], "row 0 holds 12 tokens, capacity is 8"),
    ],
)
def test_rows_that_lose_double_or_overfill_are_refused(rows: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PackedBatch.from_rows(rows, [5, 3, 4], 8)


def test_prompts_must_be_those_that_were_packed_with_an_offset_each_and_a_window_that_holds_something() -> None:
    packed = PackedBatch.of([2, 1])
    with pytest.raises(InputError, match="one entry per prompt"):
        packed.positions([1])
    with pytest.raises(InputError, match="window"):
        packed.attention_mask(window=0)
    with pytest.raises(InputError, match="must be the 2 that were packed"):
        packed.pack([[1, 2]], padding=0)
    with pytest.raises(InputError, match="must have 1 tokens, got 2"):
        packed.pack([[1, 2], [3, 4]], padding=0)


def attention(tokens: IntArray, positions: IntArray, mask: BoolArray) -> FloatArray:
    """One head of dot-product attention over embeddings of token and position; tokens shape (C,), mask (C, C)."""
    rng = np.random.default_rng(23)
    embedded = rng.normal(size=(64, 8))[tokens] + rng.normal(size=(64, 8))[positions]
    scores = np.where(mask, embedded @ embedded.T, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: FloatArray = weights / weights.sum(axis=1, keepdims=True) @ embedded
    return result


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10).filter(any), st.integers(0, 4))
def test_attention_over_packed_rows_equals_attention_prompt_by_prompt(lengths: list[int], spare: int) -> None:
    """ERRATA 4.8: equal to rounding."""
    prompts: list[IntArray] = [(7 * number + np.arange(length)) % 64 for number, length in enumerate(lengths)]
    packed = PackedBatch.of(lengths, max(lengths) + spare)
    inputs = (packed.pack(prompts, padding=0), packed.positions(), packed.attention_mask())
    rows = np.array([attention(*row) for row in zip(*inputs, strict=True)])
    for prompt, found in zip(prompts, packed.unpack(rows), strict=True):
        if len(prompt):
            alone = attention(prompt, np.arange(len(prompt)), np.tri(len(prompt), dtype=bool))
            np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)
