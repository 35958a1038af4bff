import pytest

from policies.router.promise import Promise
from router.timing import HttpContext, RequestTiming


def ended(
    outcome: str, tokens: int = 3, first_token_s: float | None = 10.5, last_token_s: float = 10.7
) -> RequestTiming:
    """Received at 10 s."""
    return RequestTiming(
        received_s=10.0,
        submitted_s=10.1,
        promise=Promise(ttft_s=0.6, tpot_s=0.15, e2e_s=0.8),
        first_token_s=first_token_s,
        last_token_s=last_token_s,
        output_tokens=tokens,
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("timing", "kept"),
    [
        (ended("stop"), (True, True, True)),
        (ended("length", 2), (True, False, True)),
        (ended("stop", 1), (True, True, True)),
        (ended("repetition", first_token_s=10.65), (False, True, True)),
        (ended("stop", 9, last_token_s=10.81), (True, True, False)),
        (ended("error"), (False, False, False)),
        (ended("refused"), (False, False, False)),
        (ended("stop", 0, None), (False, False, False)),
        (ended("cancelled"), None),
    ],
)
def test_promises_are_judged_by_what_the_client_got(
    timing: RequestTiming, kept: tuple[bool, bool, bool] | None
) -> None:
    assert timing.kept == kept


def test_nothing_is_promised_to_the_nobody_who_waits_for_a_copy() -> None:
    copy = HttpContext(received_s=10.0, slo_class="offline", is_copy=True).timing(10.1)
    copy.outcome = "error"
    assert copy.kept is None


def test_the_mean_gap_is_that_of_the_tokens_after_the_first() -> None:
    assert ended("stop").gap_s == pytest.approx(0.1)
    assert ended("stop", 1).gap_s is None
    assert ended("stop", 0, None).gap_s is None
