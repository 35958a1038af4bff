"""How many requests latency allows: Algorithm 2, corrected.

Source: 001 (Pang, Li, Wang: memory-aware and SLA-constrained dynamic batching). Departures, with ERRATA numbers:

* It reaches both bounds (1.10), keeps low <= limit <= high (1.11), learns nothing upward while the limit does not bind
  but what the batch proves safe (1.12) and brackets with limit*SLA/latency: for any latency a + c*b with a >= 0 that
  lies between b and the answer, so an upward shift is met in a few updates.
* Latency is the time between two tokens of a running request, prefill steps in between included. But where chunks are
  searched as well, a step that reads one is left to that search: it makes such steps as long as the target whatever the
  batch is, so that a batch cut once would be found to be right for ever.
* Before a step has been measured nothing is cut.
* A target that B_min misses cuts no batch (``policies.papers.latency_search``).
* A cap below the running batch evicts nothing: relief comes from completions (1.7).
"""

from dataclasses import dataclass

from policies.checks import require_at_least, require_order, require_positive, require_probability
from policies.engine.plans import STANDING_STEPS, capped_plan
from policies.papers.latency_search import LEAST_CHUNK_TOKENS, TOLERANCE_FRACTION, LatencySearch, TokenGap, WindowMean
from policies.types import BatchState, Limit, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaConstrainedConfig:
    """Algorithm 2, corrected.

    Attributes:
        itl_target_s: D_SLA, mean seconds between tokens of a request that decodes.
        itl_tolerance_fraction: epsilon_D, as a share of the target.
        min_batch_size, max_batch_size: B_min and B_max; the engine's slots bound the batch besides.
        search_width: alpha, requests: the width of the interval around a batch that is on target, and the most that the
            cap climbs beyond what is known to be safe.
        search_drift: delta, requests: by how much a bound gives way first; twice or four times as much where that is
            not enough.
        fused: a ``ChunkSize`` of the same target goes with it.
        window_steps: steps per update; as many more where less than half of them tell of it.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float
    itl_tolerance_fraction: float = TOLERANCE_FRACTION
    min_batch_size: int = 1
    max_batch_size: int = 4096
    search_width: int = 16
    search_drift: int = 1
    fused: bool = False
    window_steps: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "itl_target_s")
        require_probability(self, "itl_tolerance_fraction")
        require_at_least(1, self, "min_batch_size", "search_width", "search_drift", "window_steps")
        require_order(self, "min_batch_size", "max_batch_size")


class SlaConstrained:
    """001's Algorithm 2, corrected: the largest batch whose mean time between tokens meets the target.

    Limits: the mean is held, not a percentile, and the answer moves with the context the batch reads (ERRATA 1.17).
    """

    def __init__(self, config: SlaConstrainedConfig) -> None:
        self.config = config
        self._gap = TokenGap()
        self._window = WindowMean(config.window_steps)
        self._search = LatencySearch(
            minimum=config.min_batch_size,
            maximum=config.max_batch_size,
            initial=config.max_batch_size,
            target_s=config.itl_target_s,
            stride=config.search_width,
            drift=config.search_drift,
            tolerance_fraction=config.itl_tolerance_fraction,
        )

    @property
    def limit(self) -> int:
        """B: requests that may run."""
        return self._search.value

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``."""
        if not self._search.out_of_reach:
            return None
        c = self.config
        return f"a batch of {c.min_batch_size} misses {c.itl_target_s:g} s between tokens, so no batch is cut for it"

    def plan(self, state: BatchState) -> StepPlan:
        return capped_plan(state, self.limit, Limit.ALGORITHM_2, steps=min(STANDING_STEPS, self._window.steps_left))

    def observe(self, result: StepResult) -> None:
        gap_s = self._gap.add(result)
        if gap_s and not (self.config.fused and result.prefill_tokens > LEAST_CHUNK_TOKENS):
            tokens = 1.0 + result.accepted_tokens / result.decode_requests
            full = result.running_count >= self.limit and result.waiting_count > 0
            self._window.add(gap_s / tokens, result.decode_requests, binding=full)
        if window := self._window.step():
            self._search.update(window.latency_s, window.used, binding=window.binding)
