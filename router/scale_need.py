"""What routers tell of their requests, by which engine replicas are scaled where they keep promises."""

from collections.abc import Iterable
from typing import Any

import msgspec

from policies.router.promised_scale import Ratios
from router.codec import WHOLE
from router.ledger import Entry


class ScaleNeed:
    """Of one router: the work that came, and how near promises came to breaking in the last minute."""

    def __init__(self) -> None:
        self._ratios = Ratios()
        self._arrived_s = 0.0

    def queued(self, entry: Entry[Any], now_s: float) -> None:
        """It came; what may not queue counts as well, and what takes what others leave does not."""
        timing, foreseen = entry.timing, entry.foreseen
        if entry.ticket.fills_idle:
            return
        self._arrived_s += entry.ticket.work_s
        if timing.promise.ttft_s is not None and foreseen is not None:
            first_s = timing.submitted_s - timing.received_s + foreseen.first_token_s
            self._ratios.note(now_s, entry.slo_class, "ttft_s", first_s / timing.promise.ttft_s)

    def ended(self, entry: Entry[Any], outcome: str, now_s: float) -> None:
        timing = entry.timing
        if outcome not in WHOLE or entry.ticket.fills_idle:
            return
        if timing.promise.tpot_s is not None and timing.gap_s is not None:
            self._ratios.note(now_s, entry.slo_class, "tpot_s", timing.gap_s / timing.promise.tpot_s)
        if timing.promise.e2e_s is not None:
            self._ratios.note(now_s, entry.slo_class, "e2e_s", (now_s - timing.received_s) / timing.promise.e2e_s)

    def page(self, now_s: float) -> bytes:
        """As JSON: `arrived_s`, seconds of work that ever came, and the `ratio`, null without a request."""
        return msgspec.json.encode({"arrived_s": self._arrived_s, "ratio": self._ratios.worst(now_s)})


def told(pages: Iterable[bytes]) -> dict[str, float]:
    """Of several routers together: all work that came, how many they are, and the mean of their ratios if there is one.

    They share their requests evenly, so the highest of them would be the one with the fewest by chance.
    """
    found = [msgspec.json.decode(page) for page in pages]
    ratios = [each["ratio"] for each in found if each["ratio"] is not None]
    together = {"arrived_s": float(sum(each["arrived_s"] for each in found)), "routers": float(len(found))}
    return together | ({"ratio": sum(ratios) / len(ratios)} if ratios else {})
