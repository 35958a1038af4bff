"""Algorithm 2 as it is printed.

Source: 001 (Pang, Li, Wang: memory-aware and SLA-constrained dynamic batching). `policies.papers.sla_constrained` is
the corrected one.
"""

from dataclasses import dataclass
from math import floor

from policies.checks import require_at_least, require_order, require_positive
from policies.engine.plans import capped_plan
from policies.papers.latency_search import TokenGap, WindowMean
from policies.types import BatchState, Limit, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaConstrainedLiteralConfig:
    """Algorithm 2 as printed.

    Attributes:
        itl_target_s, tolerance_s: D_SLA and epsilon_D, seconds.
        min_batch_size, max_batch_size: B_min and B_max.
        alpha, delta: width of the search interval and its drift per update, requests.
        window_steps: steps per update, as in ``SlaConstrainedConfig``.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float
    tolerance_s: float = 0.002
    min_batch_size: int = 1
    max_batch_size: int = 512
    alpha: int = 16
    delta: int = 4
    window_steps: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "itl_target_s", "tolerance_s")
        require_at_least(1, self, "min_batch_size", "alpha", "delta", "window_steps")
        require_order(self, "min_batch_size", "max_batch_size")


class SlaConstrainedLiteral:
    """001's Algorithm 2 to the letter, lines 17 to 19 in every branch (ERRATA 1.9), for comparison only.

    It never reaches its bounds, may cross them, may stop admission with a batch size of 0, raises its limit while load
    is low and falls by delta per update after a shift (ERRATA 1.10 to 1.12). ``plan`` keeps the cap at 1 or more and
    never below the decoding requests (line 18).
    """

    def __init__(self, config: SlaConstrainedLiteralConfig) -> None:
        self.config = config
        self._gap = TokenGap()
        self._window = WindowMean(config.window_steps)
        self.low: float = config.min_batch_size
        self.high: float = config.max_batch_size
        self.limit = floor((self.low + self.high) / 2)
        self._missed = False

    def update(self, latency_s: float, batch_size: float) -> None:
        """Lines 3 to 17: one step of the search from the recent mean latency and mean decode batch."""
        c, low, high = self.config, self.low, self.high
        self._missed = latency_s > c.itl_target_s + c.tolerance_s
        if latency_s > c.itl_target_s + c.tolerance_s:
            self.high, self.low = max(batch_size, low + c.alpha), max(low - c.delta, c.min_batch_size)
        elif latency_s < c.itl_target_s - c.tolerance_s:
            self.low, self.high = min(batch_size, high - c.alpha), min(high + c.delta, c.max_batch_size)
        else:
            self.high = min(batch_size + c.alpha // 2, c.max_batch_size)
            self.low = max(batch_size - c.alpha // 2, c.min_batch_size)
        self.limit = floor((self.low + self.high) / 2)

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``. The printed rule goes on cutting."""
        c = self.config
        if not self._missed or self.limit > c.min_batch_size + c.delta:
            return None
        return f"a batch of {max(1, self.limit)} misses {c.itl_target_s:g} s between tokens; the rule goes on cutting"

    def plan(self, state: BatchState) -> StepPlan:
        decoding = state.running_count - state.prefilling_count
        return capped_plan(state, min(max(self.limit, decoding), self.config.max_batch_size), Limit.ALGORITHM_2)

    def observe(self, result: StepResult) -> None:
        if gap_s := self._gap.add(result):
            self._window.add(gap_s, result.decode_requests, binding=True)
        if window := self._window.step():
            self.update(window.latency_s, window.used)
