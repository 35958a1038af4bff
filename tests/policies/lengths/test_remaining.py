"""How many tokens answers have left."""

import pytest

from policies.lengths.remaining import RemainingTokens
from policies.types import FinishedRequest, Left, Phase, RunningRequests, StepResult

EMPTY = RunningRequests.empty()


def result(*finished: FinishedRequest) -> StepResult:
    return StepResult(
        now_s=0.0, step_s=0.01, phase=Phase.MIXED, prefill_tokens=0, prefill_requests=0, decode_requests=1,
        kv_tokens=0, max_batch_size=8, running_count=1, waiting_count=0, finished=finished,
    )  # fmt: skip


def learned(
    lengths: list[int], predicted: float | None = None, *, classes: int = 1, running: RunningRequests = EMPTY
) -> RemainingTokens:
    """Lengths of class classes - 1."""
    made = RemainingTokens(classes)
    for length in lengths:
        ended = FinishedRequest(
            prompt_tokens=10, output_tokens=length, class_index=classes - 1, predicted_output_tokens=predicted
        )
        made.observe(result(ended))
    for _ in range(100):
        made.refresh(running)
    return made


def test_before_any_answer_its_prediction_speaks_and_without_one_it_doubles() -> None:
    made = RemainingTokens()
    assert made.left(0, 100.0) == Left(50.0, 100.0, 100.0)
    assert made.left(0, 100.0, 40) == Left(10.0, 60.0, 60.0)
    assert made.left(0, 100.0, 400) == Left(1.0, 1.0, 1.0)
    assert made.left(0, None, 30).mean == 30.0


def test_answers_of_the_class_speak_for_one_without_a_prediction() -> None:
    told = learned([*range(1, 101)] * 3).left(0, None)
    assert told.short == pytest.approx(10, abs=2)
    assert told.median == pytest.approx(50, abs=3)
    assert told.mean == pytest.approx(50, abs=3)


def test_what_has_grown_long_is_compared_with_those_that_did() -> None:
    told = learned([40] * 200 + [1000] * 50)
    assert told.left(0, None).median < 45
    assert told.left(0, None, 60).short > 800


def test_a_prediction_is_worth_what_answers_with_one_like_it_were() -> None:
    told = learned([200] * 40, predicted=100.0)
    assert told.left(0, 100.0).mean == pytest.approx(200, rel=0.1)
    assert told.left(0, 400.0).mean == 400.0  # nothing like it was seen


def test_classes_are_told_apart_and_may_be_rearranged() -> None:
    told = learned([200] * 40, predicted=100.0, classes=2)
    assert told.left(0, 100.0).mean == 100.0
    told.rearrange([1, None, 0])
    assert [round(told.left(index, 100.0).mean, -1) for index in range(3)] == [200, 100, 100]


def test_answers_that_still_run_count_as_at_risk() -> None:
    long_ones = RunningRequests.of(prompt_tokens=[10] * 30, output_tokens=[500] * 30)
    assert learned([20] * 20).left(0, None).mean < 30
    assert learned([20] * 20, running=long_ones).left(0, None).mean > 250


def test_a_bucket_whose_answers_are_all_cut_off_keeps_no_other_from_learning() -> None:
    made = RemainingTokens()
    for _ in range(500):
        made.observe(result(FinishedRequest(10, 5, predicted_output_tokens=1000.0, aborted=True)))
    for _ in range(40):
        made.observe(result(FinishedRequest(10, 200, predicted_output_tokens=100.0)))
    for _ in range(100):
        made.refresh(EMPTY)
    assert made.left(0, 100.0).mean == pytest.approx(200, rel=0.1)


def test_steps_do_not_count_as_tokens_where_one_may_bring_several() -> None:
    """A window of 512 answers ended within 100 steps: of what then runs for as long, all of its age was seen."""
    running = RunningRequests.of(prompt_tokens=[10] * 64, output_tokens=[400] * 64)

    def survival(**settings: bool) -> float:
        made = RemainingTokens(**settings)
        for length in [100, 300] * 300:
            made.observe(result(FinishedRequest(10, length))._replace(decode_requests=length % 300 == 100))
        for _ in range(100):
            made.refresh(running)
        return made.left(0, None).mean

    assert survival(speculates=True) > survival()
