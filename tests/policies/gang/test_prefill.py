import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.gang.packing import Packing
from policies.gang.prefill import PrefillConfig, PrefillMode, decode_layout, prefill_passes

MODES: list[PrefillMode] = ["padded", "prepacked", "length_ordered"]
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@pytest.mark.parametrize("mode", MODES)
@given(lengths=LENGTHS, most=st.integers(1, 400))
def test_every_prompt_is_in_one_pass_in_its_own_length_and_passes_keep_to_the_budget(
    mode: PrefillMode, lengths: list[int], most: int
) -> None:
    passes = prefill_passes(lengths, PrefillConfig(mode=mode, max_pass_tokens=most))
    assert sorted(index for each in passes for index in each.prompts) == list(range(len(lengths)))
    for each in passes:
        assert [span.stop - span.start for span in each.layout.spans] == [lengths[i] for i in each.prompts]
        assert each.layout.row_count == 1 or each.layout.row_count * each.layout.capacity <= most


@given(lengths=LENGTHS)
def test_packed_rows_are_as_long_as_the_longest_prompt_and_never_more_than_padded_ones(lengths: list[int]) -> None:
    padded, packed = (prefill_passes(lengths, PrefillConfig(mode=mode, max_pass_tokens=10**6)) for mode in MODES[:2])
    assert len(packed) == len(padded) == 1
    assert packed[0].layout.capacity == padded[0].layout.capacity == max(lengths)
    assert packed[0].layout.row_count <= padded[0].layout.row_count == len(lengths)


def test_row_tokens_make_rows_longer_than_the_longest_prompt() -> None:
    (only,) = prefill_passes([4, 4, 4, 4], PrefillConfig(row_tokens=16))
    assert (only.layout.row_count, only.layout.capacity, only.is_packed) == (1, 16, True)
    (only,) = prefill_passes([4, 4, 4, 4], PrefillConfig())
    assert (only.layout.row_count, only.layout.capacity, only.is_packed) == (4, 4, False)


@pytest.mark.parametrize(("packing", "rows"), [("first_fit", [0, 1, 2, 2, 1]), ("best_fit", [0, 1, 2, 2, 2])])
def test_rows_are_filled_by_the_packing_that_was_asked_for(packing: Packing, rows: list[int]) -> None:
    config = PrefillConfig(packing=packing, pack_decode_from=1.0)
    (only,) = prefill_passes([9, 7, 5, 3, 1], config)
    assert [only.layout.spans[only.prompts.index(prompt)].row for prompt in range(5)] == rows
    shared = decode_layout([9, 7, 5, 3, 1], 0, config)
    assert (shared is None) == (packing == "best_fit"), "three tokens a step for each of three rows are not worth it"


@given(lengths=LENGTHS, most=st.integers(1, 400))
def test_rows_of_a_whole_pass_are_one_a_pass_and_without_padding(lengths: list[int], most: int) -> None:
    for each in prefill_passes(lengths, PrefillConfig(max_pass_tokens=most, row_tokens=most)):
        spans = each.layout.spans
        assert each.layout.row_count == 1 and spans[0].start == 0 and spans[-1].stop == each.layout.capacity
        assert all(one.stop == other.start for one, other in pairwise(spans))
        assert each.layout.capacity <= max(most, *lengths)


def test_ordered_by_length_less_than_half_of_a_pass_is_padding() -> None:
    passes = prefill_passes([3, 100, 60, 2, 49, 1], PrefillConfig(mode="length_ordered"))
    assert [each.prompts for each in passes] == [(1, 2), (4,), (0, 3), (5,)]


def test_no_prompts_make_no_pass() -> None:
    assert [prefill_passes([], PrefillConfig(mode=mode)) for mode in MODES] == [[], [], []]


@pytest.mark.parametrize("fields", [{"mode": "best"}, {"packing": "worst"}, {"max_pass_tokens": 0}, {"row_tokens": 0}])
def test_what_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        PrefillConfig(**fields)  # type: ignore[arg-type]


@given(lengths=LENGTHS, room=st.integers(0, 20))
def test_requests_share_rows_in_decode_steps_with_room_for_each(lengths: list[int], room: int) -> None:
    layout = decode_layout(lengths, room, PrefillConfig(pack_decode_from=1.0))
    if layout is not None:
        assert [span.stop - span.start for span in layout.spans] == [length + room for length in lengths]
        assert layout.row_count < len(lengths) and layout.capacity == max(lengths) + room
        assert layout.row_count**2 * layout.most_in_a_row <= len(lengths) ** 2


def test_they_do_where_the_cache_shrinks_by_more_than_a_step_grows() -> None:
    toy = [1] * 9 + [1000]  # the paper's: ten rows become two, of which one has nine requests
    assert decode_layout(toy, 20, PrefillConfig(pack_decode_from=10 / 2 / (18 / 10))) is not None
    assert decode_layout(toy, 20, PrefillConfig(pack_decode_from=2.8)) is None
    assert decode_layout([100] * 8, 20, PrefillConfig(pack_decode_from=1.0)) is None
    assert decode_layout(toy, 20, PrefillConfig(pack_decode_from=math.inf)) is None
    assert decode_layout(toy, 20, PrefillConfig(mode="padded")) is None
    assert decode_layout([5], 20, PrefillConfig(pack_decode_from=1.0)) is None
