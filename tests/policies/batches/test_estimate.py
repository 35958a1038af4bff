"""The end of a batch, foreseen by its pace."""

from policies.batches.estimate import expected_end_s


def test_what_is_left_takes_as_long_for_each_as_what_was_answered() -> None:
    assert expected_end_s([(100.0, 10), (110.0, 30), (120.0, 50)], total=150) == 120.0 + 100 * 0.5


def test_the_end_is_now_when_nothing_is_left() -> None:
    assert expected_end_s([(100.0, 10), (120.0, 50)], total=50) == 120.0


def test_a_batch_whose_pace_is_unknown_has_no_foreseen_end() -> None:
    assert expected_end_s([(100.0, 10)], total=50) is None
    assert expected_end_s([(100.0, 10), (120.0, 10)], total=50) is None
