"""Why a promise was not kept, and what would have kept it."""

from dataclasses import replace

import pytest

from policies.router.admission import Foreseen
from policies.router.explanation import Cause, Remedies, Served, cause, refusal_cause, remedies
from policies.router.promise import Promise

PROMISE = Promise(ttft_s=2.0, tpot_s=0.1, e2e_s=30.0)
KEPT = Served(
    promise=PROMISE,
    preparing_s=0.1,
    wait_s=0.5,
    reading_s=0.5,
    gap_s=0.05,
    whole_s=10.0,
    is_whole=True,
    predicted_tokens=100.0,
    output_tokens=100,
    foreseen=Foreseen(wait_s=0.4, reading_s=0.5, elsewhere_s=0.3, replicas=2),
)
LATE = replace(KEPT, wait_s=2.5)


def test_a_promise_that_was_kept_has_no_cause() -> None:
    assert cause(KEPT) is None


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (replace(KEPT, refused=Cause.QUOTA), Cause.QUOTA),
        (replace(KEPT, is_whole=False), Cause.FAILED),
        (replace(KEPT, whole_s=None, is_whole=False), Cause.FAILED),
        (replace(LATE, moves=1), Cause.MOVED),
        (replace(LATE, recalls=1), Cause.RECALLED),
        (LATE, Cause.QUEUE),
        (replace(KEPT, reading_s=2.5), Cause.READING),
        (replace(KEPT, preparing_s=2.5), Cause.PREPARING),
        (replace(LATE, foreseen=Foreseen(wait_s=2.2, reading_s=0.5)), Cause.FORESEEN),
        (replace(LATE, preparing_s=2.0, foreseen=Foreseen(wait_s=2.2, reading_s=0.5)), Cause.PREPARING),
        (replace(LATE, foreseen=None), Cause.QUEUE),
        (replace(KEPT, gap_s=0.2), Cause.PACE),
        (replace(KEPT, whole_s=31.0), Cause.PACE),
        (replace(KEPT, whole_s=31.0, output_tokens=126), Cause.LENGTH),
        (replace(KEPT, whole_s=31.0, output_tokens=126, gap_s=0.2), Cause.PACE),
        (replace(KEPT, whole_s=31.0, output_tokens=126, predicted_tokens=None), Cause.PACE),
    ],
)
def test_the_part_that_took_longest_beyond_its_prediction_is_the_cause(served: Served, why: Cause) -> None:
    assert cause(served) is why


def test_a_lost_replica_is_no_matter_where_the_promise_was_kept_all_the_same() -> None:
    assert cause(replace(KEPT, moves=1, recalls=1)) is None


def test_quotas_are_told_by_their_own_names() -> None:
    told = [refusal_cause(reason) for reason in ("late", "max_waiting", "max_key_share", "tokens_per_minute of k")]
    assert told == [Cause.LATE, Cause.FULL, Cause.KEY_SHARE, Cause.QUOTA]


# It waited 2.5 s for two replicas: three would have had it wait for 5/3 s.
@pytest.mark.parametrize(("ttft_s", "kept"), [(2.2, False), (2.3, True)])
def test_one_more_replica_takes_its_share_of_the_wait(ttft_s: float, kept: bool) -> None:
    promised = replace(LATE, promise=replace(PROMISE, ttft_s=ttft_s))
    assert remedies(promised, "standard", {}).one_more_replica is kept


def test_another_replica_would_have_read_it_sooner() -> None:
    slow = replace(KEPT, reading_s=1.5)
    assert remedies(slow, "standard", {}).another_replica is True  # .1 + .5 + .3 s
    none = replace(slow, foreseen=Foreseen(wait_s=0.5, reading_s=0.5, replicas=1))
    assert remedies(none, "standard", {}).another_replica is None


def test_what_did_not_wait_would_have_come_no_sooner_with_more_replicas() -> None:
    assert remedies(replace(KEPT, wait_s=0.0, reading_s=2.5), "standard", {}).one_more_replica is None


def test_the_tightest_class_that_would_have_been_kept_is_named() -> None:
    classes = {
        "standard": PROMISE,
        "tight": Promise(ttft_s=1.0),
        "lenient": Promise(ttft_s=4.0, tpot_s=0.1),
        "patient": Promise(ttft_s=60.0),
        "offline": Promise(),
    }
    assert remedies(LATE, "standard", classes).another_class == "lenient"
    assert remedies(replace(LATE, gap_s=0.2), "standard", classes).another_class == "patient"
    assert remedies(LATE, "patient", {"patient": classes["patient"]}) == Remedies(False, False, None)


def test_a_refused_request_is_held_to_what_was_predicted() -> None:
    refused = Served(promise=PROMISE, refused=Cause.LATE, foreseen=Foreseen(wait_s=2.4, reading_s=0.2, replicas=1))
    told = remedies(refused, "standard", {"standard": PROMISE, "lenient": Promise(ttft_s=3.0)})
    assert told == Remedies(another_replica=None, one_more_replica=True, another_class="lenient")
