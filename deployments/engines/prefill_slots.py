"""How many prompts a replica that only reads prompts may be given."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from policies.router.prefill_decode import prefill_slots, safe_prompts


class PrefillSlots:
    """By the tokens of a step, and by the KV cache: what is read stays there until a decode replica has fetched it.

    The engine says what is free when it is asked. What ended since then may still hold its blocks, for all one knows.
    """

    def __init__(self, budget_tokens: int, memory_share: float) -> None:
        """Args:
        budget_tokens: of one step.
        memory_share: of the free cache, for prompts on board.
        """
        self._budget_tokens, self._memory_share = budget_tokens, memory_share
        self._came = 0
        self._mean_tokens = self._mean_unread_tokens = 0.0  # of the last 32 or so
        self._ended_tokens = 0  # of all that ever ended
        self._engine_says: tuple[int, int] | None = None  # free tokens, and the tokens that had ended by then

    def came(self, tokens: int, unread_tokens: int) -> None:
        """A prompt; what of it is cached takes memory, and no part of a step."""
        self._came += 1
        share = 1.0 / min(self._came, 32)
        self._mean_tokens += share * (tokens - self._mean_tokens)
        self._mean_unread_tokens += share * (max(1, unread_tokens) - self._mean_unread_tokens)

    def ended(self, tokens: int) -> None:
        self._ended_tokens += tokens

    @property
    def ended_tokens(self) -> int:
        """All that ever ended, for `told`."""
        return self._ended_tokens

    def told(self, status: Mapping[str, Any], ended_tokens: int) -> None:
        """Note what the engine said that was asked when `ended_tokens` had ended; one that says nothing of its cache is
        not bound by memory."""
        free = status.get("free_tokens")
        self._engine_says = None if free is None else (int(free), ended_tokens)

    def offered(self, held_tokens: Sequence[int]) -> int:
        """Prompts at once, those of these lengths among them."""
        of_steps = prefill_slots(self._budget_tokens, self._mean_unread_tokens or self._budget_tokens)
        mean_tokens = self._mean_tokens or self._budget_tokens
        return min(of_steps, safe_prompts(held_tokens, mean_tokens, self._safe_tokens))

    @property
    def _safe_tokens(self) -> float:
        if self._engine_says is None:
            return inf
        free, ended_tokens = self._engine_says
        return max(0.0, self._memory_share * free - (self._ended_tokens - ended_tokens))
