"""How many requests may run at once: by memory (Algorithm 1), by latency (Algorithm 2), and the smallest of several.

Source: 001 (Pang, Li, Wang: memory-aware and SLA-constrained dynamic batching). Departures, with ERRATA numbers:

* Eq. 12 uses the moments of one request, not the totals at the present batch (1.1), with 2*Cov (1.3); prompts that are
  already known leave the variance. L0 is the buffer theta*sigma*sqrt(b*), which makes eq. 14 equal eq. 12 (1.2).
* Algorithm 1 returns in every case and starts from eq. 12 on prior moments rather than from the largest batch (1.6);
  it divides by final sizes, not by what young requests hold at the moment (1.8), or by name by the length-biased
  resident size, which is the safe one for outputs with a coefficient of variation above 1 (1.4).
* Algorithm 2 reaches both bounds (1.10), keeps low <= limit <= high (1.11), learns nothing upward while the limit does
  not bind but what the batch proves safe (1.12) and brackets with limit*SLA/latency: for any latency a + c*b with
  a >= 0 that lies between b and the answer, so an upward shift is met in a few updates. ``SlaConstrainedLiteral`` is
  the printed algorithm.
* Latency is the time between two tokens of a running request, prefill steps in between included.
* A cap below the running batch evicts nothing: relief comes from completions (1.7).
"""

from dataclasses import dataclass
from math import ceil, floor, inf, sqrt
from operator import attrgetter
from statistics import NormalDist
from typing import Literal

from policies.checks import require_at_least, require_one_of, require_order, require_positive, require_probability
from policies.errors import InputError
from policies.latency_search import LatencySearch, TokenGap, WindowMean
from policies.lengths import LengthStatistics
from policies.types import BatchPolicy, BatchState, Limit, Phase, StepPlan, StepResult

# Rounding that an exact integer may lose on its way through square roots.
_EPSILON = 1e-9
# Of chunks: the largest, and the most that the search climbs beyond what is known to be safe.
_MAX_CHUNK_TOKENS = 65536
_CHUNK_STRIDE_TOKENS = 256
# Most steps that a plan is kept for: what is shown of a batch meanwhile is no older than this.
KEPT_STEPS = 16
# Share of the batch that leaves before blocks are counted again where they are short.
LEFT_SHARE = 1 / 24
# Steps whose lengths and times are learned together: the code for it is not in the processor's caches between two steps
# of an engine, and fetching it costs more than learning. Whoever decides by them reads what there is before.
READ_STEPS = 32
_cap_of = attrgetter("max_batch_size")


def memory_safe_batch_size(
    capacity_tokens: float, mean_tokens: float, std_tokens: float, overflow_probability: float
) -> int:
    """Largest b with P(b requests need more than the capacity) <= overflow_probability, by the central limit theorem.

        b = floor(((sqrt((theta*sigma)^2 + 4*mu*eta) - theta*sigma) / (2*mu))^2),  theta = Phi^-1(1 - overflow)

    001's eq. 12 with moments per request (ERRATA 1.1). Skewed lengths overflow somewhat more often than asked below
    1 % (1.5).

    Args:
        capacity_tokens: eta, tokens of KV cache.
        mean_tokens, std_tokens: mu and sigma of what one request needs, tokens.

    Returns:
        0 when not even one request is safe.

    Raises:
        InputError: capacity or std is negative, mean not positive, or the probability outside (0, 1).
    """
    _check_moments(capacity_tokens, mean_tokens, std_tokens)
    margin = _safety_factor(overflow_probability) * std_tokens
    root = (sqrt(margin * margin + 4.0 * mean_tokens * capacity_tokens) - margin) / (2.0 * mean_tokens)
    return floor(root * root + _EPSILON)


