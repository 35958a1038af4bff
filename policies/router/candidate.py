"""Whether a candidate, a new version of a model, may go on beside the model that it may succeed, its incumbent.

Both answer requests of the same traffic, and which of the two answers is drawn by a hash. So what makes promises fail
for both, as a busy hour, is no difference between them, and what is a difference is the version's, or its engines'.

Each version misses a promise with some probability, and fails a request with another. How much the counts speak
against an assumption about the two probabilities of a kind is the likelihood ratio of

    a mixture over all probabilities of both versions, and
    the best that the assumption allows.

While the assumption holds, the first over the likelihood of the true probabilities is a martingale with mean 1, and
the second is no less than that likelihood. So the ratio ever exceeds 1/a with a probability of at most a, however often
it is looked at and whenever one stops (Ville's inequality; mixtures: H. Robbins, Statistical methods related to the law
of the iterated logarithm, Ann. Math. Statist. 41, 1970; ratios as a test: A. Wald, Sequential tests of statistical
hypotheses, Ann. Math. Statist. 16, 1945; against the best of a composite assumption: L. Wasserman, A. Ramdas and
S. Balakrishnan, Universal inference, PNAS 117, 2020). No paper of the five compares versions.
"""

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum

from policies.errors import InputError

TOLERATED_MISSED = 0.02
"""By how much more a candidate may miss: less is lost among the hours of a day, and takes a day of requests to see."""
TOLERATED_FAILED = 0.005
"""By how much more it may fail: a failed answer is worth several late ones, and an engine that works fails next to
none."""
ERROR = 0.01
"""The probability of a wrong verdict: one in a hundred roll-outs may be tried again; less takes more requests."""
LEAST_REQUESTS = 20
"""Of a candidate, before anything is said: one stall of an engine hits all that it runs, and those are not as many
independent requests."""
_HALF = 0.5  # Jeffreys' prior, Beta(1/2, 1/2): no rate costs its mixture more than ln(2 sqrt(n)) against the best one
_HALVINGS = 60  # of an interval of length 1: beyond the digits of a float
_SHARE_BYTES = 8


class Verdict(StrEnum):
    """On a candidate."""

    WAIT = "wait"
    """The counts do not tell yet."""
    ROLL_BACK = "roll_back"
    """It misses more promises, or fails more requests, than its incumbent, beyond what is tolerated."""
    PROMOTE = "promote"
    """It does neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """Requests of one version that have ended, since the candidate began.

    Attributes:
        requests: all of them but those whose client left.
        kept, missed: those that were answered, by whether all that they were promised was kept.
        failed: those that got an error of ours.

    Raises:
        InputError: a count is below 0, or there are fewer requests than kept, missed and failed ones.
    """

    requests: int = 0
    kept: int = 0
    missed: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        if min(self.requests, self.kept, self.missed, self.failed) < 0:
            raise InputError(f"counts must be at least 0, got {self}")
        if self.requests < self.kept + self.missed + self.failed:
            raise InputError(f"requests must be all that were kept, missed or failed, got {self}")


def verdict(incumbent: VersionCounts, candidate: VersionCounts) -> Verdict:
    """What the counts say, at any time and as often as one likes.

    Of a candidate that misses no more than TOLERATED_MISSED above its incumbent, and fails no more than
    TOLERATED_FAILED above it, this is ever ROLL_BACK with a probability of at most ERROR; each of the two tests has
    half of it. Of one that does either this is ever PROMOTE with a probability of at most ERROR: both tests must say
    so, and each may be wrong by all of it. Requests count as independent of each other: where sessions are long or
    their clients alike, the probabilities are those of as many independent requests.
    """
    if candidate.requests < LEAST_REQUESTS:
        return Verdict.WAIT
    missed = _Test(
        _Tally(incumbent.missed, incumbent.kept + incumbent.missed),
        _Tally(candidate.missed, candidate.kept + candidate.missed),
        TOLERATED_MISSED,
    )
    failed = _Test(
        _Tally(incumbent.failed, incumbent.requests), _Tally(candidate.failed, candidate.requests), TOLERATED_FAILED
    )
    if any(test.is_above and test.evidence >= math.log(2 / ERROR) for test in (missed, failed)):
        return Verdict.ROLL_BACK
    if all(not test.is_above and test.evidence >= math.log(1 / ERROR) for test in (missed, failed)):
        return Verdict.PROMOTE
    return Verdict.WAIT


def place(key: str) -> float:
    """Where a session, or a request without one, stands in the traffic: from 0 up to 1, the same in every router.

    Those below a candidate's share are its own, so a larger share takes more of them and gives none back.
    """
    number = hashlib.blake2b(key.encode(errors="replace"), digest_size=_SHARE_BYTES, person=b"candidate").digest()
    return float(int.from_bytes(number) / 256**_SHARE_BYTES)


@dataclass(frozen=True, slots=True)
class _Tally:
    """How often it happened, of how many times."""

    hits: int
    of: int

    @property
    def fraction(self) -> float:
        return self.hits / self.of

    def log_likelihood(self, probability: float) -> float:
        return _times_log(self.hits, probability) + _times_log(self.of - self.hits, 1 - probability)

    def log_mixture(self) -> float:
        """Its likelihood in the mean over all probabilities, by Jeffreys' prior."""
        return _log_beta(self.hits + _HALF, self.of - self.hits + _HALF) - _log_beta(_HALF, _HALF)

    def slope(self, probability: float) -> float:
        """Of `log_likelihood`; falls with the probability, which is between 0 and 1."""
        return self.hits / probability - (self.of - self.hits) / (1 - probability)


@dataclass(frozen=True, slots=True)
class _Test:
    """Of one rate against the same of the incumbent, with a tolerance above it."""

    incumbent: _Tally
    candidate: _Tally
    tolerated: float

    @property
    def is_above(self) -> bool:
        """Whether the candidate's rate is seen above what is tolerated, however little that says."""
        if not (self.incumbent.of and self.candidate.of):
            return False
        return self.candidate.fraction > self.incumbent.fraction + self.tolerated

    @property
    def evidence(self) -> float:
        """Logarithm of the likelihood ratio against all rates on the other side of what is tolerated.

        The likelihood is concave and its best point is on this side, so that of the other side is on the border.
        """
        if not (self.incumbent.of and self.candidate.of):
            return 0.0
        rate = self._best_on_border()
        border = self.incumbent.log_likelihood(rate) + self.candidate.log_likelihood(rate + self.tolerated)
        return self.incumbent.log_mixture() + self.candidate.log_mixture() - border

    def _best_on_border(self) -> float:
        """The incumbent's rate where the candidate's is by as much higher as is tolerated: by halving, for the slope
        of the likelihood falls."""
        low, high = 0.0, 1.0 - self.tolerated
        for _ in range(_HALVINGS):
            rate = (low + high) / 2
            if not 0.0 < rate < rate + self.tolerated < 1.0:  # nothing is left between two floats
                break
            if self.incumbent.slope(rate) + self.candidate.slope(rate + self.tolerated) > 0:
                low = rate
            else:
                high = rate
        return (low + high) / 2


def _times_log(count: int, probability: float) -> float:
    """What happens never costs nothing, whatever its probability."""
    return count * math.log(max(probability, 5e-324)) if count else 0.0


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
