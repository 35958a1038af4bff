"""What is known of each request, by columns: a snapshot picks the rows of those that run at once.

A request runs for hundreds of steps, and nothing of this changes from one to the next.
"""

import numpy as np

from policies.engine.drafts import Drafts
from policies.types import FloatArray, IntArray

_LEAST_ROWS = 256


class Columns:
    """A row for each request that is known, from `add` to `remove`."""

    def __init__(self) -> None:
        # prompt_tokens, class_index; predicted_output_tokens, deadline_s, first_token_s, tpot_s, ends_by_s
        self._counts: IntArray = np.zeros((2, _LEAST_ROWS), dtype=np.int64)
        self._times: FloatArray = np.zeros((5, _LEAST_ROWS))
        self._free = list(range(_LEAST_ROWS))
        self.drafts: Drafts | None = None  # where tokens are drafted

    def add(self) -> int:
        """A row for one that is new."""
        if not self._free:
            rows = self._counts.shape[1]
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
            self._times = np.concatenate((self._times, np.zeros_like(self._times)), axis=1)
            self._free.extend(range(rows, 2 * rows))
        return self._free.pop()

    def tokens_per_step(self, rows: IntArray) -> FloatArray:
        """As in `RunningRequests`."""
        return np.ones(len(rows)) if self.drafts is None else self.drafts.tokens_per_step(rows)

    def remove(self, row: int) -> None:
        self._free.append(row)

    def write(
        self,
        row: int,
        *,
        prompt_tokens: int,
        class_index: int,
        predicted_output_tokens: float | None,
        deadline_s: float,
        first_token_s: float,
        tpot_s: float,
        ends_by_s: float,
    ) -> None:
        """As in `RunningRequests`."""
        self._counts[:, row] = prompt_tokens, class_index
        predicted = np.nan if predicted_output_tokens is None else predicted_output_tokens
        self._times[:, row] = predicted, deadline_s, first_token_s, tpot_s, ends_by_s

    def pick(self, rows: IntArray) -> tuple[IntArray, FloatArray]:
        """Copies of these rows, shape (2, rows) and (5, rows), in the order of `write`."""
        return self._counts[:, rows], self._times[:, rows]
