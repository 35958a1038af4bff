"""Whether what a prefix cache gives up would have been wanted soon, learned from how long cached blocks lay unused."""

import math

RETURN_S = 300.0  # in which what comes back at all mostly does: of agents' pauses 97 % are shorter
EMPTY_BLOCKS = 1024  # as long as a cache has more without content, a placement gives nothing up
_BINS = 16  # by powers of two of a second: below 1 s, 1 to 2, ..., from 16 384 s on
_LITTLE = 8.0  # blocks
_MEMORY = 8192.0  # blocks seen, after which the older half of them counts half


class Returns:
    """Kaplan and Meier's estimate (1958) over ages: a block that was given up might have been used again later.

        chance(age, within) = 1 - product over the bins from age to age + within of (1 - returned / at risk)

    Nothing is seen beyond the age at which blocks are given up. By powers of two of their age about as many of those
    left return in every bin, so a bin of which little is known has the share of all bins together.
    """

    def __init__(self) -> None:
        self._returned, self._given_up = [0.0] * _BINS, [0.0] * _BINS
        self._seen = 0.0

    def returned(self, age_s: float) -> None:
        """A block was used again that had lain so long."""
        self._returned[_bin(age_s)] += 1.0
        self._count()

    def given_up(self, age_s: float) -> None:
        """One was given up that had lain so long."""
        self._given_up[_bin(age_s)] += 1.0
        self._count()

    def _count(self) -> None:
        self._seen += 1.0
        if self._seen >= _MEMORY:
            self._seen /= 2.0
            self._returned = [each / 2.0 for each in self._returned]
            self._given_up = [each / 2.0 for each in self._given_up]

    def chance(self, age_s: float, within_s: float) -> float:
        """That a block is used within so many seconds that has lain so long; 0 before any was."""
        risks, stays = self._at_risk(), 1.0
        share = sum(self._returned) / max(1.0, sum(risks))
        for index in range(_bin(age_s), _BINS):
            low, high = _edges(index)
            part = max(0.0, min(high, age_s + within_s) - max(low, age_s)) / (high - low)
            if part <= 0.0:
                break
            returned = (self._returned[index] + _LITTLE * share) / (risks[index] + _LITTLE)
            stays *= (1.0 - min(1.0, returned)) ** part
        return 1.0 - stays

    def _at_risk(self) -> list[float]:
        """Blocks that lay into each bin; those given up within it count half."""
        risks, older = [0.0] * _BINS, 0.0
        for index in range(_BINS - 1, -1, -1):
            returned, given_up = self._returned[index], self._given_up[index]
            risks[index] = older + returned + given_up / 2.0
            older += returned + given_up
        return risks


def _bin(age_s: float) -> int:
    return 0 if age_s < 1.0 else min(_BINS - 1, 1 + int(math.log2(age_s)))


def _edges(index: int) -> tuple[float, float]:
    return (0.0, 1.0) if index == 0 else (2.0 ** (index - 1), 2.0**index)
