"""What a request is promised, and whether it was kept. No paper of the five promises anything to a single request."""

from dataclasses import dataclass, replace

TARGETS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Targets of one request; None promises nothing.

    Attributes:
        ttft_s: seconds from its arrival in which its first token is due.
        tpot_s: seconds per token after the first, on average over its answer.
        e2e_s: seconds from its arrival in which its last token is due.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def tighter_than(self, other: "Promise") -> list[str]:
        """Names of the targets that are closer here, or are none there."""
        return [name for name in TARGETS if _is_tighter(getattr(self, name), getattr(other, name))]

    def left(self, passed_s: float) -> "Promise":
        """What of it is left after so many seconds; below 0 where that is too late."""
        ttft_s, e2e_s = (None if each is None else each - passed_s for each in (self.ttft_s, self.e2e_s))
        return replace(self, ttft_s=ttft_s, e2e_s=e2e_s)

    def kept(self, ttft_s: float, tpot_s: float | None, e2e_s: float) -> tuple[bool, bool, bool]:
        """Which of the three a whole answer kept that came so fast. One of one token has no `tpot_s`, and keeps it."""
        per_token = tpot_s is None or _within(tpot_s, self.tpot_s)
        return _within(ttft_s, self.ttft_s), per_token, _within(e2e_s, self.e2e_s)


NO_PROMISE = Promise()


def _is_tighter(target_s: float | None, other_s: float | None) -> bool:
    return target_s is not None and (other_s is None or target_s < other_s)


def _within(seconds: float, target_s: float | None) -> bool:
    return target_s is None or seconds <= target_s
