"""Choosing replicas by predicted work, with prefixes as tie-breaks and replicas that belong to classes."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.router.placement import (
    LeastOutstandingWork,
    LeastOutstandingWorkConfig,
    MostCredit,
    Offer,
    PrefixIndex,
    PrefixIndexConfig,
    RoundRobin,
    SoonestFirstToken,
    output_tokens_left,
    pick,
    prices_s,
    soonest,
    work_s,
)
from policies.types import ReplicaView, RequestView, StepCoefficients, StepTimes

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.01, prefill_s=1e-4),
    decode=StepCoefficients(overhead_s=0.016, decode_s=2e-4, kv_s=1e-7),
    mixed=StepCoefficients(overhead_s=0.016, prefill_s=1e-4, decode_s=2e-4, kv_s=1e-7),
)
REQUEST = RequestView(request_id="r", arrival_s=0.0, prompt_tokens=100, predicted_output_tokens=50.0)
PROMPT = list(range(1000))


def make_policy(**settings: float) -> LeastOutstandingWork:
    return LeastOutstandingWork(LeastOutstandingWorkConfig(**settings))  # type: ignore[arg-type]


def make_replica(replica_id: str, outstanding_s: float = 0.0, credit: int = 1, *classes: str) -> ReplicaView:
    owned = frozenset(classes) if classes else None
    return ReplicaView(
        replica_id=replica_id, credit=credit, step_times=TIMES, outstanding_s=outstanding_s, slo_classes=owned
    )


def test_the_least_outstanding_work_wins_over_the_most_credit() -> None:
    replicas = [make_replica("a", 3.0, 9), make_replica("b", 1.0, 1), make_replica("c", 2.0, 5)]
    assert make_policy().choose(replicas, REQUEST) == "b"
    assert MostCredit().choose(replicas, REQUEST) == "a"


def test_a_replica_without_credit_is_not_chosen() -> None:
    replicas = [make_replica("a", 0.0, 0), make_replica("b", 9.0, 1)]
    assert make_policy().choose(replicas, REQUEST) == "b"


def test_without_credit_anywhere_there_is_no_choice() -> None:
    assert make_policy().choose([make_replica("a", 0.0, 0)], REQUEST) is None
    assert make_policy().choose([], REQUEST) is None


def test_queue_and_hit_are_one_price() -> None:
    """0.1 ms for a token: 2000 tokens ahead against 2000 that are cached."""
    busy, idle = replace(make_replica("busy"), unread_tokens=2000), make_replica("idle")
    long = REQUEST._replace(prompt_tokens=5000)
    for cached, chosen in ((1800, "idle"), (2200, "busy")):
        assert SoonestFirstToken().choose([busy, idle], long, {"busy": cached}) == chosen


def test_a_prompt_delays_those_behind_it_where_all_replicas_have_prompts_to_read() -> None:
    """0.1 ms for a token: the home of 4000 of 5000 tokens has 1 s more ahead than the others."""
    home = replace(make_replica("home"), unread_tokens=15_000, unread_prompts=3)
    other = replace(make_replica("other"), unread_tokens=5000, unread_prompts=2)
    long, hits = REQUEST._replace(prompt_tokens=5000), {"home": 4000}
    assert SoonestFirstToken().choose([home, other], long, hits) == "home"  # 1.5 + 0.1 * 3 against 0.5 + 0.5 * 3
    assert SoonestFirstToken().choose([home, replace(other, unread_prompts=0)], long, hits) == "other"
    without_credit = replace(make_replica("idle"), credit=0)
    assert SoonestFirstToken().choose([home, other, without_credit], long, hits) == "home"


def test_the_price_adds_the_seconds_of_those_that_come_after() -> None:
    offers = {"a": Offer(0.2, 0.32, 4, 0.01, 1.0), "b": Offer(1.0, 0.5, 2, 0.01, 1.0)}
    assert prices_s(offers) == pytest.approx({"a": 0.2 + 3 * 0.32, "b": 1.0 + 3 * 0.5})
    assert prices_s({"a": offers["a"]._replace(unread_prompts=0), "b": offers["b"]}) == pytest.approx(
        {"a": 0.52, "b": 1.5}
    )
    assert prices_s({}) == {}


def test_a_replica_counts_in_its_own_pace() -> None:
    slow, fast = (replace(make_replica(name), prompt_token_s=pace) for name, pace in (("slow", 1e-3), ("fast", 1e-4)))
    long = REQUEST._replace(prompt_tokens=5000)
    assert SoonestFirstToken().choose([slow, fast], long, {"slow": 4000}) == "fast"
    assert SoonestFirstToken().choose([slow, fast], long, {"slow": 4800}) == "slow"


def test_what_is_cached_everywhere_is_read_nowhere() -> None:
    a, b = replace(make_replica("a"), prompt_token_s=1e-3), replace(make_replica("b", 1.0), prompt_token_s=1e-4)
    assert SoonestFirstToken().choose([a, b], REQUEST) == "b"
    assert SoonestFirstToken().choose([a, b], REQUEST._replace(cached_tokens=100)) == "a"


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
OFFERS = st.builds(Offer, SECONDS, SECONDS, st.integers(0, 9), st.floats(0.0, 1.0), SECONDS)


@given(st.lists(OFFERS, min_size=1, max_size=8))
def test_no_replica_is_cheaper_by_more_than_a_step(drawn: list[Offer]) -> None:
    offers = {f"r{number}": offer for number, offer in enumerate(drawn)}
    chosen, prices = soonest(offers), prices_s(offers)
    assert chosen is not None
    assert prices[chosen] - offers[chosen].step_s <= min(prices.values())
    assert soonest(dict(reversed(offers.items()))) == chosen


def test_in_turn_is_in_turn() -> None:
    policy, replicas = RoundRobin(), [make_replica("b"), make_replica("a"), make_replica("c", 0.0, 0)]
    assert [policy.choose(replicas, REQUEST) for _ in range(3)] == ["a", "b", "a"]


def test_a_replica_of_another_class_is_not_chosen() -> None:
    replicas = [make_replica("a", 0.0, 1, "batch"), make_replica("b", 9.0, 1, "chat", "code"), make_replica("c", 8.0)]
    policy = make_policy()
    assert policy.choose(replicas, REQUEST._replace(slo_class="batch")) == "a"
    assert policy.choose(replicas, REQUEST._replace(slo_class="chat")) == "c"
    assert policy.choose(replicas[:2], REQUEST._replace(slo_class="chat")) == "b"
    assert policy.choose(replicas[:2], REQUEST) is None


def test_a_slow_idle_replica_loses_to_a_fast_busy_one_on_long_work() -> None:
    lame = replace(TIMES, decode=StepCoefficients(overhead_s=0.5, decode_s=1e-2))
    slow, fast = replace(make_replica("slow"), step_times=lame), make_replica("fast", 1.0)
    assert make_policy().choose([slow, fast], REQUEST) == "fast"
    short = REQUEST._replace(prompt_tokens=10, predicted_output_tokens=2.0)
    assert make_policy().choose([slow, fast], short) == "slow"


def test_among_near_equals_the_longest_known_prefix_wins() -> None:
    replicas = [make_replica("a", 1.00), make_replica("b", 1.04), make_replica("c", 1.20)]
    policy = make_policy(tie_s=0.05)
    assert policy.choose(replicas, REQUEST, {"b": 64, "c": 512}) == "b"
    assert policy.choose(replicas, REQUEST, {"c": 512}) == "a"
    assert policy.choose(replicas, REQUEST, {"a": 64, "b": 64}) == "a"


def test_equal_scores_go_to_the_lowest_id_in_any_order() -> None:
    replicas = [make_replica(replica_id) for replica_id in ("r10", "r2", "r1")]
    assert make_policy().choose(replicas, REQUEST) == make_policy().choose(replicas[::-1], REQUEST) == "r1"


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 3), st.integers(0, 512)), max_size=8),
    st.sampled_from([0.0, 0.1, 10.0]),
    st.randoms(use_true_random=False),
)
def test_pick_over_the_table_of_scores_is_the_choice(
    drawn: list[tuple[float, int, int]], tie_s: float, shuffler: Random
) -> None:
    policy = make_policy(tie_s=tie_s)
    replicas = [make_replica(f"r{n}", outstanding_s, credit) for n, (outstanding_s, credit, _) in enumerate(drawn)]
    prefixes = {f"r{n}": tokens for n, (_, _, tokens) in enumerate(drawn)}
    table = [(replica.replica_id, policy.score(replica, REQUEST)) for replica in replicas if replica.credit]
    shuffler.shuffle(table)
    assert policy.choose(replicas, REQUEST, prefixes) == pick(dict(table), prefixes, tie_s)


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=8), st.floats(0.0, 1.0))
def test_the_choice_is_never_further_from_the_best_than_a_tie(outstanding: list[float], tie_s: float) -> None:
    scores = {f"r{n}": score for n, score in enumerate(outstanding)}
    chosen = pick(scores, {f"r{n}": n for n in range(len(outstanding))}, tie_s)
    assert chosen is not None
    assert scores[chosen] <= min(outstanding) + tie_s


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


def test_a_replicas_own_step_times_and_the_default_length_make_its_work() -> None:
    policy = make_policy(default_output_tokens=70.0)
    lame = replace(
        make_replica("a"), step_times=replace(TIMES, prefill=StepCoefficients(overhead_s=0.0, prefill_s=1.0))
    )
    by_times = work_s(REQUEST, TIMES, output_tokens=50.0, shared_batch_size=32)
    assert policy.request_work_s(make_replica("a"), REQUEST) == by_times
    assert policy.request_work_s(lame, REQUEST) > 100.0
    unknown = REQUEST._replace(predicted_output_tokens=None)
    by_default = work_s(REQUEST, TIMES, output_tokens=70.0, shared_batch_size=32)
    assert policy.request_work_s(make_replica("a"), unknown) == by_default


def test_tokens_left_respect_the_callers_limit_and_what_was_generated() -> None:
    assert output_tokens_left(REQUEST, 256.0) == 50.0
    assert output_tokens_left(REQUEST._replace(predicted_output_tokens=None), 256.0) == 256.0
    assert output_tokens_left(REQUEST._replace(max_output_tokens=20), 256.0) == 20.0
    assert output_tokens_left(REQUEST._replace(output_tokens=30), 256.0) == 20.0
    assert output_tokens_left(REQUEST._replace(output_tokens=90), 256.0) == 1.0


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


@pytest.mark.parametrize("name", ["default_output_tokens", "shared_batch_size"])
def test_settings_that_must_be_positive_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_policy(**{name: 0})


def test_a_negative_tie_is_refused() -> None:
    with pytest.raises(ConfigError, match="tie_s must be finite and at least 0"):
        make_policy(tie_s=-0.1)


@pytest.mark.parametrize("name", ["block_tokens", "max_blocks", "max_entries"])
def test_an_index_without_room_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        PrefixIndexConfig(**{name: 0})
