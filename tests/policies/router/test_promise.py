from policies.router.promise import NO_PROMISE, Promise


def test_a_target_is_tighter_that_is_closer_or_was_not_there() -> None:
    own = Promise(ttft_s=1.0)
    assert Promise(ttft_s=0.5, tpot_s=9.0).tighter_than(own) == ["ttft_s", "tpot_s"]
    assert Promise(ttft_s=1.0).tighter_than(own) == []
    assert NO_PROMISE.tighter_than(own) == []
    assert own.tighter_than(NO_PROMISE) == ["ttft_s"]
