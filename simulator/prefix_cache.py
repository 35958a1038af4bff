"""What an engine still holds of prompts that it has computed, by session.

vLLM keeps the blocks of requests that ended until others need the room, and gives up the least recently used first, of
one request its end before its beginning. Here a session stands for its blocks: what one of its requests had computed is
what the next may find. Departures from vLLM: two requests of a session that run at once do not share blocks, and
neither do sessions that begin alike.

Of requests that will not come back it gives up first, as `deployments.engines.vllm.scheduler.kept_blocks` does.
"""

from collections import OrderedDict

from policies.engine.returns import EMPTY_BLOCKS, RETURN_S, Returns
from simulator.requests import Request


class PrefixCache:
    """Tokens kept by session, least recently used first; they lie in blocks that count as free.

    Attributes:
        hit_tokens: found at all starts together.
    """

    def __init__(self, block_size: int, most_returning_tokens: int = 0) -> None:
        """Args:
        most_returning_tokens: of sessions that come back, what is given up after all else.
        """
        self.hit_tokens = 0
        self._block_size = block_size
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0
        self.now_s, self._returns = 0.0, Returns()
        self._used_s: dict[str, float] = {}
        self._most_returning, self._returning_tokens = most_returning_tokens, 0
        self._returning: OrderedDict[str, int] = OrderedDict()  # those of `_kept` that are given up last

    def known_tokens(self, request: Request) -> int:
        """Leading tokens of its prompt that it would find; whole blocks."""
        if request.session is None:
            return 0
        known = min(self._kept.get(request.session, 0), request.reusable_tokens)
        return known - known % self._block_size

    def take(self, request: Request) -> int:
        """A request starts: what it finds is its own from now on."""
        found = self.known_tokens(request)
        if request.session is not None and found:
            self._tokens -= self._kept.pop(request.session)
            self._returns.returned(self.now_s - self._used_s.pop(request.session))
            self._gives_up(request.session)
        self.hit_tokens += found
        return found

    def touch(self, request: Request) -> None:
        """What it finds stays, and was used now."""
        if request.session is not None and request.session in self._kept:
            self._kept.move_to_end(request.session)

    def keep(self, request: Request, tokens: int) -> None:
        """A request ended with `tokens` tokens computed."""
        if request.session is None:
            return
        self._tokens += tokens - self._kept.pop(request.session, 0)
        self._gives_up(request.session)
        self._kept[request.session] = tokens
        self._used_s[request.session] = self.now_s
        if request.comes_back and self._most_returning:
            self._returning[request.session] = tokens
            self._returning_tokens += tokens
            while self._returning_tokens > self._most_returning:
                session = next(iter(self._returning))
                self._gives_up(session)
                self._kept.move_to_end(session)

    def _gives_up(self, session: str) -> None:
        """With all others, by when it was used."""
        self._returning_tokens -= self._returning.pop(session, 0)

    def _first(self) -> str:
        """What is given up next."""
        return next((each for each in self._kept if each not in self._returning), next(iter(self._kept)))

    def shrink(self, free_tokens: int) -> None:
        """There is no more room than this."""
        while self._tokens > free_tokens:
            session = self._first()
            kept = self._kept.pop(session)
            self._gives_up(session)
            left = max(0, kept - (self._tokens - free_tokens))
            self._tokens -= kept - left
            if left:
                self._kept[session] = left
                self._kept.move_to_end(session, last=False)
            else:
                self._returns.given_up(self.now_s - self._used_s.pop(session))

    def return_chance(self, free_tokens: int) -> float:
        """That what it gives up next, with so much room, would be found soon if it stayed."""
        if not self._kept or free_tokens - self._tokens > EMPTY_BLOCKS * self._block_size:
            return 0.0
        return self._returns.chance(self.now_s - self._used_s[self._first()], RETURN_S)
