"""How much of a prompt replicas have in their prefix caches: as they tell, else as guessed of what they were given."""

from collections.abc import Iterable
from heapq import nlargest

from policies.router.placement import PrefixIndex
from router.codec import RequestSize

MOST_HITS = 8  # replicas of a ticket: Redis looks at each of them for every ticket that it places


class PrefixHits:
    """`prefixes`: what replicas that do not tell are taken to have; None where caches have no say."""

    def __init__(self, prefixes: PrefixIndex | None) -> None:
        self._prefixes = prefixes

    @property
    def have_a_say(self) -> bool:
        """Whether what replicas have cached counts when a request is placed."""
        return self._prefixes is not None

    @property
    def entries(self) -> int:
        """(replica, block) pairs remembered."""
        return 0 if self._prefixes is None else len(self._prefixes)

    def hits(self, size: RequestSize, replica_ids: Iterable[str]) -> tuple[tuple[str, int], ...]:
        """Tokens of its prompt that replicas have cached, of those that have most.

        Of those that do not tell it is guessed from what they were given. An engine computes the last token of a prompt
        in any case.
        """
        if self._prefixes is None:
            return ()
        untold = [replica_id for replica_id in replica_ids if replica_id not in size.hits]
        known = {**self._prefixes.known_tokens(untold, size.prompt_token_ids, size.salt), **size.hits}
        most = nlargest(MOST_HITS, known.items(), key=lambda hit: (hit[1], hit[0]))
        return tuple((replica_id, min(tokens, size.prompt_tokens - 1)) for replica_id, tokens in most if tokens)

    def placed(self, replica_id: str, size: RequestSize) -> None:
        """A replica was given this prompt."""
        if self._prefixes is not None:
            self._prefixes.record(replica_id, size.prompt_token_ids, size.salt)

    def forget(self, replica_id: str) -> None:
        """It went away."""
        if self._prefixes is not None:
            self._prefixes.forget(replica_id)
