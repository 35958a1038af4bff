"""When a batch will be answered, by how fast it was of late.

Prompts of one batch are answered in no order that their lengths would follow, so those that are left are taken to be
like those before them: their number is their work, and what is predicted of each by itself adds nothing.
"""

from collections.abc import Sequence


def expected_end_s(answered: Sequence[tuple[float, int]], total: int) -> float | None:
    """
    Args:
        answered: moments in seconds, ascending, and how many requests were answered by then; the last is now.
        total: requests of the batch.

    Returns:
        On the same clock; None while nothing tells how fast it goes.
    """
    if len(answered) < 2:
        return None
    (begun_s, before), (now_s, now) = answered[0], answered[-1]
    if now <= before:
        return None
    return now_s + (total - now) * (now_s - begun_s) / (now - before)
