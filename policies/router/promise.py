"""What a request is promised, and whether it was kept. No paper of the five promises anything to a single request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Targets of one request; None promises nothing.

    Attributes:
        ttft_s: seconds from its arrival in which its first token is due.
        tpot_s: seconds per token after the first, on average over its answer.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def tighter_than(self, other: "Promise") -> list[str]:
        """Names of the targets that are closer here, or are none there."""
        return [name for name in ("ttft_s", "tpot_s") if _is_tighter(getattr(self, name), getattr(other, name))]

    def kept(self, ttft_s: float, tpot_s: float | None) -> tuple[bool, bool]:
        """Which of both a whole answer kept that came so fast. One of one token has no `tpot_s`, and keeps it."""
        return _within(ttft_s, self.ttft_s), tpot_s is None or _within(tpot_s, self.tpot_s)


NO_PROMISE = Promise()


def _is_tighter(target_s: float | None, other_s: float | None) -> bool:
    return target_s is not None and (other_s is None or target_s < other_s)


def _within(seconds: float, target_s: float | None) -> bool:
    return target_s is None or seconds <= target_s