def safety_buffer_tokens(std_tokens: float, overflow_probability: float, batch_size: float) -> float:
    """L0 = theta * sigma * sqrt(b): tokens kept free at batch size b (ERRATA 1.2).

    Raises:
        InputError: std or batch_size is negative, or the probability outside (0, 1).
    """
    _check_moments(batch_size, 1.0, std_tokens)
    return _safety_factor(overflow_probability) * std_tokens * sqrt(batch_size)


def linear_batch_size(capacity_tokens: float, mean_tokens: float, buffer_tokens: float) -> float:
    """001's eq. 14, (eta - L0) / mu, not rounded.

    With L0 taken at eq. 12's b it equals eq. 12; iterated with L0 at the previous b it converges there.

    Raises:
        InputError: mean is not positive or capacity negative.
    """
    _check_moments(capacity_tokens, mean_tokens, 0.0)
    return max(0.0, (capacity_tokens - buffer_tokens) / mean_tokens)


def _safety_factor(overflow_probability: float) -> float:
    if not 0.0 < overflow_probability < 1.0:
        raise InputError(f"overflow_probability must be in (0, 1), got {overflow_probability}")
    return NormalDist().inv_cdf(1.0 - overflow_probability)


def _check_moments(capacity_tokens: float, mean_tokens: float, std_tokens: float) -> None:
    if not 0.0 <= capacity_tokens < inf or not 0.0 < mean_tokens < inf or not 0.0 <= std_tokens < inf:
        given = f"{capacity_tokens}, {mean_tokens}, {std_tokens}"
        raise InputError(f"need capacity >= 0, mean > 0 and std >= 0, all finite, got {given}")


def capped_plan(state: BatchState, cap: int, limited_by: Limit, steps: int = 1) -> StepPlan:
    """A mixed step of at most ``cap`` requests, never less than one and never more than the slots."""
    size = max(1, min(cap, state.slots))
    room = max(0, size - state.running_count)
    return StepPlan(
        phase=Phase.MIXED,
        max_batch_size=size,
        limited_by=limited_by if size < state.slots else Limit.SLOTS,
        max_batch_tokens=state.max_batch_tokens,
        admit=tuple([request.request_id for request in state.waiting[:room]]),
        steps=steps,
    )


