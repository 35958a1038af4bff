"""How many prompt tokens latency allows beside decodes: 001's fusion of the two, by the search of Algorithm 2."""

from dataclasses import dataclass

from policies.checks import require_at_least, require_positive, require_probability
from policies.engine.plans import STANDING_STEPS, capped_plan
from policies.papers.latency_search import LEAST_CHUNK_TOKENS, TOLERANCE_FRACTION, LatencySearch, WindowMean
from policies.types import BatchState, Limit, StepPlan, StepResult

# The largest chunk, and the most that the search climbs beyond what is known to be safe.
_MAX_CHUNK_TOKENS = 65536
_CHUNK_STRIDE_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizeConfig:
    """The prefill part of a fused step.

    Attributes:
        itl_target_s: mean seconds of a step that holds both prefill and decode.
        itl_tolerance_fraction: epsilon_D, as a share of the target.
        min_chunk_tokens: the least that the search answers with; the engine's token budget bounds the step besides.
        initial_chunk_tokens: where the search begins.
        window_steps: steps per update; as many more where less than half of them are fused.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float
    itl_tolerance_fraction: float = TOLERANCE_FRACTION
    min_chunk_tokens: int = LEAST_CHUNK_TOKENS
    initial_chunk_tokens: int = 512
    window_steps: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "itl_target_s")
        require_probability(self, "itl_tolerance_fraction")
        require_at_least(1, self, "min_chunk_tokens", "initial_chunk_tokens", "window_steps")


class ChunkSize:
    """Prefill tokens per fused step under an inter-token target: 001's prefill-decode fusion, searched as Algorithm 2.

    The chunk is besides the tokens of the decoding requests, so prompts are cut, never decodes. Where nobody
    decodes nobody waits for a token, and no prompt is cut. Steps without a prefill, or with one that did not fill the
    chunk, teach nothing upward but what they prove. Nor is anything learned while a batch drains towards its cap: what
    its steps take too long is not the chunk's.
    """

    def __init__(self, config: ChunkSizeConfig) -> None:
        self.config = config
        self._window = WindowMean(config.window_steps)
        self._search = LatencySearch(
            minimum=config.min_chunk_tokens,
            maximum=_MAX_CHUNK_TOKENS,
            initial=config.initial_chunk_tokens,
            target_s=config.itl_target_s,
            stride=_CHUNK_STRIDE_TOKENS,
            tolerance_fraction=config.itl_tolerance_fraction,
        )

    @property
    def chunk_tokens(self) -> int:
        return self._search.value

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``."""
        if not self._search.out_of_reach:
            return None
        c = self.config
        return f"a chunk of {c.min_chunk_tokens} tokens misses {c.itl_target_s:g} s a step, so no prompt is cut for it"

    def plan(self, state: BatchState) -> StepPlan:
        plan = capped_plan(state, state.slots, Limit.SLOTS, steps=min(STANDING_STEPS, self._window.steps_left))
        return plan._replace(max_prefill_tokens=self.chunk_tokens)

    def observe(self, result: StepResult) -> None:
        drains = result.running_count > result.max_batch_size
        if result.prefill_tokens and result.decode_requests and result.tells_time and not drains:
            full = result.prefill_tokens >= 0.9 * self.chunk_tokens
            self._window.add(result.step_s, result.prefill_tokens, binding=full)
        if window := self._window.step():
            self._search.update(window.latency_s, window.used, binding=window.binding)
