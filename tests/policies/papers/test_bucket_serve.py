"""BucketServe's closed forms, with the errata's figures, and the traps of its Algorithm 1."""

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.gang.buckets import AdaptiveBuckets, AdaptiveBucketsConfig, PromptBuckets, padding_waste_fraction
from policies.papers.bucket_serve import (
    BucketServeBuckets,
    BucketServeConfig,
    PaddingMeasure,
    bucket_padding_fraction,
    kv_bytes_per_token,
    optimal_bucket_edges,
)
from policies.types import FloatArray

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


def test_llama_3_8b_keeps_128_kib_per_token() -> None:
    """ERRATA 2.1: 8 KV heads, not 32 attention heads (which would give 524 288)."""
    assert kv_bytes_per_token(layers=32, kv_heads=8, head_dim=128, bytes_per_element=2) == 131_072


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


def test_few_buckets_come_close_to_the_optimum_on_lognormal_prompts() -> None:
    prompts = np.ceil(lognormal_prompts()[::40]).astype(int).tolist()
    edges = AdaptiveBuckets(AdaptiveBucketsConfig()).adjust(prompts, 16)
    best = bucket_padding_fraction(optimal_bucket_edges(prompts, len(edges) - 1), prompts)
    assert bucket_padding_fraction(edges, prompts) < 1.2 * best
    assert best < 0.5 * padding_waste_fraction(prompts)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=120))
def test_splitting_never_adds_padding(waiting: list[int]) -> None:
    edges = AdaptiveBuckets(AdaptiveBucketsConfig(min_requests=2)).adjust(waiting, 4)
    assert bucket_padding_fraction(edges, waiting) <= bucket_padding_fraction([0.0, np.inf], waiting) + 1e-12


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
    buckets = PromptBuckets(BucketServeConfig(l_max=1024, max_buckets=2), refit_every=16)
    buckets.adopt((0.0, 512.0, 1024.0))
    assert (buckets.assign(511), buckets.assign(512)) == (0, 1)
    for edges in [(0.0, 512.0, math.inf), (0.0, 256.0, 512.0, 1024.0), (0.0, 512.0, 512.0)]:
        assert not buckets.fits(edges)
        with pytest.raises(InputError, match="from 0 to 1024.0, 2 buckets at most"):
            buckets.adopt(edges)
