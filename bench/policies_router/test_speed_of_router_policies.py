"""Seconds of the calls that a router makes per request, and of those that it makes now and then.

Not collected by default; run with `pytest bench/policies_router`.
"""

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies.gang.buckets import AdaptiveBuckets, AdaptiveBucketsConfig, BucketPolicy, max_safe_requests
from policies.gang.packing import PackedBatch, best_fit_decreasing, first_fit_decreasing
from policies.papers.bin_worth import bins_for_load
from policies.papers.bucket_serve import BucketServeBuckets, BucketServeConfig, optimal_bucket_edges
from policies.router.bin_edges import equal_mass_edges, optimal_edges
from policies.router.multi_bin import EdgeRule, MultiBin, MultiBinConfig
from policies.router.order import Deadline, DeadlineConfig
from policies.router.placement import PrefixIndex, PrefixIndexConfig, SoonestFirstToken
from policies.types import ReplicaView, RequestView, StepCoefficients, StepTimes

RNG_SEED = 20_000
REQUEST = RequestView(request_id="r", arrival_s=0.0, prompt_tokens=900, predicted_output_tokens=240.0)
FORM = StepCoefficients(overhead_s=0.02, prefill_s=1e-4, decode_s=2e-4, kv_s=1e-8)
TIMES = StepTimes(prefill=FORM, decode=FORM, mixed=FORM)


def draw_lengths(count: int) -> list[int]:
    drawn = np.random.default_rng(RNG_SEED).lognormal(5.0, 1.0, count)
    return np.clip(np.ceil(drawn), 1, 4096).astype(int).tolist()  # type: ignore[no-any-return]


def make_filled_bins(rule: EdgeRule = "optimal") -> MultiBin:
    bins = MultiBin(MultiBinConfig(rule=rule))
    for output_tokens in draw_lengths(2048):
        bins.observe(output_tokens, slo_class="chat")
    return bins


def test_assign_a_bin(benchmark: BenchmarkFixture) -> None:
    assert benchmark(make_filled_bins().assign, 240.0, slo_class="chat") < 4


def test_assign_a_bin_without_a_prediction(benchmark: BenchmarkFixture) -> None:
    assert benchmark(make_filled_bins().assign, None, slo_class="chat") < 4


def test_observe_a_length(benchmark: BenchmarkFixture) -> None:
    bins = make_filled_bins("fixed")
    benchmark(bins.observe, 240, slo_class="chat")
    assert len(bins.edges) == 5


@pytest.mark.parametrize("rule", ["optimal", "equal_mass"])
def test_refit_a_full_window(benchmark: BenchmarkFixture, rule: EdgeRule) -> None:
    assert len(benchmark(make_filled_bins(rule).refit)) == 5


def test_optimal_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(optimal_edges, draw_lengths(20_000), 8, 32)) == 9


def test_equal_mass_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(equal_mass_edges, draw_lengths(20_000), 8)) == 9


def test_bins_for_a_load(benchmark: BenchmarkFixture) -> None:
    assert benchmark(bins_for_load, 1.0, 8, draw_lengths(4096)) >= 1


def test_key_of_a_deadline(benchmark: BenchmarkFixture) -> None:
    order = Deadline(DeadlineConfig(class_targets_s={"chat": 0.5, "batch": 30.0}))
    assert benchmark(order.key, 1e9, "chat", 2.5, 900) > 1e9


@pytest.mark.parametrize("replica_count", [8, 64])
def test_choose_a_replica(benchmark: BenchmarkFixture, replica_count: int) -> None:
    replicas = [
        ReplicaView(replica_id=f"r{n}", credit=1, outstanding_s=float(n), step_times=TIMES)
        for n in range(replica_count)
    ]
    assert benchmark(SoonestFirstToken().choose, replicas, REQUEST, {"r0": 64}) == "r0"


def test_record_a_prefix_of_2000_tokens(benchmark: BenchmarkFixture) -> None:
    index, prompt = PrefixIndex(PrefixIndexConfig()), list(range(2000))
    benchmark(index.record, "r0", prompt)
    assert len(index) == 31


def test_look_up_a_prefix_of_2000_tokens_on_8_replicas(benchmark: BenchmarkFixture) -> None:
    index, prompt = PrefixIndex(PrefixIndexConfig()), list(range(2000))
    replica_ids = [f"r{n}" for n in range(8)]
    for replica_id in replica_ids:
        index.record(replica_id, prompt)
    assert len(benchmark(index.known_tokens, replica_ids, prompt)) == 8


def test_look_up_a_prefix_of_100_000_tokens_and_record_it(benchmark: BenchmarkFixture) -> None:
    index, prompt = PrefixIndex(PrefixIndexConfig()), list(range(100_000))

    def look_up_and_record() -> dict[str, int]:
        index.record("r0", prompt)
        return index.known_tokens(["r0", "r1"], prompt)

    assert benchmark(look_up_and_record) == {"r0": 99_968}


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdaptiveBuckets(AdaptiveBucketsConfig()),
        lambda: BucketServeBuckets(BucketServeConfig(l_max=8192)),
    ],
    ids=["adaptive", "bucketserve"],
)
def test_adjust_buckets_to_1000_waiting(benchmark: BenchmarkFixture, make: Callable[[], BucketPolicy]) -> None:
    buckets, waiting = make(), draw_lengths(1000)
    assert len(benchmark(buckets.adjust, waiting, 32)) > 2


def test_assign_a_bucket(benchmark: BenchmarkFixture) -> None:
    buckets = AdaptiveBuckets(AdaptiveBucketsConfig())
    buckets.adjust(draw_lengths(1000), 32)
    assert benchmark(buckets.assign, 240) < 8


def test_optimal_bucket_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(optimal_bucket_edges, draw_lengths(20_000), 8)) == 9


def test_safe_requests_of_a_long_queue(benchmark: BenchmarkFixture) -> None:
    assert benchmark(max_safe_requests, draw_lengths(10_000), 20_000, padded=True) > 0


@pytest.mark.parametrize("packer", [first_fit_decreasing, best_fit_decreasing])
@pytest.mark.parametrize("count", [32, 10_000])
def test_pack(benchmark: BenchmarkFixture, packer: Callable[[list[int], int], list[list[int]]], count: int) -> None:
    lengths = draw_lengths(count)
    assert len(benchmark(packer, lengths, 4096)) < count


def test_lay_out_32_prompts_with_mask_and_positions(benchmark: BenchmarkFixture) -> None:
    lengths = [min(tokens, 512) for tokens in draw_lengths(32)]

    def lay_out() -> tuple[int, ...]:
        packed = PackedBatch.of(lengths)
        packed.positions()
        return packed.attention_mask().shape

    assert benchmark(lay_out)[1:] == (512, 512)
