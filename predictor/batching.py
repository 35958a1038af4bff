"""Prompts of many requests scored together: batches by token budget, a wait of at most 2 ms, a bounded cache.

A batch is taken when the model is free: what came while it was busy, up to the token budget, after at most max_wait_s
for company when it was idle. Callers have deadlines and something else to turn to, so an overload must not make
everybody late: the newest prompts go first, what has waited for max_age_s is given up, and what comes beyond
max_waiting is refused at once.

The budget follows the machine: a batch of half of its callers' time makes nearly all in it late, for most came while
the one before was running. It shrinks after each batch longer than max_batch_s, and grows after full ones that were
quick.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from policies.checks import require_at_least
from policies.errors import AdmissionError, PredictorError
from policies.types import FloatArray

# A few prompts to begin with, which any machine scores in time, and one short prompt at least.
FIRST_BATCH_TOKENS, LEAST_BATCH_TOKENS = 512, 32
SHRINKS, GROWS = 0.8, 1.1  # one late batch costs more than two that were smaller than they might be


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """Attributes: tokens and seconds that a batch is gathered for; how long one may take; how long and how many prompts
    may wait; scores kept.

    max_batch_tokens bounds the budget, which begins at FIRST_BATCH_TOKENS if that is less.
    """

    max_batch_tokens: int = 4096
    max_wait_s: float = 0.002
    max_batch_s: float = 0.0075
    max_age_s: float = 0.015
    max_waiting: int = 256
    cache_entries: int = 8192

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_batch_tokens", "max_waiting")
        require_at_least(0, self, "max_wait_s", "max_batch_s", "max_age_s", "cache_entries")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    token_ids: list[int]
    key: bytes
    came_s: float
    score: "asyncio.Future[float]"


class Batcher:
    """Scores prompts one by one for its callers, in batches for the model; `close` when done."""

    def __init__(
        self,
        encode: Callable[[Sequence[str]], list[list[int]]],
        score: Callable[[Sequence[list[int]]], FloatArray],
        config: BatchingConfig | None = None,
    ) -> None:
        self._encode, self._score, self._config = encode, score, config or BatchingConfig()
        self._thread = ThreadPoolExecutor(1, "predictor")  # one model, one batch at a time
        self._waiting: OrderedDict[bytes, _Waiting] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[float]] = {}
        self._cache: OrderedDict[bytes, float] = OrderedDict()
        self._worker: asyncio.Task[None] | None = None
        self._budget_tokens = float(min(FIRST_BATCH_TOKENS, self._config.max_batch_tokens))

    async def score(self, prompt: str) -> float:
        """The prompt's score; identical prompts share one place in the queue.

        Raises:
            AdmissionError: max_waiting prompts wait already, or this one has waited for max_age_s.
            PredictorError: the model failed.
        """
        token_ids = self._encode([prompt])[0]
        key = hashlib.blake2b(repr(token_ids).encode(), digest_size=16).digest()
        if (known := self._recall(key)) is not None:
            return known
        return await asyncio.shield(self._enqueue(key, token_ids))

    def _recall(self, key: bytes) -> float | None:
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def _enqueue(self, key: bytes, token_ids: list[int]) -> "asyncio.Future[float]":
        if key in self._running:
            return self._running[key]
        if key in self._waiting:
            return self._waiting[key].score
        if len(self._waiting) >= self._config.max_waiting:
            raise AdmissionError(f"{self._config.max_waiting} prompts wait for the predictor already")
        loop = asyncio.get_running_loop()
        entry = self._waiting[key] = _Waiting(token_ids, key, loop.time(), loop.create_future())
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return entry.score

    async def _work(self) -> None:
        """Runs while anything waits."""
        await asyncio.sleep(self._config.max_wait_s)
        try:
            while self._waiting:
                await self._run(self._take())
                self._give_up()
        finally:
            self._worker = None

    def _take(self) -> list[_Waiting]:
        """The newest prompts that fit into the budget, at least one."""
        batch: list[_Waiting] = []
        tokens = 0
        for entry in reversed(self._waiting.values()):
            tokens += len(entry.token_ids)
            if batch and tokens > self._budget_tokens:
                break
            batch.append(entry)
        for entry in batch:
            del self._waiting[entry.key]
        return batch

    def _give_up(self) -> None:
        """What has waited too long; the oldest stand first."""
        latest_s = asyncio.get_running_loop().time() - self._config.max_age_s
        while self._waiting and (entry := next(iter(self._waiting.values()))).came_s <= latest_s:
            del self._waiting[entry.key]
            _fail(entry.score, AdmissionError(f"the predictor had no time for it in {self._config.max_age_s} s"))

    async def _run(self, batch: list[_Waiting]) -> None:
        """Score a batch; a failure goes to all that wait for it, not to the next batch."""
        self._running = {entry.key: entry.score for entry in batch}
        prompts = [entry.token_ids for entry in batch]
        started_s = asyncio.get_running_loop().time()
        try:
            scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, prompts)
        except Exception as error:
            for entry in batch:
                _fail(entry.score, PredictorError(f"scoring {len(batch)} prompts failed: {error!r}"))
        else:
            for entry, score in zip(batch, scores.tolist(), strict=True):
                entry.score.set_result(score)
                self._remember(entry.key, score)
        finally:
            self._running = {}
            self._follow(asyncio.get_running_loop().time() - started_s)

    def _follow(self, batch_s: float) -> None:
        """Let the budget follow what a batch took; one that left none waiting says nothing about larger ones."""
        if batch_s > self._config.max_batch_s:
            self._budget_tokens = max(min(LEAST_BATCH_TOKENS, self._budget_tokens), SHRINKS * self._budget_tokens)
        elif self._waiting:
            self._budget_tokens = min(float(self._config.max_batch_tokens), GROWS * self._budget_tokens)

    def _remember(self, key: bytes, score: float) -> None:
        self._cache[key] = score
        while len(self._cache) > self._config.cache_entries:
            self._cache.popitem(last=False)

    async def close(self) -> None:
        """Ends the work; prompts that still wait are cancelled."""
        unscored = [*(entry.score for entry in self._waiting.values()), *self._running.values()]
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        for future in unscored:
            future.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _fail(score: "asyncio.Future[float]", error: Exception) -> None:
    score.set_exception(error)
    score.exception()  # its request may have left: then nothing else looks at it
