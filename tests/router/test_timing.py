import pytest

from policies.router.promise import Promise
from router.timing import RequestTiming


def ended(outcome: str, tokens: int = 3, first_token_s: float | None = 10.5) -> RequestTiming:
    """Received at 10 s, with its last token at 10.7 s."""
    return RequestTiming(
        received_s=10.0,
        submitted_s=10.1,
        promise=Promise(ttft_s=0.6, tpot_s=0.15),
        first_token_s=first_token_s,
        last_token_s=10.7,
        output_tokens=tokens,
        outcome=outcome,
    )


@pytest.mark.parametrize(
    ("timing", "kept"),
    [
        (ended("stop"), (True, True)),
        (ended("length", 2), (True, False)),
        (ended("stop", 1), (True, True)),
        (ended("repetition", first_token_s=10.65), (False, True)),
        (ended("error"), (False, False)),
        (ended("refused"), (False, False)),
        (ended("stop", 0, None), (False, False)),
        (ended("cancelled"), None),
    ],
)
def test_promises_are_judged_by_what_the_client_got(timing: RequestTiming, kept: tuple[bool, bool] | None) -> None:
    assert timing.kept == kept
