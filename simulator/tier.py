"""Memory beyond the cache of a GPU, from which prefixes are loaded: host memory, or a disk.

As vLLM's offloading has it (0.32): what an engine has computed is kept there as well, the least recently used goes
first, and of one session its end before its beginning. A load goes over a link, one load after the other, while the
engine goes on with other requests; the request starts when it has come. What had better be read again is not loaded.
Departures: copying there costs nothing, and what is being loaded holds no blocks until it has come.
"""

from dataclasses import dataclass

from policies.checks import require_at_least
from policies.router.tiers import NOTHING, Load, Loadable, cheapest_load
from simulator.prefix_cache import PrefixCache
from simulator.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """A tier of each engine.

    Attributes:
        tokens: that it holds.
        token_s: seconds in which one is loaded.

    Raises:
        ConfigError: a value is out of bounds.
    """

    tokens: int
    token_s: float

    def __post_init__(self) -> None:
        require_at_least(1, self, "tokens")
        require_at_least(0, self, "token_s")


class Tier:
    """One engine's tier, and its link."""

    def __init__(self, config: TierConfig, block_size: int) -> None:
        self._config, self._kept = config, PrefixCache(block_size)
        self._free_s = 0.0  # when all that is being loaded has come

    def load(self, request: Request, hit_tokens: int, now_s: float, prompt_token_s: float | None) -> Load:
        """What of its prompt is to be loaded, behind what the GPU has.

        Args:
            prompt_token_s: seconds in which a prompt token is read; None while nobody knows, and then all is loaded.
        """
        tokens, wait_s = self._kept.known_tokens(request) - hit_tokens, max(0.0, self._free_s - now_s)
        if tokens <= 0:
            return NOTHING
        part = Loadable(tier="CPU", tokens=tokens, token_s=self._config.token_s, wait_s=wait_s)
        return Load(parts=(part,)) if prompt_token_s is None else cheapest_load([part], prompt_token_s)

    def begin(self, request: Request, load: Load, now_s: float) -> float:
        """Load this for a request. Returns when it will have come."""
        self._kept.touch(request)
        self._free_s = max(now_s, self._free_s) + load.tokens * self._config.token_s
        return self._free_s

    def keep(self, request: Request, tokens: int) -> None:
        """So many tokens of a request have been computed."""
        self._kept.keep(request, tokens)
        self._kept.shrink(self._config.tokens)
