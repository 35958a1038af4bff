"""Why a request was not served as it was promised, and what would have kept the promise.

A request is queued with a prediction: so long until its turn, so long until it is read. What came is held beside that,
and the part that took longest beyond its prediction is the cause. What would have helped is reckoned by the rules that
serve: work waits for all replicas of a class together, so one more makes the wait shorter by its share.
No paper of the five treats it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policies.router.admission import Foreseen
from policies.router.promise import Promise

_MUCH_LONGER = 1.25  # than predicted makes an answer's length the cause of its late end


class Cause(StrEnum):
    """Why a promise was not kept, of one request."""

    LATE = "late"
    """Refused: its first token was predicted to come too late."""
    FULL = "max_waiting"
    """Refused: as many of its class waited as may."""
    KEY_SHARE = "max_key_share"
    """Refused: as many of its API key waited in the class as may."""
    QUOTA = "quota"
    """Refused: its API key had spent an allowance."""
    FAILED = "failed"
    """It was not answered whole, though its client stayed."""
    MOVED = "moved"
    """Its replica was lost, and it began anew or went on elsewhere."""
    RECALLED = "recalled"
    """Its slot was taken back for a more urgent request."""
    FORESEEN = "foreseen"
    """As it came its first token was predicted to be late, and its class queues such requests."""
    PREPARING = "preparing"
    """Its prompt took long to be made ready: the template, the tokenizer, or a router that was busy."""
    QUEUE = "queue"
    """It waited longer than was predicted: more urgent requests came, or answers were longer."""
    READING = "reading"
    """Its prompt was read more slowly than was predicted, or less of it was cached."""
    PACE = "pace"
    """Its tokens came too far apart: the engine's steps took long."""
    LENGTH = "length"
    """Its answer was longer than was predicted, and its last token was due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a request was promised, and what came, in seconds; None until it happened.

    Attributes:
        refused: why it might not queue.
        preparing_s: from its arrival until it was ready to be queued.
        wait_s: from there until it was sent to a replica.
        reading_s: from there until its first token.
        gap_s: per token after the first, on average.
        whole_s: from its arrival until its last token.
        is_whole: it was answered to the end.
        moves, recalls: how often it lost its replica, and its slot.
    """

    promise: Promise
    refused: Cause | None = None
    preparing_s: float = 0.0
    wait_s: float | None = None
    reading_s: float | None = None
    gap_s: float | None = None
    whole_s: float | None = None
    is_whole: bool = False
    moves: int = 0
    recalls: int = 0
    predicted_tokens: float | None = None
    output_tokens: int = 0
    foreseen: Foreseen | None = None

    @property
    def first_token_s(self) -> float | None:
        """From its arrival; as predicted, where it did not run."""
        if self.wait_s is not None and self.reading_s is not None:
            return self.preparing_s + self.wait_s + self.reading_s
        return None if self.foreseen is None else self.preparing_s + self.foreseen.first_token_s


def refusal_cause(reason: str) -> Cause:
    """Of a `Refusal`: quotas are told by their own names."""
    return Cause(reason) if reason in (Cause.LATE, Cause.FULL, Cause.KEY_SHARE) else Cause.QUOTA


def cause(served: Served) -> Cause | None:
    """None where what was promised was kept."""
    if served.refused is not None:
        return served.refused
    first_s, whole_s = served.first_token_s, served.whole_s
    if not served.is_whole or first_s is None or whole_s is None:
        return Cause.FAILED
    in_time, paced, ended = served.promise.kept(first_s, served.gap_s, whole_s)
    if in_time and paced and ended:
        return None
    if served.moves:
        return Cause.MOVED
    if served.recalls:
        return Cause.RECALLED
    if not in_time:
        return _late_cause(served)
    if paced and _is_long(served):
        return Cause.LENGTH
    return Cause.PACE


def _late_cause(served: Served) -> Cause:
    """Of a first token that came and was late."""
    expected, left_s = served.foreseen or Foreseen(0.0, 0.0), served.promise.left(served.preparing_s).ttft_s or 0.0
    if left_s <= 0.0:
        return Cause.PREPARING
    if expected.first_token_s > left_s:
        return Cause.FORESEEN
    beyond = {
        Cause.PREPARING: served.preparing_s,
        Cause.QUEUE: (served.wait_s or 0.0) - expected.wait_s,
        Cause.READING: (served.reading_s or 0.0) - expected.reading_s,
    }
    return max(beyond, key=lambda each: beyond[each])


def _is_long(served: Served) -> bool:
    predicted = served.predicted_tokens
    return predicted is not None and served.output_tokens > _MUCH_LONGER * predicted


class Remedies(NamedTuple):
    """What would have kept the promise; None where that was not the matter.

    Attributes:
        another_replica: one that had a slot as it was queued.
        one_more_replica: beside those that served its class.
        another_class: the tightest one whose promises what came would have met, or what was predicted.
    """

    another_replica: bool | None = None
    one_more_replica: bool | None = None
    another_class: str | None = None


def remedies(served: Served, slo_class: str, classes: Mapping[str, Promise]) -> Remedies:
    """Args:
    slo_class: its own.
    classes: what each class promises, in which the request could have been sent.
    """
    first_s, due_s, expected = served.first_token_s, served.promise.ttft_s, served.foreseen
    fits = [
        name
        for name, promise in classes.items()
        if name != slo_class and first_s is not None and all(promise.kept(first_s, served.gap_s, served.whole_s or 0.0))
    ]
    other = min(fits, key=lambda name: _tightness(classes[name]), default=None)
    if first_s is None or due_s is None or first_s <= due_s or expected is None:
        return Remedies(another_class=other)
    wait_s = expected.wait_s if served.wait_s is None else served.wait_s
    rest_s = first_s - wait_s
    more = rest_s + wait_s * expected.replicas / (expected.replicas + 1) <= due_s if wait_s > 0.0 else None
    elsewhere_s = expected.elsewhere_s
    another = None if elsewhere_s is None else served.preparing_s + wait_s + elsewhere_s <= due_s
    return Remedies(another_replica=another, one_more_replica=more, another_class=other)


def _tightness(promise: Promise) -> tuple[float, ...]:
    return tuple(float("inf") if each is None else each for each in (promise.ttft_s, promise.tpot_s, promise.e2e_s))
