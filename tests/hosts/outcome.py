"""What clients saw of a fault: streams whole, broken or lost, gaps between tokens, waits of new requests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HANGS = {"ReadTimeout", "ConnectTimeout", "PoolTimeout", "WriteTimeout"}


@dataclass(frozen=True)
class Outcome:
    """
    whole: streams that ended with all of their tokens.
    broken: those that ended early, told by an error or a closed connection.
    lost: those of which nothing came any more, until their clients gave up.
    refused: attempts that got no token: a status, or no connection.
    wrong: texts that differ from the undisturbed ones.
    longest_gap_s: of all streams that were begun, before the first token too.
    longest_wait_s: of a new request whose client asks again when it is refused.
    answers: how many new requests got each answer but 200.
    """

    whole: int
    broken: int
    lost: int
    refused: int
    wrong: int
    longest_gap_s: float
    longest_wait_s: float
    answers: Mapping[str, int]
    without_retry_after: int


def outcome(found: Mapping[str, Any], undisturbed: Mapping[int, str]) -> Outcome:
    streams, probes = found["streams"], found["probes"]
    kinds = Counter(kind(stream) for stream in streams)
    return Outcome(
        whole=kinds["whole"],
        broken=kinds["broken"],
        lost=kinds["lost"],
        refused=kinds["refused"],
        wrong=sum(is_wrong(stream, undisturbed[stream["prompt"]]) for stream in streams),
        longest_gap_s=max((each["longest_gap_s"] for each in streams if kind(each) != "refused"), default=0.0),
        longest_wait_s=max(waits(probes), default=0.0),
        answers=Counter(str(probe["answer"]) for probe in probes if probe["answer"] != 200),
        without_retry_after=sum(probe["answer"] == 503 and probe["retry_after"] is None for probe in probes),
    )


def kind(stream: Mapping[str, Any]) -> str:
    if stream["why_not"] is None:
        return "whole"
    if stream["why_not"] in HANGS:
        return "lost"
    return "broken" if stream["text"] else "refused"


def is_wrong(stream: Mapping[str, Any], text: str) -> bool:
    return bool(stream["text"] != text if stream["why_not"] is None else not text.startswith(stream["text"]))


def waits(probes: Sequence[Mapping[str, Any]]) -> list[float]:
    """From each new request to the first answer of 200 that it or a later one at the same address got."""
    answered = [(each["url"], each["began_s"], each["began_s"] + each["seconds"]) for each in probes]
    good = [each for each, probe in zip(answered, probes, strict=True) if probe["answer"] == 200]
    found = []
    for probe in probes:
        ends = (end_s for url, began_s, end_s in good if url == probe["url"] and began_s >= probe["began_s"])
        if (end_s := min(ends, default=None)) is not None:
            found.append(end_s - probe["began_s"] if probe["answer"] != 200 else probe["seconds"])
    return found


def texts(found: Mapping[str, Any]) -> dict[int, str]:
    """Of undisturbed streams.

    Raises AssertionError where one was not whole, or two of one prompt differ.
    """
    assert all(stream["why_not"] is None for stream in found["streams"]), found["streams"]
    made = {stream["prompt"]: stream["text"] for stream in found["streams"]}
    assert all(made[stream["prompt"]] == stream["text"] for stream in found["streams"])
    return made
