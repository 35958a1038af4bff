"""Buckets over prompt lengths: the errata's figures, Algorithm 1's traps, and how the default avoids them."""

import math
import pickle
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.gang.buckets import (
    AdaptiveBuckets,
    AdaptiveBucketsConfig,
    BucketServeBuckets,
    BucketServeConfig,
    PaddingMeasure,
    PromptBuckets,
    bucket_padding_fraction,
    kv_bytes_per_token,
    max_safe_requests,
    optimal_bucket_edges,
    padding_waste_fraction,
)
from policies.types import FloatArray

PROMPTS = st.lists(st.integers(0, 5000), max_size=80)
HISTORIES = st.lists(st.tuples(PROMPTS, st.integers(0, 32)), max_size=25)
DYADIC = [512] * 60 + [1024] * 60 + [2048] * 60


def lognormal_prompts() -> FloatArray:
    """Lognormal with mu 6 and sigma 1, up to 8192 tokens: the law behind ERRATA 2.5's figures."""
    normal = NormalDist(6.0, 1.0)
    prompts: FloatArray = np.exp([normal.inv_cdf((i + 0.5) / 40_000) for i in range(40_000)])
    return np.minimum(prompts, 8191.0)


def dyadic_edges(buckets: int) -> list[float]:
    """What repeated bisection of the lowest bucket makes of [0, 8192)."""
    return [0.0, *(8192.0 / 2**level for level in range(buckets - 1, -1, -1))]


def make_bucketserve(l_max: int = 4096) -> BucketServeBuckets:
    return BucketServeBuckets(BucketServeConfig(l_max=l_max))


def make_adaptive(**settings: float) -> AdaptiveBuckets:
    return AdaptiveBuckets(AdaptiveBucketsConfig(**settings))  # type: ignore[arg-type]


def test_llama_3_8b_keeps_128_kib_per_token() -> None:
    """ERRATA 2.1: 8 KV heads, not 32 attention heads (which would give 524 288)."""
    assert kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, bytes_per_element=2) == 131_072


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "bytes_per_element"])
def test_a_model_without_size_has_no_kv_cache(name: str) -> None:
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 2, "bytes_per_element": 2} | {name: 0}
    with pytest.raises(InputError, match=name):
        kv_bytes_per_token(**sizes)


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


@pytest.mark.parametrize(("measure", "cuts"), [("ratio", [0.3125, 0.625]), ("tokens", [1 / 3, 2 / 3])])
def test_three_buckets_of_uniform_prompts_are_cut_where_the_first_order_conditions_say(
    measure: PaddingMeasure, cuts: list[float]
) -> None:
    """ERRATA 2.3; equation 4 has no solution but empty buckets."""
    uniform = (np.arange(30_000) + 0.5) / 30_000
    assert optimal_bucket_edges(uniform, 3, measure=measure)[1:-1] == pytest.approx(cuts, abs=2e-3)


@pytest.mark.parametrize(("k", "bisection", "optimum"), [(4, 0.572, 0.402), (8, 0.280, 0.235)])
def test_bisection_wastes_more_than_the_optimum_on_lognormal_prompts(k: int, bisection: float, optimum: float) -> None:
    """ERRATA 2.5, in the measure of equation 3."""
    prompts = lognormal_prompts()
    assert bucket_padding_fraction(dyadic_edges(k), prompts, "ratio") == pytest.approx(bisection, abs=2e-3)
    best = optimal_bucket_edges(prompts, k, measure="ratio")
    assert bucket_padding_fraction(best, prompts, "ratio") == pytest.approx(optimum, abs=2e-3)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=25), st.integers(1, 4), st.sampled_from(["tokens", "ratio"]))
def test_no_other_cuts_waste_less_than_the_optimal_ones(lengths: list[int], k: int, measure: PaddingMeasure) -> None:
    distinct = sorted(set(lengths))
    cuts = combinations(distinct[1:], min(k, len(distinct)) - 1)
    least = min(wasted([0, *cut, 41], lengths, measure) for cut in cuts)
    edges = optimal_bucket_edges(lengths, k, measure=measure)
    assert (np.diff(edges) > 0.0).all()
    assert wasted(edges.tolist(), lengths, measure) == pytest.approx(least)


def wasted(edges: list[float], lengths: list[int], measure: PaddingMeasure) -> float:
    """Summed padding by its definition: tokens, or shares of the longest in each bucket."""
    total = 0.0
    for low, high in zip(edges, edges[1:], strict=False):
        members = [length for length in lengths if low <= length < high]
        longest = max(members, default=0)
        padding = [longest - length for length in members]
        total += sum(padding) if measure == "tokens" or not longest else sum(padding) / longest
    return total


@given(st.lists(st.integers(0, 40), min_size=1, max_size=25))
def test_one_bucket_pads_as_one_batch(lengths: list[int]) -> None:
    assert bucket_padding_fraction([0.0, np.inf], lengths) == pytest.approx(padding_waste_fraction(lengths))


def test_no_buckets_are_refused() -> None:
    with pytest.raises(InputError, match="k must be >= 1"):
        optimal_bucket_edges([1, 2], 0)


# Algorithm 1 to the letter


def test_algorithm_1_splits_where_most_prompts_lie_below_the_middle() -> None:
    buckets = make_bucketserve()
    assert buckets.adjust([100] * 12 + [3000] * 8, 10) == (0.0, 2048.0, 4096.0)
    assert (buckets.assign(100), buckets.assign(2048), buckets.assign(4095)) == (0, 1, 1)


def test_algorithm_1_splits_one_level_per_call() -> None:
    """ERRATA 2.9."""
    buckets = make_bucketserve()
    assert [len(buckets.adjust([100] * 50, 16)) - 1 for _ in range(7)] == [2, 3, 4, 5, 6, 6, 6]


