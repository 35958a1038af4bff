"""Which replica is predicted to send the first token soonest, what a request costs, and which prefixes are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.router.placement import Offer, PrefixIndex, PrefixIndexConfig, prices_s, soonest, work_s
from policies.types import RequestView, StepCoefficients, StepTimes

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.01, prefill_s=1e-4),
    decode=StepCoefficients(overhead_s=0.016, decode_s=2e-4, kv_s=1e-7),
    mixed=StepCoefficients(overhead_s=0.016, prefill_s=1e-4, decode_s=2e-4, kv_s=1e-7),
)
REQUEST = RequestView(request_id="r", arrival_s=0.0, prompt_tokens=100, predicted_output_tokens=50.0)
PROMPT = list(range(1000))


def test_the_price_adds_the_seconds_of_those_that_come_after() -> None:
    offers = {"a": Offer(0.2, 0.32, 4, 0.01, 1.0), "b": Offer(1.0, 0.5, 2, 0.01, 1.0)}
    assert prices_s(offers) == pytest.approx({"a": 0.2 + 3 * 0.32, "b": 1.0 + 3 * 0.5})
    assert prices_s({"a": offers["a"]._replace(unread_prompts=0), "b": offers["b"]}) == pytest.approx(
        {"a": 0.52, "b": 1.5}
    )
    assert prices_s({}) == {}


def test_of_those_less_than_a_step_apart_the_least_work_decides() -> None:
    offers = {
        "a": Offer(0.5, 0.5, 0, 0.25, 9.0),
        "b": Offer(1.0, 0.25, 1, 0.25, 1.0),
        "c": Offer(1.5, 0.0, 2, 0.25, 0.0),
    }
    assert soonest(offers) == "b"
    assert soonest({each: offer._replace(step_s=0.0) for each, offer in offers.items()}) == "a"
    assert soonest({each: offer._replace(step_s=math.inf) for each, offer in offers.items()}) == "c"
    assert soonest({}) is None


SECONDS = st.floats(0.0, 5.0)
OFFERS = st.builds(
    Offer, SECONDS, SECONDS, st.integers(0, 9), st.floats(0.0, 1.0), SECONDS, return_chance=st.floats(0.0, 1.0)
)


@given(st.lists(OFFERS, min_size=1, max_size=8))
def test_no_replica_is_cheaper_by_more_than_a_step(drawn: list[Offer]) -> None:
    offers = {f"r{number}": offer for number, offer in enumerate(drawn)}
    chosen, prices = soonest(offers), prices_s(offers)
    assert chosen is not None
    assert prices[chosen] - offers[chosen].step_s <= min(prices.values())
    assert soonest(dict(reversed(offers.items()))) == chosen


def test_work_is_prefill_plus_a_share_of_decode_steps() -> None:
    """100 prompt tokens; 50 decode steps of 0.016/32 + 2e-4 s; contexts 100 to 149 read at 1e-7 s per token."""
    expected = 100 * 1e-4 + 50 * (0.016 / 32 + 2e-4) + 1e-7 * sum(range(100, 150))
    assert work_s(REQUEST, TIMES, output_tokens=50, shared_batch_size=32) == pytest.approx(expected)


def test_a_full_batch_drains_in_the_sum_of_its_work() -> None:
    """32 like requests decode 10 tokens in 10 steps of 32; what each adds must add up to those steps."""
    request = REQUEST._replace(prompt_tokens=100, cached_tokens=100)
    each = work_s(request, TIMES, output_tokens=10, shared_batch_size=32)
    steps = sum(TIMES.step_s(decode_requests=32, kv_tokens=32 * (100 + step)) for step in range(10))
    assert 32 * each == pytest.approx(steps)


def test_cached_prompt_tokens_cost_no_prefill() -> None:
    cached = REQUEST._replace(cached_tokens=60)
    whole = work_s(REQUEST, TIMES, output_tokens=50, shared_batch_size=32)
    assert whole - work_s(cached, TIMES, output_tokens=50, shared_batch_size=32) == pytest.approx(60 * 1e-4)


def test_a_prefix_is_known_in_whole_blocks_from_its_start() -> None:
    index = PrefixIndex(PrefixIndexConfig(block_tokens=10))
    index.record("a", PROMPT[:35])
    index.record("b", PROMPT[:12])
    assert index.known_tokens(["a", "b", "c"], PROMPT[:39]) == {"a": 30, "b": 10}
    assert index.known_tokens(["a"], PROMPT[:9]) == {}
    assert index.known_tokens(["a"], [99, *PROMPT[1:35]]) == {}


def test_equal_blocks_after_unequal_beginnings_differ() -> None:
    index = PrefixIndex(PrefixIndexConfig(block_tokens=2))
    index.record("a", [1, 2, 3, 4])
    assert index.known_tokens(["a"], [5, 6, 3, 4]) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=12)), max_size=30))
def test_the_index_never_outgrows_its_bound_nor_claims_more_than_the_prompt(
    history: list[tuple[str, list[int]]],
) -> None:
    index = PrefixIndex(PrefixIndexConfig(block_tokens=2, max_blocks=4, max_entries=5))
    for replica_id, prompt in history:
        index.record(replica_id, prompt)
        known = index.known_tokens("abc", prompt)
        assert len(index) <= 5
        assert known.get(replica_id, 0) == min(len(prompt) // 2, 4) * 2
        assert max(known.values(), default=0) <= len(prompt)


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    index = PrefixIndex(PrefixIndexConfig(block_tokens=10, max_entries=4))
    index.record("a", PROMPT[:30])
    index.record("b", PROMPT[500:520])
    assert index.known_tokens(["a"], PROMPT[:30]) == {"a": 20}


def test_a_replica_that_went_away_is_forgotten() -> None:
    index = PrefixIndex(PrefixIndexConfig(block_tokens=10))
    index.record("a", PROMPT[:30])
    index.record("b", PROMPT[:30])
    index.forget("a")
    assert index.known_tokens(["a", "b"], PROMPT[:30]) == {"b": 30}


@pytest.mark.parametrize("name", ["block_tokens", "max_blocks", "max_entries"])
def test_an_index_without_room_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PrefixIndexConfig(**{name: 0})
