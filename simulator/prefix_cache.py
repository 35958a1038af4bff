"""What an engine still holds of prompts that it has computed, by session.

vLLM keeps the blocks of requests that ended until others need the room, and gives up the least recently used first, of
one request its end before its beginning. Here a session stands for its blocks: what one of its requests had computed is
what the next may find. Departures from vLLM: two requests of a session that run at once do not share blocks, and
neither do sessions that begin alike.
"""

from collections import OrderedDict

from simulator.requests import Request


class PrefixCache:
    """Tokens kept by session, least recently used first; they lie in blocks that count as free.

    Attributes:
        hit_tokens: found at all starts together.
    """

    def __init__(self, block_size: int) -> None:
        self.hit_tokens = 0
        self._block_size = block_size
        self._kept: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

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
        self._kept[request.session] = tokens

    def shrink(self, free_tokens: int) -> None:
        """There is no more room than this."""
        while self._tokens > free_tokens:
            session, kept = self._kept.popitem(last=False)
            left = max(0, kept - (self._tokens - free_tokens))
            self._tokens -= kept - left
            if left:
                self._kept[session] = left
                self._kept.move_to_end(session, last=False)
