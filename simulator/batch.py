"""The running batch of an engine and its paged KV cache, as arrays.

Row i is one request, in the order of admission. Blocks are counted, not numbered: a request holds
ceil(computed / block_size) of them. Where a request needs one more and none is free, the youngest loses its place
(preemption by recompute, as in vLLM).
"""

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from policies.types import FloatArray, IntArray, RunningRequests, chunk_kv_tokens
from simulator.requests import Request

Rows = IntArray | slice

_PROMPT, _GENERATED, _LEFT, _CLASS, _COMPUTED, _TOTAL = range(6)
_PREDICTED, _LAST_TOKEN, _DEADLINE, _FIRST_TOKEN, _TPOT, _ENDS_BY = range(6)


def blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


class Batch:
    """Requests that run, and the blocks they hold.

    Attributes:
        requests: those running, oldest first.
        free_blocks: of ``total_blocks``.
        prefilling: how many have a part of their prompt still to compute.
    """

    def __init__(self, slots: int, total_blocks: int, block_size: int) -> None:
        self.requests: list[Request] = []
        self.total_blocks = self.free_blocks = total_blocks
        self.block_size = block_size
        self.prefilling = 0
        self._counts = np.zeros((6, slots), dtype=np.int64)
        self._times = np.zeros((6, slots))
        self._ones = np.ones(slots)

    def __len__(self) -> int:
        return len(self.requests)

    def view(self) -> RunningRequests:
        """Views of the arrays, which the next step overwrites."""
        c, t = self._counts[:, : len(self)], self._times[:, : len(self)]
        return RunningRequests(
            c[_PROMPT], c[_GENERATED], c[_LEFT], c[_CLASS],
            t[_PREDICTED], t[_DEADLINE], t[_FIRST_TOKEN], t[_TPOT], t[_ENDS_BY], self._ones[: len(self)],
        )  # fmt: skip

    @property
    def unread_tokens(self) -> int:
        """Unread tokens of prompts in progress."""
        return int(self._counts[_LEFT, : len(self)].sum()) if self.prefilling else 0

    def fits(self, request: Request, kept_blocks: int = 0) -> bool:
        """Whether the whole prompt has room now; what it will generate has not been asked.

        Args:
            kept_blocks: to be left free beside it, where others run.
        """
        needed = request.prompt_tokens + request.generated_tokens
        kept = kept_blocks if self.requests else 0
        return blocks_for(needed, self.block_size) + kept <= self.free_blocks

    def admit(self, request: Request) -> None:
        """Start a request; its cached prefix is held at once, the rest as it is computed."""
        n = len(self.requests)
        held = request.prefix_tokens
        left = request.prompt_tokens + request.generated_tokens - held
        predicted = request.predicted_output_tokens
        self._counts[:, n] = (
            request.prompt_tokens,
            request.generated_tokens,
            left,
            request.class_index,
            held,
            request.output_tokens,
        )
        self._times[:, n] = (
            np.nan if predicted is None else predicted,
            request.last_token_s or 0.0,
            request.deadline_s,
            np.nan if request.first_token_s is None else request.first_token_s,
            request.promised_tpot_s,
            request.ends_by_s,
        )
        self.free_blocks -= blocks_for(held, self.block_size)
        self.prefilling += 1
        self.requests.append(request)

    def decode(self, budget: int) -> tuple[Rows, int, int]:
        """Grow every decoding request by a token, as far as the budget goes; the blocks must be there.

        Returns:
            Which rows, how many, and the tokens of context that they read.
        """
        rows, count = self._ready(budget)
        if not count:
            return rows, 0, 0
        computed = self._counts[_COMPUTED]
        self.free_blocks -= self._blocks_to_grow(rows)
        computed[rows] += 1
        self._counts[_GENERATED][rows] += 1
        return rows, count, int(computed[rows].sum())

    def _ready(self, budget: int) -> tuple[Rows, int]:
        n = len(self.requests)
        if not self.prefilling:
            count = min(n, budget)
            return slice(0, count), count
        rows = np.flatnonzero(self._counts[_LEFT, :n] == 0)[:budget]
        return rows, len(rows)

    def _blocks_to_grow(self, rows: Rows) -> int:
        return int(np.count_nonzero(self._counts[_COMPUTED][rows] % self.block_size == 0))

    def make_room(self, budget: int) -> list[Request]:
        """Preempt the youngest until all that decode can grow; returns those that lost their place, youngest first."""
        lost: list[Request] = []
        if len(self.requests) <= self.free_blocks:
            return lost  # each needs one at most
        while self.requests and self._blocks_to_grow(self._ready(budget)[0]) > self.free_blocks:
            lost.append(self.preempt())
        return lost

    def preempt(self) -> Request:
        """Take the youngest out, with all that was computed of it."""
        row = len(self.requests) - 1
        self._stop(row)
        return self.requests.pop()

    def take(self, request: Request) -> None:
        """Take one out, with all that was computed of it."""
        row = self.requests.index(request)
        self._stop(row)
        self._keep(np.arange(len(self.requests)) != row)

    def _stop(self, row: int) -> None:
        request = self.requests[row]
        self._release(row)
        request.generated_tokens = int(self._counts[_GENERATED, row])
        if request.generated_tokens:
            request.last_token_s = float(self._times[_LAST_TOKEN, row])
        request.cached_tokens = 0

    def _release(self, row: int) -> None:
        self.free_blocks += blocks_for(int(self._counts[_COMPUTED, row]), self.block_size)
        self.prefilling -= bool(self._counts[_LEFT, row])

    def prefill(self, row: int, budget: int) -> tuple[int, int, bool]:
        """Compute a chunk of a prompt, as large as budget and free blocks allow.

        Returns:
            Tokens computed, the tokens of context that they read, and whether the prompt is now complete, which yields
            a token.
        """
        counts = self._counts[:, row]
        computed, left = int(counts[_COMPUTED]), int(counts[_LEFT])
        held = blocks_for(computed, self.block_size)
        tokens = min(left, budget, (held + self.free_blocks) * self.block_size - computed)
        counts[_COMPUTED] = computed + tokens
        counts[_LEFT] = left - tokens
        self.free_blocks -= blocks_for(computed + tokens, self.block_size) - held
        complete = tokens == left
        if complete:
            counts[_GENERATED] += 1
            self.prefilling -= 1
        return tokens, chunk_kv_tokens(tokens, computed), complete

    def prefilling_rows(self) -> list[int]:
        if not self.prefilling:
            return []
        rows: list[int] = np.flatnonzero(self._counts[_LEFT, : len(self.requests)]).tolist()
        return rows

    def prompts_left(self) -> list[tuple[Request, int]]:
        """Prompts in progress, and tokens left of each."""
        return [(self.requests[row], int(self._counts[_LEFT, row])) for row in self.prefilling_rows()]

    def gaps_s(self, rows: Rows, now_s: float) -> FloatArray:
        """Seconds since the last token of these rows, whose last token is now."""
        last, first = self._times[_LAST_TOKEN], self._times[_FIRST_TOKEN]
        gaps = now_s - last[rows]
        last[rows] = now_s
        first[rows] = np.fmin(first[rows], now_s)
        return np.asarray(gaps)

    def finish(self, now_s: float) -> list[Request]:
        """Take out what has all its tokens."""
        n = len(self.requests)
        counts = self._counts[:, :n]
        done = counts[_GENERATED] >= counts[_TOTAL]
        if self.prefilling:
            done &= counts[_LEFT] == 0
        if not done.any():
            return []
        rows = np.flatnonzero(done)
        finished = [self.requests[row] for row in rows.tolist()]
        for request in finished:
            request.generated_tokens = request.output_tokens
            request.last_token_s = request.finished_s = now_s
        self.free_blocks += int((-(-counts[_COMPUTED, rows] // self.block_size)).sum())
        self._keep(~done)
        return finished

    def _keep(self, mask: NDArray[np.bool_]) -> None:
        n = len(self.requests)
        self.requests = list(compress(self.requests, mask.tolist()))
        kept = len(self.requests)
        self._counts[:, :kept] = self._counts[:, :n][:, mask]
        self._times[:, :kept] = self._times[:, :n][:, mask]
