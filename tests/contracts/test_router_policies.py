"""What every router policy promises: inputs stay as they are, equal inputs give equal answers, nothing gets lost."""

import math
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.gang.buckets import AdaptiveBuckets, AdaptiveBucketsConfig, BucketPolicy
from policies.gang.packing import best_fit_decreasing, first_fit_decreasing
from policies.papers.bucket_serve import BucketServeBuckets, BucketServeConfig
from policies.registry import Family, kinds
from policies.router.multi_bin import MultiBin, MultiBinConfig
from policies.router.order import (
    FCFS,
    LJF,
    SJF,
    Order,
)
from policies.types import RequestView

ORDERS: dict[str, Callable[[], Order]] = {
    "fcfs": FCFS,
    "sjf": SJF,
    "ljf": LJF,
}
BUCKETS: dict[str, Callable[[], BucketPolicy]] = {
    "adaptive": lambda: AdaptiveBuckets(AdaptiveBucketsConfig(min_requests=2, patience=2)),
    "bucketserve": lambda: BucketServeBuckets(BucketServeConfig(l_max=4096)),
}
BINS: dict[str, Callable[[], MultiBin]] = {
    "optimal": lambda: MultiBin(MultiBinConfig(rule="optimal", refit_every=8)),
    "equal_mass": lambda: MultiBin(MultiBinConfig(rule="equal_mass", refit_every=8)),
    "fixed": lambda: MultiBin(MultiBinConfig(rule="fixed", refit_every=8)),
}
PACKERS = {"first_fit": first_fit_decreasing, "best_fit": best_fit_decreasing}


CLASSES = st.sampled_from(["chat", "batch", None])
REQUESTS = st.builds(
    RequestView,
    request_id=st.uuids().map(str),
    arrival_s=st.floats(0.0, 1e6),
    prompt_tokens=st.integers(0, 4095),
    output_tokens=st.integers(0, 50),
    predicted_output_tokens=st.one_of(st.none(), st.floats(0.0, 1e5)),
    max_output_tokens=st.one_of(st.none(), st.integers(1, 1000)),
    slo_class=CLASSES,
)
WAITING = st.lists(st.integers(0, 4095), max_size=40)


def test_every_registered_order_is_under_contract() -> None:
    assert set(kinds(Family.ORDER)) == set(ORDERS)


@pytest.mark.parametrize("name", ORDERS)
@given(requests=st.lists(REQUESTS, max_size=15), work_s=st.floats(0.0, 1e4))
def test_an_order_gives_every_request_one_finite_key(name: str, requests: list[RequestView], work_s: float) -> None:
    order, twin = ORDERS[name](), pickle.loads(pickle.dumps(ORDERS[name]()))
    for request in requests:
        arguments = (request.arrival_s, request.slo_class, work_s, request.prompt_tokens)
        assert math.isfinite(order.key(*arguments))
        assert order.key(*arguments) == order.key(*arguments) == twin.key(*arguments)


@pytest.mark.parametrize("name", BUCKETS)
@given(history=st.lists(st.tuples(WAITING, st.integers(0, 16)), min_size=1, max_size=12))
def test_splits_and_merges_of_buckets_conserve_the_requests(name: str, history: list[tuple[list[int], int]]) -> None:
    buckets, twin = BUCKETS[name](), BUCKETS[name]()
    for waiting, max_requests in history:
        before = list(waiting)
        twin = pickle.loads(pickle.dumps(twin))
        edges = buckets.adjust(waiting, max_requests)
        assert twin.adjust(tuple(waiting), max_requests) == edges == buckets.edges
        assert waiting == before
        assert all(low < high for low, high in zip(edges, edges[1:], strict=False))
        held: list[list[int]] = [[] for _ in edges[1:]]
        for tokens in waiting:
            bucket = buckets.assign(tokens)
            assert bucket is not None
            assert edges[bucket] <= tokens < edges[bucket + 1]
            held[bucket].append(tokens)
        assert sorted(tokens for members in held for tokens in members) == sorted(waiting)


@pytest.mark.parametrize("name", BINS)
@given(history=st.lists(st.tuples(st.one_of(st.none(), st.floats(0.0, 1e5)), st.integers(0, 9000), CLASSES)))
def test_bins_take_every_request_while_their_edges_move(
    name: str, history: list[tuple[float | None, int, str | None]]
) -> None:
    bins, twin = BINS[name](), BINS[name]()
    for predicted, output_tokens, slo_class in history:
        twin = pickle.loads(pickle.dumps(twin))
        assert 0 <= bins.assign(predicted, slo_class=slo_class) < bins.config.bins
        assert bins.assign(predicted, slo_class=slo_class) == twin.assign(predicted, slo_class=slo_class)
        bins.observe(output_tokens, slo_class=slo_class)
        twin.observe(output_tokens, slo_class=slo_class)
        assert bins.edges == twin.edges


@pytest.mark.parametrize("name", PACKERS)
@given(lengths=st.lists(st.integers(0, 512), max_size=40))
def test_a_packer_places_every_prompt_once(name: str, lengths: list[int]) -> None:
    before = list(lengths)
    rows = PACKERS[name](lengths, 512)
    assert rows == PACKERS[name](tuple(lengths), 512)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert lengths == before
