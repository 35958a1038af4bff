"""Buckets over prompt lengths: the errata's figures, Algorithm 1's traps, and how the default avoids them."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.gang.buckets import (
    AdaptiveBuckets,
    AdaptiveBucketsConfig,
    PromptBuckets,
    max_safe_requests,
    padding_waste_fraction,
)

PROMPTS = st.lists(st.integers(0, 5000), max_size=80)
HISTORIES = st.lists(st.tuples(PROMPTS, st.integers(0, 32)), max_size=25)
DYADIC = [512] * 60 + [1024] * 60 + [2048] * 60


def make_adaptive(**settings: float) -> AdaptiveBuckets:
    return AdaptiveBuckets(AdaptiveBucketsConfig(**settings))  # type: ignore[arg-type]


def test_a_padded_batch_holds_fewer_requests_than_the_sum_says() -> None:
    """ERRATA 2.2: three by equation 6, one when both are padded to 900."""
    lengths = [100, 900, 50, 400, 310, 200]
    assert max_safe_requests(lengths, 1200, padded=False) == 3
    assert max_safe_requests(lengths, 1200, padded=True) == 1


def test_how_many_are_safe_depends_on_their_order() -> None:
    """ERRATA 2.2: first come 3, shortest first 5, longest first 1."""
    lengths = [100, 900, 50, 400, 310, 200]
    assert max_safe_requests(sorted(lengths), 1200, padded=False) == 5
    assert max_safe_requests(sorted(lengths, reverse=True), 1200, padded=False) == 1


@given(st.lists(st.integers(0, 500), max_size=30), st.integers(0, 4000), st.booleans())
def test_what_is_safe_fits_and_one_more_does_not(lengths: list[int], capacity: int, padded: bool) -> None:
    def needed(count: int) -> int:
        head = lengths[:count]
        return count * max(head, default=0) if padded else sum(head)

    safe = max_safe_requests(lengths, capacity, padded=padded)
    assert needed(safe) <= capacity
    assert safe == len(lengths) or needed(safe + 1) > capacity


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(InputError, match=">= 0"):
        max_safe_requests([1], -1, padded=False)


def test_waste_of_one_batch_is_what_is_padded() -> None:
    assert padding_waste_fraction([100, 50, 50, 200]) == pytest.approx(1 - 400 / 800)
    assert padding_waste_fraction([7, 7]) == padding_waste_fraction([]) == padding_waste_fraction([0, 0]) == 0.0


@given(HISTORIES, st.integers(0, 10**9))
def test_every_prompt_has_exactly_one_bucket_after_any_history(
    history: list[tuple[list[int], int]], prompt_tokens: int
) -> None:
    buckets = make_adaptive(patience=3, min_requests=2)
    for waiting, max_requests in history:
        before = list(waiting)
        edges = buckets.adjust(waiting, max_requests)
        assert waiting == before
        assert edges[0] == 0.0
        assert edges[-1] == math.inf
        assert all(high - low >= 16 for low, high in zip(edges, edges[1:], strict=False))
        assert len(edges) - 1 <= 8
        for tokens in (*waiting, prompt_tokens):
            bucket = buckets.assign(tokens)
            assert edges[bucket] <= tokens < edges[bucket + 1]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=120), HISTORIES)
def test_adjusting_on_the_same_prompts_comes_to_rest(waiting: list[int], history: list[tuple[list[int], int]]) -> None:
    buckets = make_adaptive(patience=3, min_requests=2)
    for earlier, max_requests in history:
        buckets.adjust(earlier, max_requests)
    settled = [buckets.adjust(waiting, 4) for _ in range(60)]
    assert len(set(settled[-20:])) == 1


def test_short_prompts_split_from_long_ones_whoever_is_the_majority() -> None:
    for short in (20, 45, 80):
        edges = make_adaptive().adjust([10] * short + [4000] * (100 - short), 16)
        assert edges == (0.0, 2005.0, math.inf)


def test_dyadic_prompts_get_a_bucket_each_and_no_more() -> None:
    buckets = make_adaptive()
    assert {buckets.adjust(DYADIC, 16) for _ in range(14)} == {(0.0, 768.0, 1536.0, math.inf)}


def test_identical_prompts_stay_in_one_bucket() -> None:
    assert make_adaptive().adjust([100] * 500, 16) == (0.0, math.inf)


def test_boundaries_survive_a_dispatched_batch() -> None:
    buckets = make_adaptive(patience=8)
    edges = buckets.adjust(DYADIC, 16)
    for _ in range(7):
        assert buckets.adjust([], 16) == edges
    assert buckets.adjust(DYADIC, 16) == edges


def test_a_bucket_that_stays_empty_merges_with_its_neighbour_and_no_further() -> None:
    buckets = make_adaptive(patience=4)
    buckets.adjust(DYADIC, 16)
    history = [buckets.adjust([1024] * 60 + [2048] * 60, 16) for _ in range(8)]
    assert history == [(0.0, 768.0, 1536.0, math.inf)] * 3 + [(0.0, 1536.0, math.inf)] * 5


def test_an_almost_empty_bucket_joins_the_neighbour_with_which_least_is_padded() -> None:
    """3 prompts of 800 padded to 4000 add 9600 tokens; 60 of 500 padded to 800 would add 18 000."""
    buckets = make_adaptive(patience=1)
    assert len(buckets.adjust([500] * 60 + [1000] * 60 + [4000] * 60, 16)) == 4
    assert buckets.adjust([500] * 60 + [800] * 3 + [4000] * 60, 16) == (0.0, 750.0, math.inf)


def test_of_all_neighbours_those_most_alike_merge() -> None:
    buckets = make_adaptive()
    assert buckets.adjust(DYADIC, 16) == (0.0, 768.0, 1536.0, math.inf)
    assert buckets.adjust([512] * 60 + [1530] * 60 + [1540] * 60, 16) == (0.0, 768.0, math.inf)


def test_buckets_are_not_cut_narrower_than_allowed() -> None:
    assert make_adaptive().adjust([10] * 50 + [14] * 50, 16) == (0.0, math.inf)
    assert make_adaptive(min_width_tokens=12).adjust([10] * 50 + [14] * 50, 16) == (0.0, 12.0, math.inf)


def test_neighbours_that_became_alike_merge() -> None:
    buckets = make_adaptive()
    assert len(buckets.adjust([100] * 50 + [4000] * 50, 16)) == 3
    assert buckets.adjust([2000] * 50 + [2070] * 50, 16) == (0.0, math.inf)


def test_a_bucket_that_fits_one_batch_is_not_split() -> None:
    assert make_adaptive().adjust([10] * 8 + [4000] * 8, 16) == (0.0, math.inf)
    assert len(make_adaptive().adjust([10] * 8 + [4000] * 8, 15)) == 3


def test_full_memory_does_not_split_single_prompts() -> None:
    """ERRATA 2.11."""
    assert make_adaptive().adjust([5], 0) == make_adaptive().adjust([10, 4000], 0) == (0.0, math.inf)


def prompt_buckets(refit_every: int = 16, **settings: float) -> PromptBuckets:
    return PromptBuckets(AdaptiveBucketsConfig(**settings), refit_every)  # type: ignore[arg-type]


def test_edges_that_another_found_are_adopted_and_a_thin_bucket_s_patience_is_kept_when_they_are_no_news() -> None:
    buckets = prompt_buckets(refit_every=8, patience=3)
    buckets.adopt((0.0, 100.0, math.inf))
    assert (buckets.assign(99), buckets.assign(100)) == (0, 1)
    for tokens in [10] * 22:
        buckets.adopt(buckets.edges)
        buckets.assign(tokens)
    assert buckets.edges == (0.0, math.inf)


@pytest.mark.parametrize(
    "edges", [(), (0.0,), (1.0, math.inf), (0.0, 9.0), (0.0, 9.0, 9.0, math.inf), (0.0, 1.0, 2.0, math.inf)]
)
def test_edges_that_do_not_fit_are_not_adopted(edges: tuple[float, ...]) -> None:
    buckets = prompt_buckets(max_buckets=2)
    assert not buckets.fits(edges)
    with pytest.raises(InputError, match="2 buckets at most"):
        buckets.adopt(edges)


def test_prompt_buckets_adjust_after_as_many_prompts_as_they_were_told() -> None:
    buckets = prompt_buckets()
    for prompt_tokens in [10] * 8 + [1000] * 7:
        buckets.assign(prompt_tokens)
    assert buckets.edges == (0.0, math.inf)
    assert buckets.assign(1000) == 1
    assert buckets.edges == (0.0, 505.0, math.inf)
    with pytest.raises(ConfigError, match="refit_every"):
        prompt_buckets(refit_every=0)


def test_adaptive_buckets_pickle_with_their_edges() -> None:
    buckets = make_adaptive()
    buckets.adjust(DYADIC, 16)
    assert pickle.loads(pickle.dumps(buckets)).adjust(DYADIC, 16) == buckets.adjust(DYADIC, 16)


@pytest.mark.parametrize(
    "settings",
    [
        {"split_fraction": 0.02, "merge_fraction": 0.02},
        {"merge_fraction": -0.1},
        {"split_fraction": 1.1},
        {"min_requests": 0},
        {"patience": 0},
        {"min_width_tokens": 0},
        {"max_buckets": 0},
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        make_adaptive(**settings)
