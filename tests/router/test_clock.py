import time

import pytest

from router.clock import MonotonicClock, SharedClock


def test_the_monotonic_clock_is_the_machines() -> None:
    before_s = time.monotonic()
    reading_s = MonotonicClock().now()
    assert before_s <= reading_s <= time.monotonic()


def test_before_the_first_measurement_the_shared_clock_is_the_local_one() -> None:
    before_s = time.monotonic()
    reading_s = SharedClock().now()
    assert before_s <= reading_s <= time.monotonic()


@pytest.mark.parametrize("earlier_s", [None, 9000.0], ids=["first", "after another"])
def test_the_store_is_taken_to_have_spoken_halfway_between_question_and_answer(earlier_s: float | None) -> None:
    clock = SharedClock()
    before_s = time.monotonic()
    if earlier_s is not None:
        clock.adjust(earlier_s, before_s, before_s)
    clock.adjust(5000.0, before_s - 3.0, before_s - 1.0)
    reading_s = clock.now()
    since_then_s = time.monotonic() - (before_s - 2.0)
    assert 5002.0 - 1e-6 <= reading_s <= 5000.0 + since_then_s + 1e-6
