"""Drafted tokens (speculative decoding): how many of them prove right, and how many are worth their time.

A decode that takes 1 + k tokens into a step brings one, and of the k those that prove right up to the first that does
not. A place of a draft proves right with a chance that is learned by request, beginning with what its class has shown;
the i-th then counts p^i. What a step of n decodes brings a second with m drafted tokens,

    (n + sum of p^i of those taken) / (fixed_s + token_s * (n + m)),

is greatest where those with the best chances are taken, as long as each raises it. The same choice leaves most of a
promised time per token to prompts. No paper of the five drafts; vLLM (0.32) has a table of lengths by batch size.
"""

from collections.abc import Sequence

import numpy as np

from policies.types import FloatArray, IntArray

_ROWS = 256
_FORGETTING, _CLASS_FORGETTING = 0.95, 0.998  # of what a step adds
_PRIOR_TRIES = 4.0  # what a class's chance weighs in a new request
_FIRST_CHANCE = 0.5
_LOOK_AGAIN = 32  # steps after which all drafts are taken once: what is not tried is not learned


class Drafts:
    """What is known of drafts, by row: one for each request, as the driver numbers them."""

    def __init__(self) -> None:
        self._right: FloatArray = np.zeros(_ROWS)
        self._tried: FloatArray = np.ones(_ROWS)
        self._brought: FloatArray = np.ones(_ROWS)
        self._classes: dict[str, tuple[float, float, float]] = {}  # right, tried, and tokens that a decode brings
        self._steps = 0

    def add(self, row: int, slo_class: str) -> None:
        """A new request."""
        while row >= len(self._tried):
            self._right, self._tried, self._brought = (
                np.concatenate((each, np.ones_like(each))) for each in (self._right, self._tried, self._brought)
            )
        right, tried, brought = self._classes.get(slo_class, (_FIRST_CHANCE, 1.0, 1.0))
        self._tried[row], self._right[row] = _PRIOR_TRIES, _PRIOR_TRIES * right / tried
        self._brought[row] = brought

    def chances(self, rows: IntArray) -> FloatArray:
        """That the next place proves right, shape (rows,)."""
        return np.asarray(self._right[rows] / self._tried[rows])

    def tokens_per_step(self, rows: IntArray) -> FloatArray:
        """Tokens that a decode has brought lately, shape (rows,)."""
        return np.asarray(self._brought[rows])

    def of_classes(self) -> dict[str, float]:
        """Tokens that a decode brings, by class."""
        return {name: brought for name, (_, _, brought) in self._classes.items()}

    def observe(self, rows: IntArray, classes: Sequence[str], drafted: IntArray, accepted: IntArray) -> None:
        """Decodes of one step; shapes (decodes,).

        Args:
            classes: of the requests.
            drafted: tokens that were tried.
            accepted: of these, those that proved right.
        """
        tried = accepted + (accepted < drafted)
        keep = np.where(drafted > 0, _FORGETTING, 1.0)
        self._right[rows] = keep * self._right[rows] + accepted
        self._tried[rows] = keep * self._tried[rows] + tried
        self._brought[rows] += (1.0 - _FORGETTING) * (1.0 + accepted - self._brought[rows])
        for name in set(classes):
            mine = np.array([each == name for each in classes])
            right, trials, brought = self._classes.get(name, (_FIRST_CHANCE, 1.0, 1.0))
            self._classes[name] = (
                _CLASS_FORGETTING * right + float(accepted[mine].sum()),
                _CLASS_FORGETTING * trials + float(tried[mine].sum()),
                brought + (1.0 - _FORGETTING) * (1.0 + float(accepted[mine].mean()) - brought),
            )

    def worth_taking(
        self, rows: IntArray, drafted: IntArray, *, others: int, fixed_s: float, token_s: float
    ) -> IntArray:
        """How many of the drafted tokens of each request the next step had better take, shape (rows,).

        Args:
            drafted: tokens that there are, shape (rows,).
            others: decodes without drafts.
            fixed_s: seconds of the step besides the tokens of decodes.
            token_s: seconds of each of these.
        """
        self._steps += 1
        if self._steps % _LOOK_AGAIN == 0 or token_s <= 0.0 or not len(rows):
            return drafted
        places = np.arange(1, int(drafted.max()) + 1)
        worth = np.where(places <= drafted[:, None], self.chances(rows)[:, None] ** places, 0.0)
        best_first = np.sort(worth, axis=None)[::-1]
        decodes = len(rows) + others
        brought = decodes + np.concatenate(([0.0], best_first.cumsum()))
        took_s = fixed_s + token_s * (decodes + np.arange(len(brought)))
        best = int((brought / took_s).argmax())
        least = best_first[best - 1] if best else np.inf
        return np.asarray(np.minimum(np.count_nonzero(worth >= least, axis=1), drafted))
