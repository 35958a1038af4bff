"""How streams and new requests are counted."""

from typing import Any

from tests.hosts.outcome import kind, outcome, waits


def stream(why_not: str | None, text: str = "ab", gap_s: float = 1.0) -> dict[str, Any]:
    return {"prompt": 0, "why_not": why_not, "text": text, "longest_gap_s": gap_s}


def probe(began_s: float, seconds: float, answer: int | str = 200, url: str = "a") -> dict[str, Any]:
    return {"url": url, "began_s": began_s, "seconds": seconds, "answer": answer, "retry_after": None}


def test_a_stream_that_ends_early_is_broken_and_one_that_nobody_ends_is_lost() -> None:
    found = [
        kind(each) for each in (stream(None), stream("ReadError", "a"), stream("ReadTimeout", "a"), stream("x", ""))
    ]
    assert found == ["whole", "broken", "lost", "refused"]


def test_a_text_is_wrong_unless_it_is_the_undisturbed_one_or_the_beginning_of_it() -> None:
    streams = [
        stream(None),
        stream("ReadError", "a"),
        stream("ReadError", "b"),
        stream(None, "a"),
        stream("x", "", 99.0),
    ]
    made = outcome({"streams": streams, "probes": [probe(0.0, 1.0, 503)]}, {0: "ab"})
    assert (made.wrong, made.whole, made.broken, made.refused) == (2, 2, 2, 1)
    assert made.longest_gap_s == 1.0
    assert made.answers == {"503": 1} and made.without_retry_after == 1


def test_whoever_is_refused_waits_until_a_later_request_at_the_same_address_is_answered() -> None:
    asked = [probe(0.0, 0.5, "ConnectError"), probe(1.0, 0.5, 200, "b"), probe(2.0, 3.0), probe(3.0, 0.2)]
    assert waits(asked) == [3.2, 0.5, 3.0, 0.2]
