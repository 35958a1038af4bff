"""CPU of a router for one long prompt: its blocks hashed by vLLM's own function, and looked up; and memory of a block.

Not collected by default; run with `pytest bench/deployments/test_speed_of_prefix_lookups.py --benchmark-timer
time.thread_time`, or CPU that others take counts.
"""

import random
import tracemalloc
from array import array

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from deployments.engines.vllm.cached_blocks import request_block_hashes
from router.cached_blocks import BlockChanges, BlockHashing, CachedBlocks
from router.clock import MonotonicClock
from router.metrics import RouterMetrics

PROMPT_TOKENS = 100_000
MOST_BYTES = 256  # of a block in a router's index
CHANCE = random.Random(1)
PROMPT = [CHANCE.randrange(150_000) for _ in range(PROMPT_TOKENS)]


def hashing(block_tokens: int, algorithm: str = "sha256") -> BlockHashing:
    return BlockHashing(block_tokens, algorithm, b"r" * 32)


def request() -> EngineCoreRequest:
    empty = dict.fromkeys(EngineCoreRequest.__struct_fields__[:10])
    asked = {"request_id": "x", "prompt_token_ids": PROMPT, "sampling_params": SamplingParams(max_tokens=1)}
    return EngineCoreRequest(**{**empty, "arrival_time": 0.0, **asked})


def index(replicas: int, holders: int, blocks: int, by: BlockHashing) -> CachedBlocks:
    """So many of the replicas have the whole prompt; all are full of other blocks."""
    known, prompt = CachedBlocks(MonotonicClock(), RouterMetrics()), request_block_hashes(request(), by)
    for number in range(replicas):
        mine = list(prompt) if number < holders else []
        others = [CHANCE.getrandbits(64) for _ in range(blocks - len(mine))]
        known.apply(f"r{number}", BlockChanges(None, 1, by, array("Q", [*mine, *others]).tobytes()))
    return known


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("block_tokens", [16, 32, 128])
def test_hash_a_prompt_of_100_000_tokens(benchmark: BenchmarkFixture, block_tokens: int, algorithm: str) -> None:
    hashes = benchmark(request_block_hashes, request(), hashing(block_tokens, algorithm))
    assert len(hashes) == PROMPT_TOKENS // block_tokens


@pytest.mark.parametrize(("replicas", "holders"), [(8, 1), (8, 8), (64, 2), (64, 64)])
def test_look_up_a_prompt_of_100_000_tokens(benchmark: BenchmarkFixture, replicas: int, holders: int) -> None:
    by = hashing(16)
    known, prompt = index(replicas, holders, 20_000, by), request_block_hashes(request(), by)
    hits = benchmark(known.hit_tokens, prompt, PROMPT_TOKENS, by)
    assert sum(tokens == PROMPT_TOKENS - 16 for tokens in hits.values()) == holders


def test_hash_and_look_up_on_8_replicas(benchmark: BenchmarkFixture) -> None:
    by = hashing(16)
    known = index(8, 2, 100_000, by)
    benchmark(lambda: known.hit_tokens(request_block_hashes(request(), by), PROMPT_TOKENS, by))


@pytest.mark.parametrize("blocks", [20_000, 100_000, 1_000_000])
def test_bytes_of_a_block(blocks: int) -> None:
    packed = array("Q", [CHANCE.getrandbits(64) for _ in range(blocks)]).tobytes()
    tracemalloc.start()
    known = CachedBlocks(MonotonicClock(), RouterMetrics())
    before = tracemalloc.get_traced_memory()[0]
    known.apply("r", BlockChanges(None, 1, hashing(16), packed))
    taken = (tracemalloc.get_traced_memory()[0] - before) / blocks
    tracemalloc.stop()
    print(f"{blocks} blocks: {taken:.0f} bytes each, {known.nbytes / blocks:.0f} as it says")
    assert taken <= MOST_BYTES


def test_take_a_whole_cache_of_1_600_000_tokens(benchmark: BenchmarkFixture) -> None:
    packed = array("Q", [CHANCE.getrandbits(64) for _ in range(100_000)]).tobytes()
    known = CachedBlocks(MonotonicClock(), RouterMetrics())
    benchmark(known.apply, "r", BlockChanges(None, 1, hashing(16), packed))


def test_forget_a_cache_of_1_600_000_tokens(benchmark: BenchmarkFixture) -> None:
    packed = array("Q", [CHANCE.getrandbits(64) for _ in range(100_000)]).tobytes()
    known = CachedBlocks(MonotonicClock(), RouterMetrics())

    def learn() -> None:
        known.apply("r", BlockChanges(None, 1, hashing(16), packed))

    benchmark.pedantic(known.forget, ("r",), setup=learn, rounds=20)  # type: ignore[no-untyped-call]
