"""A candidate beside the model that it may succeed, as one router sees it: what is in force, and what was counted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from urllib.parse import quote

import msgspec
from starlette.types import ASGIApp

from deployments.config.candidate import CandidateSection
from policies.live import Live
from policies.router.candidate import Verdict, VersionCounts
from policies.router.explanation import Cause
from policies.router.promise import NO_PROMISE, Promise
from router.candidate_metrics import VERDICT_NUMBERS, CandidateMetrics
from router.codec import WHOLE
from router.timing import HttpContext, RequestTiming

# A key that has spent what it may have is refused by either version.
_OF_THE_KEY = frozenset({Cause.QUOTA, Cause.KEY_SHARE})
_PRINTABLE = "!#$&'()*+,-./:;<=>?@[]^_`{|}~"  # ASCII besides letters and digits, for a header


class Version(StrEnum):
    CANDIDATE = "candidate"
    INCUMBENT = "incumbent"


class Outcome(StrEnum):
    """Of an HTTP request that is compared."""

    KEPT = "kept"
    MISSED = "missed"
    FAILED = "failed"
    UNPROMISED = "unpromised"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended.

    Attributes:
        output_tokens: of all its answers.
        whole_s: seconds until the last token of all; None where none came.
    """

    outcome: Outcome
    output_tokens: int = 0
    whole_s: float | None = None


class Tally(msgspec.Struct, kw_only=True):
    """What came of one version's requests in a router.

    Attributes:
        answered: those of which a token came; `output_tokens` and `whole_s` are sums over them.
    """

    kept: int = 0
    missed: int = 0
    failed: int = 0
    unpromised: int = 0
    answered: int = 0
    output_tokens: int = 0
    whole_s: float = 0.0

    def note(self, ended: Ended) -> None:
        setattr(self, ended.outcome, getattr(self, ended.outcome) + 1)
        if ended.whole_s is not None:
            self.answered += 1
            self.output_tokens += ended.output_tokens
            self.whole_s += ended.whole_s

    def add(self, other: "Tally") -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def counts(self) -> VersionCounts:
        requests = self.kept + self.missed + self.failed + self.unpromised
        return VersionCounts(requests=requests, kept=self.kept, missed=self.missed, failed=self.failed)


class Run(msgspec.Struct, kw_only=True):
    """What one router has counted since a candidate began as it is configured now.

    Attributes:
        run_id: another one for each configuration.
    """

    run_id: str = ""
    incumbent: Tally = msgspec.field(default_factory=Tally)
    candidate: Tally = msgspec.field(default_factory=Tally)
    copies_left_out: int = 0

    @property
    def requests(self) -> int:
        """Of both."""
        return self.incumbent.counts.requests + self.candidate.counts.requests

    def of(self, version: Version) -> Tally:
        return self.candidate if version is Version.CANDIDATE else self.incumbent

    def add(self, other: "Run") -> None:
        self.incumbent.add(other.incumbent)
        self.candidate.add(other.candidate)
        self.copies_left_out += other.copies_left_out


class Trial:
    """One candidate beside its incumbent.

    Attributes:
        name: the candidate's, `of` its incumbent's.
        app: its front end.
        section: what is configured now.
        has_engines: whether any of its replicas lives, as far as this router knows.
        run: what this router has counted.
        in_force: what all routers go by.
    """

    def __init__(
        self,
        name: str,
        of: str,
        app: ASGIApp,
        section: Live[CandidateSection],
        metrics: CandidateMetrics,
        has_engines: Callable[[], bool],
    ) -> None:
        self.name, self.of, self.app, self.section, self.has_engines = name, of, app, section, has_engines
        self.run, self._metrics = Run(), metrics
        self.go_by(Verdict.WAIT)

    @property
    def is_open(self) -> bool:
        """Whether it is still beside its incumbent."""
        return self.in_force is Verdict.WAIT

    @property
    def answered_share(self) -> float:
        """Of its incumbent's requests, that it answers now."""
        if self.is_open:
            return 0.0 if self.section.now.mirror else self.section.now.share
        return 1.0 if self.in_force is Verdict.PROMOTE else 0.0

    def begin(self, run_id: str) -> None:
        """Count anew; what is on its way is counted where it began."""
        self.run = Run(run_id=run_id)
        self.go_by(Verdict.WAIT)

    def go_by(self, verdict: Verdict) -> None:
        self.in_force = verdict
        self._metrics.verdict.labels(self.of).set(VERDICT_NUMBERS[verdict])

    def note(self, run: Run, version: Version, ended: Ended) -> None:
        run.of(version).note(ended)
        self._metrics.requests.labels(self.of, version, ended.outcome).inc()

    def left_out(self, run: Run) -> None:
        """A copy."""
        run.copies_left_out += 1
        self._metrics.copies_left_out.labels(self.of).inc()


