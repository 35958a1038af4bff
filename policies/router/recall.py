"""Which running requests of classes that fill idle capacity give their slots back, so that more urgent work starts.

Source: BucketServe (002) section III serves offline work from what online work leaves. That it yields while it runs,
and how, is this project's: a request that is called back is queued again under its old key and continued from the
tokens that it has, so only reading them again is lost.

It follows the order of the queue: a slot is called back only for a request that goes before the one that holds it. By
deadlines what fills idle capacity goes behind all others; that nothing thrashes then, routers see to by bounding how
often one request may be called back. Keys that grow with arrival put what has waited long out of reach of newcomers.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """A request in the queue.

    Attributes:
        key: of the order policy.
        fills_idle: its class takes what others leave; no slot is called back for it.
    """

    key: float
    fills_idle: bool


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RecallableView:
    """A running request whose slot would serve any class, and which can be continued exactly elsewhere."""

    key: float
    request_id: str


def recalls(waiting: Iterable[WaitingView], recallable: Iterable[RecallableView], recalled: int) -> list[str]:
    """The ids to call back, those due last first; as many as urgent requests wait for whom no slot is on its way.

    Args:
        waiting: what no replica could take, the most urgent first. From the first of a class that fills idle capacity
            on, no request is helped: that one would get the slot.
        recalled: slots that are on their way already.
    """
    last_first: list[RecallableView] | None = None
    called: list[str] = []
    for request in waiting:
        if request.fills_idle:
            break
        if recalled:
            recalled -= 1
            continue
        if last_first is None:  # most often nothing urgent waits
            last_first = sorted(recallable, reverse=True)
        if len(called) == len(last_first) or last_first[len(called)].key <= request.key:
            break
        called.append(last_first[len(called)].request_id)
    return called
