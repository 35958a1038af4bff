"""What is noted of requests: how they ended and how long they took, what their keys used and owe."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from policies.errors import AdmissionError
from policies.router.admission import Quota, Refusal
from policies.router.explanation import Cause, Served, cause, refusal_cause
from router.clock import Clock
from router.codec import WHOLE
from router.ledger import Entry
from router.metrics import RouterMetrics
from router.recent import UNKEPT, RecentRequests
from router.retry_truth import RetryTruth
from router.scale_need import ScaleNeed
from router.settlements import Settlements
from router.timing import RequestTiming


class Accounting:
    """Counts and charges the requests of one router.

    Attributes:
        settlements: what is still to be told to the shared state of the tokens that keys used.
    """

    def __init__(self, *, metrics: RouterMetrics, clock: Clock, shared_clock: Clock, settlements: Settlements) -> None:
        self._metrics, self._clock, self._shared_clock = metrics, clock, shared_clock
        self.settlements = settlements
        self._retries = RetryTruth(clock.now, metrics.note_retry)
        self._recent, self._unkept = RecentRequests(), RecentRequests(UNKEPT)
        self._need = ScaleNeed()

    def pages(self) -> dict[str, bytes]:
        """What this router publishes of itself, by name."""
        recent, unkept = self._recent.page(), self._unkept.page()
        need = self._need.page(self._clock.now())
        return {"metrics": self._metrics.exposition(), "recent": recent, "unkept": unkept, "need": need}

    # Before a request runs

    def refused(
        self, refusal: Refusal, slo_class: str, timing: RequestTiming, entry: Entry[Any] | None = None
    ) -> AdmissionError:
        """The error for its client; counted, unless the request was cancelled meanwhile.

        Args:
            entry: None where there was no room for all engine requests of a client's.
        """
        if timing.outcome is None:
            reason = Cause.FULL if entry is None else refusal_cause(refusal.reason)
            self.note_end(slo_class, 0 if entry is None else entry.ticket.bin_index, timing, "refused")
            self._metrics.refused.labels(slo_class, reason).inc()
            if entry is None:
                self._metrics.unkept.labels(slo_class, reason).inc()
            else:
                self._note_unkept(entry, served(entry, refused=reason))
        if refusal.reason == "late":
            self._retries.refused(slo_class, refusal.retry_after_s)
        why = f"class {slo_class} takes no more for now ({refusal.reason})"
        return AdmissionError(f"{why}, try again in {refusal.retry_after_s:.1f} s", refusal.retry_after_s)

    def taken(self, slo_class: str) -> None:
        """A request of a class that refuses what would be late may queue."""
        self._retries.taken(slo_class)

    def charged(self, entry: Entry[Any], quotas: Sequence[Quota] = ()) -> None:
        """A store took its ticket under these quotas. Only the first time counts, for then it paid."""
        bill = entry.bill
        if bill is None or bill.charged_tokens is not None:
            return
        bill.charged_tokens = bill.quota.cost if bill.quota in quotas else 0.0
        if entry.has_ended:  # before this was known
            self._settle(entry)

    def arrived(self, entry: Entry[Any]) -> None:
        """A store has seen it, and may have predicted when its first token comes."""
        self._need.queued(entry, self._clock.now())

    def waits(self, entries: Iterable[Entry[Any]]) -> None:
        """Those that have no replica now."""
        now_s, longest_s = self._clock.now(), defaultdict[str, float](float)
        for entry in entries:
            longest_s[entry.slo_class] = max(longest_s[entry.slo_class], now_s - entry.waiting_since_s)
        self._metrics.note_waits(longest_s)

    def planned(self, entry: Entry[Any], planned_key: float, others: Iterable[float | None]) -> None:
        """In shadow mode, of one that starts: whether the policies would have started one of the others first."""
        earlier = any(other is not None and other < planned_key for other in others)
        self._metrics.shadow_starts.labels(entry.slo_class, "later" if earlier else "same").inc()

    def started(self, entry: Entry[Any]) -> None:
        """It was sent; the first time counts."""
        if entry.timing.assigned_s is None:
            entry.timing.assigned_s = self._clock.now()
            entry.metrics.queue_wait_s.observe(entry.timing.assigned_s - entry.timing.received_s)

    # After it has ended

    def ended(self, entry: Entry[Any], outcome: str) -> None:
        self.note_end(entry.slo_class, entry.ticket.bin_index, entry.timing, outcome)
        now_s = self._clock.now()
        if entry.trail is not None:
            entry.trail.left(now_s)
        if outcome in WHOLE:
            entry.metrics.e2e_s.observe(now_s - entry.timing.received_s)
            if entry.timing.promise.tpot_s is not None and (gap_s := entry.timing.gap_s) is not None:
                entry.metrics.promise_gap_s.observe(gap_s)
        self._need.ended(entry, outcome, now_s)
        self._note_recent(entry, outcome)
        self._note_foresight(entry)
        if entry.timing.kept is not None:
            self._note_unkept(entry, served(entry))
        self._note_usage(entry)
        self._settle(entry)

    def note_end(self, slo_class: str, bin_index: int, timing: RequestTiming, outcome: str) -> None:
        """Also of what came to no queue."""
        timing.outcome = outcome
        self._metrics.requests.labels(slo_class, str(bin_index), outcome).inc()
        if timing.key:
            self._metrics.keys.ended(timing.key, outcome)
        if (kept := timing.kept) is not None:
            self._metrics.slo_requests.labels(slo_class, *("met" if each else "missed" for each in kept)).inc()

    def _note_recent(self, entry: Entry[Any], outcome: str) -> None:
        timing, ticket = entry.timing, entry.ticket
        predicted = ticket.predicted_output_tokens
        timing.ended = {
            "at": round(self._shared_clock.now(), 3),
            "request_id": entry.request_id,
            "slo_class": entry.slo_class,
            "bin": ticket.bin_index,
            "prompt_tokens": entry.prompt_tokens,
            "predicted_tokens": None if predicted is None else round(predicted, 1),
            "output_tokens": timing.output_tokens,
            "wait_s": _since(timing.received_s, timing.assigned_s),
            "ttft_s": _since(timing.received_s, timing.first_token_s),
            "replica": entry.replica_id,
            "moves": entry.moves,
            "recalls": entry.recalls,
            "resumed": entry.continuations,
            "outcome": outcome,
        }
        self._recent.note(timing.ended)

    def _note_foresight(self, entry: Entry[Any]) -> None:
        """By how much its first token missed the time at which it was predicted."""
        timing, foreseen = entry.timing, entry.foreseen
        if foreseen is not None and timing.first_token_s is not None:
            first_s = timing.first_token_s - timing.submitted_s
            entry.metrics.foreseen_ttft_s.inc(first_s)
            entry.metrics.ttft_error_s.inc(abs(foreseen.first_token_s - first_s))

    def _note_unkept(self, entry: Entry[Any], came: Served) -> None:
        """Nothing, where its promise was kept."""
        if (why := cause(came)) is None:
            return
        entry.timing.cause = why
        self._metrics.unkept.labels(entry.slo_class, why).inc()
        self._unkept.note(
            {
                "at": round(self._shared_clock.now(), 3),
                "request_id": entry.request_id,
                "slo_class": entry.slo_class,
                "cause": why,
                "replica": entry.replica_id,
                "served": came,
            }
        )

    def _note_usage(self, entry: Entry[Any]) -> None:
        """What never came to a replica took nothing."""
        if entry.timing.assigned_s is None:
            return
        prompt_tokens, output_tokens = entry.prompt_tokens, entry.timing.output_tokens
        entry.metrics.prompt_tokens.inc(prompt_tokens)
        entry.metrics.output_tokens.inc(output_tokens)
        if entry.timing.key:
            self._metrics.keys.took(entry.timing.key, prompt_tokens, output_tokens)

    # Bills

    def _settle(self, entry: Entry[Any], *, is_over: bool = True) -> None:
        """May be repeated: what was settled is part of the bill."""
        if entry.bill is not None:
            self.settlements.settle(entry.bill, entry.timing.output_tokens, is_over=is_over)

    def note_overdrafts(self, entries: Iterable[Entry[Any]]) -> None:
        """Charge requests that go on beyond what they were charged: they may go on for long."""
        for entry in entries:
            self._settle(entry, is_over=False)


def served(entry: Entry[Any], refused: Cause | None = None) -> Served:
    """What a request was promised, and what came."""
    timing, ticket = entry.timing, entry.ticket
    received_s, assigned_s = timing.received_s, timing.assigned_s
    return Served(
        promise=timing.promise,
        refused=refused,
        preparing_s=timing.submitted_s - received_s,
        wait_s=_since(timing.submitted_s, assigned_s),
        reading_s=None if assigned_s is None else _since(assigned_s, timing.first_token_s),
        gap_s=timing.gap_s,
        whole_s=_since(received_s, timing.last_token_s),
        is_whole=timing.outcome in WHOLE,
        moves=entry.moves,
        recalls=entry.recalls,
        predicted_tokens=ticket.predicted_output_tokens,
        output_tokens=timing.output_tokens,
        foreseen=entry.foreseen,
    )


def _since(start_s: float, then_s: float | None) -> float | None:
    return None if then_s is None else round(then_s - start_s, 4)
