"""How much an engine has to read, and when that is enough."""

import math
from collections.abc import Container, Mapping
from typing import Any

from policies.live import Live
from policies.router.credit import max_unread_tokens
from policies.router.tickets import Reading

# Prompts that took so long to read are told at once, and shorter ones when they add up to it: until then they drive
# others away. So a replica tells 20 times a second at most.
_TOLD_S = 0.05


class UnreadPrompts:
    """The prompts on board that the engine has not read, as far as its relay sees: until their first token comes.

    The engine knows better what of them it has read or had in its cache, but only when it is asked. What came since
    then is unread for all one knows. A router may take for cached what has been evicted since: then there is more to
    read than was counted, by as much as the engine says, and at most by what was taken for cached.
    """

    def __init__(self, credit_s: Live[float | None]) -> None:
        """Args:
        credit_s: what takes this long to read is enough; None sets no bound.
        """
        self._credit_s = credit_s
        self._unread: dict[str, tuple[int, int]] = {}  # tokens that count as unread, and those taken for cached
        self._read: set[str] = set()  # since the shared state was told
        self._untold_tokens = 0  # of those
        self._tokens = self._cached_tokens = 0  # of all that are unread
        self._came_tokens = 0  # that ever came
        self._engine_says: tuple[int, int] | None = None  # unread tokens, and those that had come by then
        self._missing_tokens = 0  # of those taken for cached, when the engine was asked
        self._token_s: float | None = None
        self._return_chance = 0.0
        self._had_enough = False

    def came(self, request_id: str, tokens: int, cached_tokens: int = 0) -> None:
        """Args:
        tokens: of its prompt, those that count as unread.
        cached_tokens: the others, which are taken for cached.
        """
        self._unread[request_id] = tokens, cached_tokens
        self._tokens += tokens
        self._cached_tokens += cached_tokens
        self._came_tokens += tokens
        most = self.max_unread_tokens
        self._had_enough |= most is not None and self._tokens >= most

    def read(self, request_id: str) -> bool:
        """Whether the shared state should hear of it at once: it may send nothing more until then, or elsewhere."""
        if request_id in self._unread:
            self._untold_tokens += self._take_out(request_id)
            self._read.add(request_id)
        return self._had_enough or self._untold_tokens * (self._token_s or 0.0) >= _TOLD_S

    def left(self, request_id: str) -> None:
        self._take_out(request_id)
        self._read.discard(request_id)

    def _take_out(self, request_id: str) -> int:
        """How much of it counted as unread."""
        tokens, cached_tokens = self._unread.pop(request_id, (0, 0))
        self._tokens -= tokens
        self._cached_tokens -= cached_tokens
        return tokens

    @property
    def came_tokens(self) -> int:
        """All that ever came and counted as unread, for `told`."""
        return self._came_tokens

    def told(self, status: Mapping[str, Any], came_tokens: int, token_s: float | None) -> None:
        """Note what the engine said that was asked when `came_tokens` had come.

        Args:
            token_s: seconds for a prompt token, where it does not say.
        """
        self._token_s = status.get("seconds_per_prompt_token") or token_s
        self._return_chance = float(status.get("return_chance", 0.0))
        unread = status.get("unread_prompt_tokens")
        self._engine_says = None if unread is None else (int(unread), came_tokens)
        if self._engine_says is not None:
            self._missing_tokens = max(0, self._unread_by_engine - self._tokens)

    @property
    def max_unread_tokens(self) -> int | None:
        """Where the engine has enough; None where nothing says so."""
        return max_unread_tokens(self._credit_s.now, self._token_s)

    def report(self) -> Reading:
        """For the shared state; `not_heard` when it does not answer."""
        read, self._read, self._had_enough, self._untold_tokens = tuple(sorted(self._read)), set(), False, 0
        return Reading(
            read=read,
            known_tokens=self._known_tokens,
            max_unread_tokens=self.max_unread_tokens,
            prompt_token_s=self._token_s if self._token_s and math.isfinite(self._token_s) else None,
            return_chance=self._return_chance,
        )

    @property
    def _known_tokens(self) -> int:
        """Read or cached, of what counts as unread here; below 0 by what was taken for cached and is not."""
        if self._engine_says is None:
            return 0
        most = self._tokens + min(self._missing_tokens, self._cached_tokens)
        return self._tokens - min(most, self._unread_by_engine)

    @property
    def _unread_by_engine(self) -> int:
        """What it said, and all that came since."""
        assert self._engine_says is not None
        unread, came_tokens = self._engine_says
        return unread + self._came_tokens - came_tokens

    def not_heard(self, read: tuple[str, ...], on_board: Container[str]) -> None:
        """The shared state is to be told of these again, where they are still on board."""
        self._read.update(request_id for request_id in read if request_id in on_board)
