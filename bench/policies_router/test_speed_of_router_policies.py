"""Seconds of what a router calls per request, and of what it calls now and then, where a page names them.

Not collected by default; run with `pytest bench/policies_router`.
"""

from collections import deque
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from policies.gang.buckets import AdaptiveBuckets, AdaptiveBucketsConfig, BucketPolicy
from policies.gang.packing import best_fit_decreasing, first_fit_decreasing
from policies.papers.bucket_serve import BucketServeBuckets, BucketServeConfig, optimal_bucket_edges
from policies.router.bin_edges import equal_mass_edges, optimal_edges
from policies.router.dispatcher import Dispatcher
from policies.router.order import deadline_keys
from policies.router.placement import PrefixIndex, PrefixIndexConfig
from policies.router.tickets import Reading, ReplicaTerms, Ticket

MAKERS: dict[str, Callable[[], BucketPolicy]] = {
    "adaptive": lambda: AdaptiveBuckets(AdaptiveBucketsConfig()),
    "bucketserve": lambda: BucketServeBuckets(BucketServeConfig(l_max=8192)),
}


def ticket(request_id: str, arrival_s: float) -> Ticket:
    key, late_key = deadline_keys(arrival_s, 1.0)
    return Ticket(
        request_id=request_id,
        bin_index=0,
        deadline_key=key,
        late_key=late_key,
        deadline_s=arrival_s + 1.0,
        work_s=0.1,
        router_id="a",
        unread_tokens=900,
        prefixes=(("r0", 64),),
        prompt_token_s=1e-4,
        step_s=0.02,
    )


def make_dispatcher(replica_count: int, waiting: int) -> Dispatcher:
    """All slots are taken; each replica has prompts to read."""
    dispatcher = Dispatcher()
    for number in range(replica_count):
        dispatcher.register(f"r{number}", ReplicaTerms(), 8, 0.0)
        dispatcher.offer(f"r{number}", 8, Reading(max_unread_tokens=100_000, prompt_token_s=1e-4))
    for number in range(8 * replica_count + waiting):
        dispatcher.queue(ticket(f"{number:06}", float(number)), 0.0)
        dispatcher.dispatch(0.0)
    return dispatcher


def draw_lengths(count: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(5.0, 1.0, count)
    return np.clip(np.ceil(drawn), 1, 4096).astype(int).tolist()  # type: ignore[no-any-return]


def test_optimal_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(optimal_edges, draw_lengths(20_000), 8, 32)) == 9


def test_equal_mass_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(equal_mass_edges, draw_lengths(20_000), 8)) == 9


@pytest.mark.parametrize("replica_count", [8, 64])
@pytest.mark.parametrize("waiting", [0, 1000])
def test_a_request_ends_and_another_comes(benchmark: BenchmarkFixture, replica_count: int, waiting: int) -> None:
    dispatcher, names = make_dispatcher(replica_count, waiting), count(1_000_000)
    running = deque(name for name, place in dispatcher.places.items() if place.replica_id)

    def end_and_come() -> int:
        dispatcher.forget(running.popleft())
        name = next(names)
        dispatcher.queue(ticket(str(name), float(name)), 0.0)
        started = dispatcher.dispatch(0.0).started
        running.extend(place.ticket.request_id for place in started)
        return len(started)

    assert benchmark(end_and_come) == 1


def test_look_up_a_prefix_of_100_000_tokens_and_record_it(benchmark: BenchmarkFixture) -> None:
    index, prompt = PrefixIndex(PrefixIndexConfig()), list(range(100_000))

    def look_up_and_record() -> dict[str, int]:
        index.record("r0", prompt)
        return index.known_tokens(["r0", "r1"], prompt)

    assert benchmark(look_up_and_record) == {"r0": 99_968}


@pytest.mark.parametrize("name", MAKERS)
def test_adjust_buckets_to_1000_waiting(benchmark: BenchmarkFixture, name: str) -> None:
    buckets, waiting = MAKERS[name](), draw_lengths(1000)
    assert len(benchmark(buckets.adjust, waiting, 32)) > 2


def test_assign_a_bucket(benchmark: BenchmarkFixture) -> None:
    buckets = AdaptiveBuckets(AdaptiveBucketsConfig())
    buckets.adjust(draw_lengths(1000), 32)
    assert benchmark(buckets.assign, 240) < 8


def test_optimal_bucket_edges_of_20_000_lengths(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(optimal_bucket_edges, draw_lengths(20_000), 8)) == 9


@pytest.mark.parametrize("packer", [first_fit_decreasing, best_fit_decreasing])
def test_pack(benchmark: BenchmarkFixture, packer: Callable[[list[int], int], list[list[int]]]) -> None:
    assert len(benchmark(packer, draw_lengths(10_000), 4096)) < 10_000
