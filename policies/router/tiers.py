"""Whether a prefix that lies beyond the cache of a GPU is loaded from there, or read again: whichever takes less time.

A tier is memory of the host, a disk or a store for all replicas. What lies there takes seconds to load, and may wait
for what is being loaded already. Reading takes steps of the engine. A dispatcher knows prompts by the tokens that are
still to read, so the seconds of a load count as the tokens that would be read meanwhile: one number says what all that
a replica holds of a prompt is worth. Departure: a load and what the engine reads before count one after the other, and
what is loaded delays those behind as if it were read.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Loadable:
    """What a tier has of a prompt, behind the part that the GPU and nearer tiers have.

    Attributes:
        tier: its name.
        tokens: of the prompt.
        token_s: seconds in which one of them is loaded.
        wait_s: seconds until what is being loaded from there has come.
    """

    tier: str
    tokens: int
    token_s: float
    wait_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.wait_s + self.tokens * self.token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is to be loaded for a prompt: from some tiers, the nearest first.

    Attributes:
        parts: one for each tier; none where nothing is to be loaded.
        read_tokens: that would be read in the time that the loads take, waiting included.
    """

    parts: tuple[Loadable, ...] = ()
    read_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def saved_tokens(self) -> int:
        """Tokens of the prompt that need not be read, less those that could be read meanwhile."""
        return self.tokens - self.read_tokens


NOTHING = Load()


def cheapest_load(loadable: Sequence[Loadable], prompt_token_s: float) -> Load:
    """The load that saves most; `NOTHING` where reading again is as fast.

        max over n of  sum of tokens - (sum of (wait_s + tokens * token_s)) / prompt_token_s,   of the first n tiers

    A farther tier goes on where a nearer one ends, so it is of use only together with all before it, and they come one
    after the other.

    Args:
        loadable: the nearest tier first.
        prompt_token_s: seconds in which a prompt token is read; 0 where reading costs nothing.
    """
    best = NOTHING
    if prompt_token_s <= 0.0:
        return best
    tokens, seconds = 0, 0.0
    for count, part in enumerate(loadable, start=1):
        tokens += part.tokens
        seconds += part.seconds
        load = Load(parts=tuple(loadable[:count]), read_tokens=round(seconds / prompt_token_s))
        if load.saved_tokens > best.saved_tokens:
            best = load
    return best
