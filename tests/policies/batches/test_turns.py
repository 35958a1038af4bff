"""Keys take turns, and within a key the shortest window comes first."""

from collections import Counter

from policies.batches.turns import Waiting, choose

LONG = Waiting(batch_id="a", key="x", expires_at_s=200.0)
SHORT = Waiting(batch_id="b", key="x", expires_at_s=100.0)
OTHER = Waiting(batch_id="c", key="y", expires_at_s=300.0)


def test_within_a_key_the_batch_that_expires_first_is_next() -> None:
    assert choose([LONG, SHORT], {}) is SHORT


def test_a_key_with_less_in_flight_comes_first_however_long_its_window() -> None:
    assert choose([SHORT, OTHER], {"x": 1}) is OTHER


def test_many_batches_of_one_key_get_no_more_than_one_of_another() -> None:
    in_flight: Counter[str] = Counter()
    for _ in range(10):
        in_flight[choose([LONG, SHORT, OTHER], in_flight).key] += 1
    assert in_flight == {"x": 5, "y": 5}