def ended_as(context: HttpContext, status: int) -> Ended | None:
    """How an exchange ended, by what it was promised; None where that says nothing of the version: its client left or
    asked for what cannot be, its key had spent what it may have, or no engine was asked."""
    timings = context.timings
    if _has_failed(timings, status):
        return Ended(Outcome.FAILED)
    if not timings or any(_says_nothing(timing) for timing in timings):
        return None
    last_s = max((timing.last_token_s for timing in timings if timing.last_token_s is not None), default=None)
    whole_s = None if last_s is None else last_s - context.received_s
    return Ended(_outcome(timings), sum(timing.output_tokens for timing in timings), whole_s)


def _has_failed(timings: list[RequestTiming], status: int) -> bool:
    """By an error of ours: with 501 it was asked for what the model cannot do."""
    is_ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED
    return is_ours or any(timing.outcome == "error" for timing in timings)


def _says_nothing(timing: RequestTiming) -> bool:
    return timing.outcome is None or timing.kept is None or timing.cause in _OF_THE_KEY


def _outcome(timings: list[RequestTiming]) -> Outcome:
    if all(timing.promise == NO_PROMISE for timing in timings):
        return Outcome.UNPROMISED
    return Outcome.KEPT if all(all(timing.kept or ()) for timing in timings) else Outcome.MISSED


def ran_as(context: HttpContext, status: int, promise: Promise) -> Ended | None:
    """As `ended_as` of a request beside a copy, or of the copy: by the first one's promise, and from when each was sent
    to a replica. A copy waits behind everybody, which says nothing of its version, even if it waits in vain. None also
    where one had to give its slot to others."""
    timings = context.timings
    if any(timing.unserved is not None for timing in timings):
        return None
    if _has_failed(timings, status):
        return Ended(Outcome.FAILED)
    if not timings or not all(_ran(timing) for timing in timings):
        return None
    kept = all(all(_kept_from_slot(timing, promise)) for timing in timings)
    outcome = Outcome.UNPROMISED if promise == NO_PROMISE else Outcome.KEPT if kept else Outcome.MISSED
    whole_s = max(_from_slot(timing)[1] for timing in timings)
    return Ended(outcome, sum(timing.output_tokens for timing in timings), whole_s)


def _ran(timing: RequestTiming) -> bool:
    """To its end, in one go."""
    is_whole = timing.outcome in WHOLE and None not in (timing.first_token_s, timing.last_token_s, timing.assigned_s)
    told: Mapping[str, object] = timing.ended or {}
    return is_whole and not told.get("recalls") and not told.get("moves")


def _from_slot(timing: RequestTiming) -> tuple[float, float]:
    """Seconds from there to the first token and to the last."""
    assigned_s, first_s, last_s = timing.assigned_s, timing.first_token_s, timing.last_token_s
    assert assigned_s is not None and first_s is not None and last_s is not None, "it ran"
    return first_s - assigned_s, last_s - assigned_s


def _kept_from_slot(timing: RequestTiming, promise: Promise) -> tuple[bool, bool, bool]:
    first_s, last_s = _from_slot(timing)
    return promise.kept(first_s, timing.gap_s, last_s)


def in_header(name: str) -> str:
    """A model's name in the letters that a header may have."""
    return quote(name, safe=_PRINTABLE)
