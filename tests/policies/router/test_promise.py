from policies.router.promise import NO_PROMISE, Promise


def test_each_target_is_kept_by_itself_and_one_token_keeps_that_of_the_further_ones() -> None:
    promise = Promise(ttft_s=1.0, tpot_s=0.1)
    assert promise.kept(1.0, 0.1) == (True, True)
    assert promise.kept(1.1, 0.05) == (False, True)
    assert promise.kept(0.5, 0.2) == (True, False)
    assert promise.kept(0.5, None) == (True, True)
    assert NO_PROMISE.kept(99.0, 99.0) == (True, True)


def test_a_target_is_tighter_that_is_closer_or_was_not_there() -> None:
    own = Promise(ttft_s=1.0)
    assert Promise(ttft_s=0.5, tpot_s=9.0).tighter_than(own) == ["ttft_s", "tpot_s"]
    assert Promise(ttft_s=1.0).tighter_than(own) == []
    assert NO_PROMISE.tighter_than(own) == []
    assert own.tighter_than(NO_PROMISE) == ["ttft_s"]
