from policies.router.promise import NO_PROMISE, Promise


def test_each_target_is_kept_by_itself_and_one_token_keeps_that_of_the_further_ones() -> None:
    promise = Promise(ttft_s=1.0, tpot_s=0.1, e2e_s=5.0)
    assert promise.kept(1.0, 0.1, 5.0) == (True, True, True)
    assert promise.kept(1.1, 0.05, 2.0) == (False, True, True)
    assert promise.kept(0.5, 0.2, 5.1) == (True, False, False)
    assert promise.kept(0.5, None, 0.5) == (True, True, True)
    assert NO_PROMISE.kept(99.0, 99.0, 999.0) == (True, True, True)


def test_a_target_is_tighter_that_is_closer_or_was_not_there() -> None:
    own = Promise(ttft_s=1.0)
    assert Promise(ttft_s=0.5, tpot_s=9.0, e2e_s=20.0).tighter_than(own) == ["ttft_s", "tpot_s", "e2e_s"]
    assert Promise(ttft_s=1.0).tighter_than(own) == []
    assert NO_PROMISE.tighter_than(own) == []
    assert own.tighter_than(NO_PROMISE) == ["ttft_s"]