class Stock:
    """The engine's own behaviour: fill the slots, mix prefill and decode. The baseline everything is compared with."""

    def plan(self, state: BatchState) -> StepPlan:
        return capped_plan(state, state.slots, Limit.SLOTS, KEPT_STEPS)

    def batch_size(self, state: BatchState) -> int:
        """Requests that may run at once as things stand: the engine starts those whose prompts fit now."""
        tokens = unshared_fraction(state) * mean_known_prompt_tokens(state)
        return min(state.slots, state.running_count + state.free_blocks // max(1, ceil(tokens / state.block_size)))

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAwareConfig:
    """Algorithm 1.

    Attributes:
        overflow_probability: epsilon_M. 0.01: the central limit holds to 1.2 % there (ERRATA 1.5).
        form: "exact" is eq. 12, "linear" is eq. 14 with L0 refreshed every ``buffer_refresh_steps`` plans.
        basis: "final" sizes an average request at its end; "resident" at a random step, for outputs with cv > 1.
        known_prompts: take mean prompts from the requests at hand and leave their variance out; "final" only.
        min_batch_size, max_batch_size: bounds on the cap; no upper one but the slots when None.
        prior_output_tokens, prior_output_std_tokens: what outputs are taken for until min_samples have completed;
            tokens generated meanwhile count against it, those of running requests too.
        window: completions remembered.

    Raises:
        ConfigError: a value is out of bounds.
    """

    overflow_probability: float = 0.01
    form: Literal["exact", "linear"] = "exact"
    basis: Literal["final", "resident"] = "final"
    known_prompts: bool = True
    min_batch_size: int = 1
    max_batch_size: int | None = None
    prior_output_tokens: float = 256.0
    prior_output_std_tokens: float = 256.0
    min_samples: int = 32
    window: int = 1000
    buffer_refresh_steps: int = 64

    def __post_init__(self) -> None:
        require_probability(self, "overflow_probability")
        require_one_of(("exact", "linear"), self, "form")
        require_one_of(("final", "resident"), self, "basis")
        require_at_least(1, self, "min_batch_size", "min_samples", "window", "buffer_refresh_steps")
        require_order(self, "min_batch_size", "max_batch_size")
        require_positive(self, "prior_output_tokens")
        require_at_least(0, self, "prior_output_std_tokens")


class MemoryAware:
    """001's Algorithm 1: the batch that fits the KV cache with a given probability.

    The cap moves only while something waits for a prefill and something decodes; N^p and N^d of the listing are taken
    for the requests in those two states just before the step.
    """

    def __init__(self, config: MemoryAwareConfig) -> None:
        self.config = config
        self._lengths = LengthStatistics(window=config.window)
        self._cap: int | None = None
        self._buffer_tokens = 0.0
        self._buffer_age = config.buffer_refresh_steps

    def plan(self, state: BatchState) -> StepPlan:
        prefilling = state.prefilling_count
        decoding = state.running_count - prefilling
        if self._cap is None or (decoding and (prefilling or state.waiting_count)):
            self._cap = self._new_cap(state)
        highest = self.config.max_batch_size or state.slots
        return capped_plan(state, min(max(self._cap, self.config.min_batch_size, decoding), highest), Limit.MEMORY)

    def observe(self, result: StepResult) -> None:
        self._lengths.observe(result)

    def batch_size(self, state: BatchState) -> int:
        """Requests that eq. 12 lets run at once as things stand. Changes nothing."""
        mean, std = self._request_moments(state)
        exact = memory_safe_batch_size(state.capacity_tokens, mean, std, self.config.overflow_probability)
        return min(max(exact, self.config.min_batch_size), self.config.max_batch_size or state.slots, state.slots)

    def _new_cap(self, state: BatchState) -> int:
        mean, std = self._request_moments(state)
        capacity, overflow = state.capacity_tokens, self.config.overflow_probability
        exact = memory_safe_batch_size(capacity, mean, std, overflow)
        if self.config.form == "exact":
            return exact
        self._buffer_age += 1
        if self._buffer_age >= self.config.buffer_refresh_steps:
            self._buffer_tokens, self._buffer_age = safety_buffer_tokens(std, overflow, exact), 0
        return floor(linear_batch_size(capacity, mean, self._buffer_tokens) + _EPSILON)

    def _request_moments(self, state: BatchState) -> tuple[float, float]:
        """Mean and standard deviation of what one request needs, tokens, half a block of rounding included."""
        moments = self._lengths.moments()
        rounding = 0.5 * state.block_size
        if moments is None or moments.requests < self.config.min_samples:
            output, std = self._prior_moments(state)
            return mean_known_prompt_tokens(state) + output + rounding, std
        if self.config.basis == "resident":
            return moments.mean_resident_tokens + rounding, moments.std_resident_tokens
        if self.config.known_prompts:
            known = mean_known_prompt_tokens(state)
            return known + moments.mean_output_tokens + rounding, moments.std_output_given_prompt
        return moments.mean_total_tokens + rounding, moments.std_total_tokens

    def _prior_moments(self, state: BatchState) -> tuple[float, float]:
        """The prior, weighing min_samples requests, with every token generated so far, ended or not, against it."""
        c, sums = self.config, self._lengths.sums()
        generated = sums.output + int(state.running.output_tokens.sum())
        mean = (c.min_samples * c.prior_output_tokens + generated) / (c.min_samples + sums.requests)
        return mean, c.prior_output_std_tokens * mean / c.prior_output_tokens


def mean_known_prompt_tokens(state: BatchState) -> float:
    """Mean prompt of the requests that run or could start next; 0 when there are none."""
    upcoming = state.waiting[: max(1, state.free_slots)]
    requests = state.running_count + len(upcoming)
    total = state.running.total_prompt_tokens + sum(request.prompt_tokens for request in upcoming)
    return total / requests if requests else 0.0


def unshared_fraction(state: BatchState) -> float:
    """Share of the running prompts' tokens that is not counted twice because several requests share the blocks."""
    prompts = state.running.total_prompt_tokens
    if not prompts:
        return 1.0
    shared = state.running.computed_tokens - (state.capacity_tokens - state.free_tokens)
    return min(1.0, max(0.0, 1.0 - shared / prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlaConstrainedConfig:
    """Algorithm 2, corrected.

    Attributes:
        itl_target_s: D_SLA, mean seconds between tokens.
        min_batch_size, max_batch_size: B_min and B_max; the engine's slots bound the batch besides.
        initial_batch_size: where the search begins; it climbs by at most ``stride`` beyond what is known to be safe.
        stride: alpha, requests.
        window_steps: steps per update; as many more where less than half of them decode.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float
    min_batch_size: int = 1
    max_batch_size: int = 4096
    initial_batch_size: int = 32
    stride: int = 16
    window_steps: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "itl_target_s")
        require_at_least(1, self, "min_batch_size", "initial_batch_size", "stride", "window_steps")
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
            initial=config.initial_batch_size,
            target_s=config.itl_target_s,
            stride=config.stride,
        )

    @property
    def limit(self) -> int:
        """B: requests that may run."""
        return self._search.value

    def plan(self, state: BatchState) -> StepPlan:
        return capped_plan(state, self.limit, Limit.SLA, self.steps_ahead())

    def steps_ahead(self) -> int:
        """Steps until the limit may move."""
        return min(KEPT_STEPS, self._window.steps_left)

    def observe(self, result: StepResult) -> None:
        gap_s = self._gap.add(result)
        if gap_s:
            full = result.running_count >= self.limit and result.waiting_count > 0
            self._window.add(gap_s, result.decode_requests, binding=full)
        if window := self._window.step():
            self._search.update(window.latency_s, window.used, binding=window.binding)


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

    def update(self, latency_s: float, batch_size: float) -> None:
        """Lines 3 to 17: one step of the search from the recent mean latency and mean decode batch."""
        c, low, high = self.config, self.low, self.high
        if latency_s > c.itl_target_s + c.tolerance_s:
            self.high, self.low = max(batch_size, low + c.alpha), max(low - c.delta, c.min_batch_size)
        elif latency_s < c.itl_target_s - c.tolerance_s:
            self.low, self.high = min(batch_size, high - c.alpha), min(high + c.delta, c.max_batch_size)
        else:
            self.high = min(batch_size + c.alpha // 2, c.max_batch_size)
            self.low = max(batch_size - c.alpha // 2, c.min_batch_size)
        self.limit = floor((self.low + self.high) / 2)

    def plan(self, state: BatchState) -> StepPlan:
        decoding = state.running_count - state.prefilling_count
        return capped_plan(state, min(max(self.limit, decoding), self.config.max_batch_size), Limit.SLA)

    def observe(self, result: StepResult) -> None:
        if gap_s := self._gap.add(result):
            self._window.add(gap_s, result.decode_requests, binding=True)
        if window := self._window.step():
            self.update(window.latency_s, window.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizeConfig:
    """The prefill part of a fused step.

    Attributes:
        itl_target_s: mean seconds of a step that holds both prefill and decode.
        min_chunk_tokens: the least that the search answers with; the engine's token budget bounds the step besides.
        initial_chunk_tokens: where the search begins.
        window_steps: steps per update; as many more where less than half of them are fused.

    Raises:
        ConfigError: a value is out of bounds.
    """

    itl_target_s: float
    min_chunk_tokens: int = 64
    initial_chunk_tokens: int = 512
    window_steps: int = 16

    def __post_init__(self) -> None:
        require_positive(self, "itl_target_s")
        require_at_least(1, self, "min_chunk_tokens", "initial_chunk_tokens", "window_steps")


class ChunkSize:
    """Prefill tokens per fused step under an inter-token target: 001's prefill-decode fusion, searched as Algorithm 2.

    The chunk is besides the tokens of the decoding requests, so prompts are cut, never decodes. Where nobody
    decodes nobody waits for a token, and no prompt is cut. Steps without a prefill, or with one that did not fill the
    chunk, teach nothing upward but what they prove.
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
        )

    @property
    def chunk_tokens(self) -> int:
        return self._search.value

    def plan(self, state: BatchState) -> StepPlan:
        plan = capped_plan(state, state.slots, Limit.SLOTS, self.steps_ahead())
        return plan._replace(max_prefill_tokens=self.chunk_tokens)

    def steps_ahead(self) -> int:
        """Steps until the chunk may change."""
        return min(KEPT_STEPS, self._window.steps_left)

    def observe(self, result: StepResult) -> None:
        if result.prefill_tokens and result.decode_requests:
            full = result.prefill_tokens >= 0.9 * self.chunk_tokens
            self._window.add(result.step_s, result.prefill_tokens, binding=full)
        if window := self._window.step():
            self._search.update(window.latency_s, window.used, binding=window.binding)


class Smallest:
    """001's b = min(b_mem, b_SLA), for any policies: the smallest cap counts, and what all admit, in the first's order.

    Each policy sees the state as the ones before it left it, with their cap as the slots and their admissions as the
    queue. So one that chooses phases belongs last: it then waits for as many requests as the others would really let
    in. Token budgets of mixed plans bind mixed steps only.
    """

    def __init__(self, *policies: BatchPolicy) -> None:
        """Raises InputError when there is no policy."""
        if not policies:
            raise InputError("Smallest needs at least one policy")
        self.policies = policies

    def plan(self, state: BatchState) -> StepPlan:
        plans = [self.policies[0].plan(state)]
        narrowed = state
        for policy in self.policies[1:]:
            narrowed = _narrowed(narrowed, plans[-1])
            plans.append(policy.plan(narrowed))
        return _joined(state, plans)

    def observe(self, result: StepResult) -> None:
        for policy in self.policies:
            policy.observe(result)


def _narrowed(state: BatchState, plan: StepPlan) -> BatchState:
    returns = state.slots_return and plan.max_served == inf
    if plan.max_batch_size >= state.slots and len(plan.admit) == len(state.waiting) and returns == state.slots_return:
        return state
    waiting, slots = state.waiting[: len(plan.admit)], min(state.slots, plan.max_batch_size)
    if [request.request_id for request in waiting] != list(plan.admit):
        admitted = set(plan.admit)
        waiting = tuple([request for request in state.waiting if request.request_id in admitted])
    return state._replace(slots=slots, waiting=waiting, slots_return=returns)


def _joined(state: BatchState, plans: list[StepPlan]) -> StepPlan:
    tightest = min(plans, key=_cap_of)
    phases = [plan.phase for plan in plans if plan.phase is not Phase.MIXED]
    phase = phases[-1] if phases else Phase.MIXED
    admit = plans[-1].admit
    if phase is Phase.PREFILL and not admit and not state.prefilling_count:
        phase = Phase.DECODE  # a later cap took away what the phase was opened for
    return StepPlan(
        phase=phase,
        max_batch_size=tightest.max_batch_size,
        limited_by=tightest.limited_by,
        max_batch_tokens=min([p.max_batch_tokens for p in plans if p.phase is phase], default=state.max_batch_tokens),
        max_prefill_tokens=min(
            [p.max_prefill_tokens for p in plans if p.phase is phase and p.max_prefill_tokens is not None], default=None
        ),
        admit=admit,
        steps=min([plan.steps for plan in plans]),
        may_leave=min([plan.may_leave for plan in plans]),
        max_served=min([plan.max_served for plan in plans]),
    )
