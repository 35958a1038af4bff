"""How much an engine has to read, and when that is enough."""

import math
from collections.abc import Container, Mapping
from typing import Any

from router.state_store import Reading


class UnreadPrompts:
    """The prompts on board that the engine has not read, as far as its relay sees: until their first token comes.

    The engine knows better what of them it has read or had in its cache, but only when it is asked. What came since
    then is unread for all one knows.
    """

    def __init__(self, credit_s: float | None) -> None:
        """Args:
        credit_s: enough is what takes so long to read; None sets no bound.
        """
        self.credit_s = credit_s
        self._unread: dict[str, int] = {}
        self._read: set[str] = set()  # since the shared state was told
        self._tokens = 0  # of all that are unread
        self._came_tokens = 0  # that ever came
        self._engine_says: tuple[int, int] | None = None  # what is unread, when so many had come
        self._token_s: float | None = None
        self._had_enough = False

    def came(self, request_id: str, tokens: int) -> None:
        self._unread[request_id] = tokens
        self._tokens += tokens
        self._came_tokens += tokens
        most = self.max_unread_tokens
        self._had_enough |= most is not None and self._tokens >= most

    def read(self, request_id: str) -> bool:
        """Whether the shared state should hear of it at once: it may send nothing more until then."""
        if request_id in self._unread:
            self._tokens -= self._unread.pop(request_id)
            self._read.add(request_id)
        return self._had_enough

    def left(self, request_id: str) -> None:
        self._tokens -= self._unread.pop(request_id, 0)
        self._read.discard(request_id)

    @property
    def came_tokens(self) -> int:
        """All that ever came, for `told`."""
        return self._came_tokens

    def told(self, status: Mapping[str, Any], came_tokens: int, token_s: float | None) -> None:
        """By an engine that was asked when so many tokens had come.

        Args:
            token_s: seconds for a prompt token, where it does not say.
        """
        self._token_s = status.get("seconds_per_prompt_token") or token_s
        unread = status.get("unread_prompt_tokens")
        self._engine_says = None if unread is None else (int(unread), came_tokens)

    @property
    def max_unread_tokens(self) -> int | None:
        """Where the engine has enough; None where nothing says so."""
        if self.credit_s is None or not self._token_s:
            return None
        most = self.credit_s / self._token_s
        return max(1, math.floor(most)) if math.isfinite(most) else None

    def report(self) -> Reading:
        """For the shared state; `not_heard` when it does not answer."""
        read, self._read, self._had_enough = tuple(sorted(self._read)), set(), False
        return Reading(read=read, known_tokens=self._known_tokens, max_unread_tokens=self.max_unread_tokens)

    @property
    def _known_tokens(self) -> int:
        """Read or cached, of what counts as unread here."""
        if self._engine_says is None:
            return 0
        unread, came_tokens = self._engine_says
        return max(0, self._tokens - unread - (self._came_tokens - came_tokens))

    def not_heard(self, read: tuple[str, ...], on_board: Container[str]) -> None:
        """Of these the shared state is to be told again, as far as they are still there."""
        self._read.update(request_id for request_id in read if request_id in on_board)
