"""What a router counts of a candidate beside its incumbent, in the registry of the candidate."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from policies.router.candidate import Verdict

VERDICT_NUMBERS = {Verdict.ROLL_BACK: -1, Verdict.WAIT: 0, Verdict.PROMOTE: 1}


class CandidateMetrics:
    """The label `model` of the registry is the candidate's name; `of` is that of its incumbent."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "candidate_requests",
            "Requests that were compared, by the version that answered, candidate or incumbent, and by whether it kept "
            "what was promised: kept, missed, failed, or unpromised.",
            ("of", "version", "outcome"),
            namespace="sluice",
            registry=registry,
        )
        self.copies_left_out = Counter(
            "candidate_copies_left_out",
            "Copies for a candidate that were not sent, or not to their end: too many were on their way, or no replica "
            "was idle in time.",
            ("of",),
            namespace="sluice",
            registry=registry,
        )
        self.verdict = Gauge(
            "candidate_verdict",
            "What is in force of a candidate: 1 promoted, 0 beside its incumbent, -1 rolled back.",
            ("of",),
            namespace="sluice",
            registry=registry,
        )