def test_algorithm_1_has_no_bucket_for_the_longest_prompts() -> None:
    """ERRATA 2.12."""
    assert make_bucketserve().assign(4096) is None


def test_algorithm_1_never_splits_short_from_long_when_the_long_are_the_majority() -> None:
    """ERRATA 2.7."""
    buckets = make_bucketserve()
    for _ in range(10):
        assert buckets.adjust([10] * 45 + [4000] * 55, 16) == (0.0, 4096.0)


def test_algorithm_1_splits_for_ever_on_dyadic_prompts() -> None:
    """ERRATA 2.8."""
    buckets = make_bucketserve()
    assert [len(buckets.adjust(DYADIC, 16)) - 1 for _ in range(14)] == list(range(2, 16))


def test_algorithm_1_forgets_every_boundary_once_the_queue_is_short() -> None:
    """ERRATA 2.10."""
    buckets = make_bucketserve()
    buckets.adjust([100] * 50, 16)
    assert buckets.adjust([100] * 15, 16) == (0.0, 4096.0)


def test_algorithm_1_splits_single_prompts_when_memory_is_full() -> None:
    """ERRATA 2.11: N_max = 0; the empty bucket that results does not divide by zero (2.6)."""
    buckets = make_bucketserve()
    assert buckets.adjust([5], 0) == (0.0, 2048.0, 4096.0)
    assert buckets.adjust([5], 0) == (0.0, 1024.0, 2048.0, 4096.0)


@pytest.mark.parametrize("settings", [{"l_max": 0}, {"l_max": 10, "threshold": 1.5}])
def test_settings_of_algorithm_1_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        BucketServeConfig(**settings)  # type: ignore[arg-type]


# The default


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


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=120))
def test_splitting_never_adds_padding(waiting: list[int]) -> None:
    edges = make_adaptive(min_requests=2).adjust(waiting, 4)
    assert bucket_padding_fraction(edges, waiting) <= bucket_padding_fraction([0.0, np.inf], waiting) + 1e-12


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


def test_few_buckets_come_close_to_the_optimum_on_lognormal_prompts() -> None:
    prompts = np.ceil(lognormal_prompts()[::40]).astype(int).tolist()
    edges = make_adaptive().adjust(prompts, 16)
    best = bucket_padding_fraction(optimal_bucket_edges(prompts, len(edges) - 1), prompts)
    assert bucket_padding_fraction(edges, prompts) < 1.2 * best
    assert best < 0.5 * padding_waste_fraction(prompts)


def test_edges_that_another_found_are_adopted_and_a_thin_bucket_s_patience_is_kept_when_they_are_no_news() -> None:
    buckets = make_adaptive(patience=3)
    buckets.adopt((0.0, 100.0, math.inf))
    assert (buckets.assign(99), buckets.assign(100)) == (0, 1)
    for _ in range(3):
        buckets.adopt(buckets.edges)
        buckets.adjust([10] * 8, max_requests=0)
    assert buckets.edges == (0.0, math.inf)


@pytest.mark.parametrize(
    "edges", [(), (0.0,), (1.0, math.inf), (0.0, 9.0), (0.0, 9.0, 9.0, math.inf), (0.0, 1.0, 2.0, math.inf)]
)
def test_edges_that_do_not_fit_are_not_adopted(edges: tuple[float, ...]) -> None:
    buckets = make_adaptive(max_buckets=2)
    assert not buckets.fits(edges)
    with pytest.raises(InputError, match="2 buckets at most"):
        buckets.adopt(edges)


def test_prompt_buckets_adjust_after_as_many_prompts_as_they_were_told() -> None:
    buckets = PromptBuckets(AdaptiveBucketsConfig(), refit_every=16)
    for prompt_tokens in [10] * 8 + [1000] * 7:
        buckets.assign(prompt_tokens)
    assert buckets.edges == (0.0, math.inf)
    assert buckets.assign(1000) == 1
    assert buckets.edges == (0.0, 505.0, math.inf)
    with pytest.raises(ConfigError, match="refit_every"):
        PromptBuckets(AdaptiveBucketsConfig(), refit_every=0)


def test_prompt_buckets_of_algorithm_1_halve_what_is_mostly_short_and_keep_every_prompt() -> None:
    """ERRATA 2.12: as printed, a prompt of l_max has no bucket."""
    buckets = PromptBuckets(BucketServeConfig(l_max=1024, max_buckets=3), refit_every=16, max_requests=8)
    for _ in range(16):
        buckets.assign(10)
    assert buckets.edges == (0.0, 512.0, 1024.0)
    assert [buckets.assign(tokens) for tokens in (511, 512, 1023, 1024, 9999)] == [0, 1, 1, 1, 1]
    for _ in range(64):
        buckets.assign(10)
    assert len(buckets.edges) == 4, "it would go on halving"
    for _ in range(11):
        buckets.assign(1000)
    assert buckets.edges == (0.0, 256.0, 512.0, 1024.0)


def test_algorithm_1_adopts_what_another_found_over_the_same_range() -> None:
    buckets = BucketServeBuckets(BucketServeConfig(l_max=1024, max_buckets=2))
    buckets.adopt((0.0, 512.0, 1024.0))
    assert (buckets.assign(511), buckets.assign(512)) == (0, 1)
    for edges in [(0.0, 512.0, math.inf), (0.0, 256.0, 512.0, 1024.0), (0.0, 512.0, 512.0)]:
        assert not buckets.fits(edges)
        with pytest.raises(InputError, match="from 0 to 1024.0, 2 buckets at most"):
            buckets.adopt(edges)


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
