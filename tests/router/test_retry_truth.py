from router.retry_truth import RetryTruth
from tests.fakes import ManualClock


def test_a_refusal_is_judged_by_the_next_request_that_is_taken() -> None:
    clock, noted = ManualClock(), list[tuple[str, float]]()
    truth = RetryTruth(clock.now, lambda slo_class, later_s: noted.append((slo_class, later_s)))
    truth.taken("a")
    truth.refused("a", 5.0)
    truth.refused("b", 1.0)
    clock.advance_to(2.0)
    truth.refused("a", 9.0)  # before its time: nothing is shown by that
    truth.refused("b", 9.0)
    clock.advance_to(3.0)
    truth.taken("a")
    truth.taken("b")
    truth.taken("a")
    truth.refused("a", 1.0)
    clock.advance_to(9.0)
    truth.taken("a")
    assert noted == [("a", -2.0), ("b", 2.0), ("a", 0.0)]
