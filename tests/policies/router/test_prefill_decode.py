"""When prompts are read elsewhere, in which order, and on how many replicas."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError, InputError
from policies.router.prefill_decode import (
    BucketOrder,
    BucketOrderConfig,
    PrefillDecode,
    PrefillDecodeConfig,
    PrefillOffer,
    SplitState,
    TransferTimes,
    Why,
    padded_tokens,
    prefill_replicas,
    prefill_slots,
    safe_prompts,
)
from policies.types import StepCoefficients, StepTimes

# About an 8B model on an H100: 20 microseconds a prompt token, 6 ms a decode step.
TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=2e-5),
    decode=StepCoefficients(overhead_s=0.006, decode_s=4e-5, kv_s=1e-8),
    mixed=StepCoefficients(overhead_s=0.006, prefill_s=2e-5, decode_s=4e-5, kv_s=1e-8),
)


def policy(**changes: object) -> PrefillDecode:
    return PrefillDecode(PrefillDecodeConfig(**changes), TIMES)  # type: ignore[arg-type]


def cached(tokens: int) -> list[PrefillOffer]:
    return [PrefillOffer(wait_s=0.1, hit_tokens=tokens)]


def state(**changes: object) -> SplitState:
    usual: dict[str, object] = {
        "prompt_tokens": 4000,
        "itl_target_s": 0.03,
        "offers": [PrefillOffer(wait_s=0.1)],
        "decode_batch": 32.0,
        "context_tokens": 512.0,
    }
    return SplitState(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, Why.SPLIT),
        ({"prompt_tokens": 200}, Why.SHORT),
        ({"hit_tokens": 3800}, Why.SHORT),  # for the decode replica, which has the rest
        ({"hit_tokens": 1500}, Why.TRANSFER),  # all of the prompt would be read and moved, to save a part of that
        ({"hit_tokens": 1500, "offers": cached(1500)}, Why.SPLIT),  # that part is all that is read there too
        ({"hit_tokens": 3000, "offers": cached(3000)}, Why.TRANSFER),  # moving all of it takes as long as that part
        ({"offers": cached(3999)}, Why.SPLIT),
        ({"offers": []}, Why.NO_REPLICA),
        ({"offers": [PrefillOffer(wait_s=5.0)]}, Why.LATE),
        ({"offers": [PrefillOffer(wait_s=5.0, hit_tokens=3999)]}, Why.LATE),
        ({"offers": [PrefillOffer(wait_s=5.0), PrefillOffer(wait_s=1.9)]}, Why.SPLIT),
        ({"itl_target_s": None}, Why.NO_TARGET),
        ({"decode_batch": 0.5}, Why.IDLE),
        ({"itl_target_s": 0.2}, Why.WITHIN_TARGET),  # the step that reads it takes 90 ms
        ({"itl_target_s": 0.005}, Why.BEYOND_TARGET),  # no step at all is as short
        ({"slowness": 6.0}, Why.BEYOND_TARGET),
    ],
)
def test_auto_splits_long_prompts_under_tight_targets_and_says_why_not(changes: dict[str, object], why: Why) -> None:
    assert policy().choose(state(**changes)) is why


def test_what_the_others_hold_counts() -> None:
    reads = replace(TIMES, decode=replace(TIMES.decode, kv_s=1e-7), mixed=replace(TIMES.mixed, kv_s=1e-7))
    decides = PrefillDecode(PrefillDecodeConfig(), reads)
    assert decides.choose(state(context_tokens=None)) is decides.choose(state()) is Why.SPLIT
    assert decides.choose(state(context_tokens=12_000.0)) is Why.BEYOND_TARGET


def test_a_slow_network_keeps_prompts_where_they_are() -> None:
    slow = TransferTimes(overhead_s=0.01, s_per_token=2e-5)
    assert policy(transfer=slow).choose(state()) is Why.TRANSFER


def test_a_hit_at_a_prefill_replica_makes_up_for_a_slow_network() -> None:
    slow = policy(transfer=TransferTimes(overhead_s=0.01, s_per_token=2e-5))  # as long as the reading
    assert slow.choose(state(offers=cached(1000))) is Why.TRANSFER
    assert slow.choose(state(offers=cached(3000))) is Why.SPLIT


def test_a_hit_counts_where_the_prompt_would_be_read_soonest() -> None:
    """A decode replica has a part of it: reading all of it elsewhere is too long a way, reading half of it is not."""
    nothing, half = PrefillOffer(wait_s=0.0), PrefillOffer(wait_s=0.03, hit_tokens=2000)  # 40 ms less to read
    begun = state(hit_tokens=1500, offers=[nothing, half])
    assert policy().choose(begun) is Why.SPLIT
    assert policy().choose(replace(begun, offers=[nothing, replace(half, wait_s=0.05)])) is Why.TRANSFER
    assert policy().choose(replace(begun, offers=[nothing, replace(half, slowness=3.0)])) is Why.TRANSFER
    assert policy().choose(replace(begun, offers=[half, replace(nothing, wait_s=1.0)])) is Why.SPLIT


def test_small_chunks_may_hold_the_target_without_a_split() -> None:
    assert policy(max_batch_tokens=512).choose(state()) is Why.WITHIN_TARGET


def test_always_and_never_need_no_target() -> None:
    assert policy(mode="always").choose(state(itl_target_s=None, decode_batch=0.0)) is Why.SPLIT
    assert policy(mode="always").choose(state(offers=[])) is Why.NO_REPLICA
    assert policy(mode="never").choose(state()) is Why.OFF


@given(
    prompt=st.integers(1, 100_000),
    hit_share=st.floats(0.0, 1.0),
    offers=st.lists(
        st.builds(PrefillOffer, wait_s=st.floats(0.0, 10.0), hit_tokens=st.integers(0, 100_000)), max_size=3
    ),
    target_s=st.floats(0.001, 1.0),
    batch=st.floats(0.0, 200.0),
    slowness=st.floats(0.5, 20.0),
)
def test_what_is_split_is_worth_it(
    prompt: int, hit_share: float, offers: list[PrefillOffer], target_s: float, batch: float, slowness: float
) -> None:
    decides = policy()
    unread = prompt - int(hit_share * (prompt - 1))
    asked = state(
        prompt_tokens=prompt,
        hit_tokens=prompt - unread,
        offers=offers,
        itl_target_s=target_s,
        decode_batch=batch,
        slowness=slowness,
    )
    if decides.choose(asked) is Why.SPLIT:
        assert asked.context_tokens is not None
        context = batch * asked.context_tokens
        own_s = slowness * TIMES.step_s(decode_requests=batch, kv_tokens=context)
        with_it_s = slowness * TIMES.step_s(prefill_tokens=min(unread, 8192), decode_requests=batch, kv_tokens=context)
        assert own_s <= target_s < with_it_s
        in_time = [offer for offer in offers if offer.wait_s <= decides.config.max_wait_s]
        there_s = min(decides.prefill_s(max(0, prompt - offer.hit_tokens)) for offer in in_time)
        assert there_s + decides.config.transfer.transfer_s(prompt) <= 1.5 * decides.prefill_s(unread)


@given(st.integers(1, 64), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_every_pool_that_is_split_keeps_a_replica_for_each_side(
    replicas: int, prefill_s: float, decode_s: float
) -> None:
    reading = prefill_replicas(replicas, prefill_s, decode_s)
    assert 0 <= reading < replicas or (reading, replicas) == (0, 1)


def test_replicas_follow_the_share_of_the_work_and_small_setups_stay_unsplit() -> None:
    assert prefill_replicas(8, prefill_s=25.0, decode_s=75.0) == 2
    assert prefill_replicas(2, prefill_s=20.0, decode_s=80.0) == 0
    assert prefill_replicas(1, prefill_s=99.0, decode_s=1.0) == 0
    assert prefill_replicas(4, prefill_s=0.0, decode_s=0.0) == 0


def test_slots_of_a_prefill_replica_are_the_prompts_of_two_steps() -> None:
    assert prefill_slots(8192, 1024.0) == 16
    assert prefill_slots(8192, 50_000.0) == 1
    with pytest.raises(InputError, match="budget of 0"):
        prefill_slots(0, 10.0)


lengths = st.lists(st.integers(1, 2000), max_size=20)


@given(held=lengths, mean=st.integers(1, 500), safe_tokens=st.floats(0.0, 20_000.0))
def test_prompts_on_board_and_those_to_come_keep_to_what_is_safe_of_the_cache(
    held: list[int], mean: int, safe_tokens: float
) -> None:
    """Equation 6: the most whose lengths sum to that; one goes in any case, so that none waits for ever."""
    prompts = safe_prompts(held, mean, safe_tokens)
    tokens = [*held, *[mean] * 20_001]
    assert prompts == 1 or sum(tokens[:prompts]) <= safe_tokens
    assert sum(tokens[: prompts + 1]) > safe_tokens


def test_a_cache_that_has_no_bound_bounds_no_prompts() -> None:
    assert safe_prompts([10] * 64, 10.0, math.inf) > 1 << 40


arrivals = st.lists(st.tuples(st.floats(0.0, 1e6), st.integers(0, 7)), min_size=2, max_size=40)


@given(arrivals, st.sampled_from([0.0, 0.25, 3.0]))
def test_inside_a_bucket_and_between_windows_the_first_come_is_the_first_served(
    requests: list[tuple[float, int]], window_s: float
) -> None:
    order = BucketOrder(BucketOrderConfig(window_s=window_s))
    keyed = sorted((order.key(arrival_s, bucket), arrival_s, bucket) for arrival_s, bucket in requests)
    for (_, first_s, first_bucket), (_, second_s, second_bucket) in zip(keyed, keyed[1:], strict=False):
        assert first_s - second_s <= window_s + 1e-6  # nothing overtakes by more than a window
        if first_bucket == second_bucket:
            assert first_s <= second_s + 1e-6


def test_within_a_window_prompts_of_one_bucket_go_together() -> None:
    order = BucketOrder(BucketOrderConfig(window_s=1.0))
    waiting = [(0.1, 1), (0.2, 0), (0.3, 1), (0.4, 0), (1.1, 0)]
    assert sorted(waiting, key=lambda each: order.key(*each)) == [(0.2, 0), (0.4, 0), (0.1, 1), (0.3, 1), (1.1, 0)]


def test_buckets_follow_the_lengths_and_batches_waste_less() -> None:
    order = BucketOrder(BucketOrderConfig(refit_every=32))
    lengths = [100, 110, 120, 130, 3000, 3100, 3200, 3300] * 8
    buckets = [order.assign(tokens) for tokens in lengths][-8:]
    assert len(order.edges) > 2
    assert set(buckets[:4]).isdisjoint(buckets[4:])
    apart = padded_tokens(lengths[:4]) + padded_tokens(lengths[4:8])
    assert apart < padded_tokens(lengths[:8]) / 5
    assert padded_tokens([]) == 0


@pytest.mark.parametrize("wrong", [{"mode": "sometimes"}, {"min_prompt_tokens": 0}, {"max_wait_s": 0.0}, {"gain": 0.5}])
def test_a_wrong_setting_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PrefillDecodeConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="s_per_token"):
        TransferTimes(s_per_token=-1.0)
