"""How many requests memory is safe for: Algorithm 1, with equation 12. By name; the default is the forecast.

Source: 001 (Pang, Li, Wang: memory-aware and SLA-constrained dynamic batching). Departures, with ERRATA numbers:

* Eq. 12 uses the moments of one request, not the totals at the present batch (1.1), with 2*Cov (1.3); prompts that are
  already known leave the variance. L0 is the buffer theta*sigma*sqrt(b*), which makes eq. 14 equal eq. 12 (1.2).
* Algorithm 1 returns in every case and starts from eq. 12 on prior moments rather than from the largest batch (1.6);
  it divides by final sizes, not by what young requests hold at the moment (1.8), or by name by the length-biased
  resident size, which is the safe one for outputs with a coefficient of variation above 1 (1.4).
* A cap below the running batch evicts nothing: relief comes from completions (1.7).
"""

from dataclasses import dataclass
from math import floor, inf, sqrt
from statistics import NormalDist
from typing import Literal

from policies.checks import (
    ROUNDING,
    require_at_least,
    require_one_of,
    require_order,
    require_positive,
    require_probability,
)
from policies.engine.plans import capped_plan
from policies.errors import InputError
from policies.lengths.statistics import LengthStatistics
from policies.types import BatchState, Limit, StepPlan, StepResult


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
    return floor(root * root + ROUNDING)


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

    Attributes:
        lengths: as they are learned.
    """

    def __init__(self, config: MemoryAwareConfig, learned: "MemoryAware | None" = None) -> None:
        """``learned``: one whose lengths this one takes over; it must not be used any more."""
        self.config = config
        self.lengths: LengthStatistics = learned.lengths if learned else LengthStatistics(window=config.window)
        self._cap: int | None = None
        self._is_safe = True  # at least one request
        self._buffer_tokens = 0.0
        self._buffer_age = config.buffer_refresh_steps

    @property
    def out_of_reach(self) -> str | None:
        """As ``Targeted``."""
        if self._is_safe:
            return None
        c = self.config
        at_most = f"{c.min_batch_size} at a time" if c.min_batch_size > 1 else "one at a time"
        return f"not even one request is safe at overflow_probability {c.overflow_probability:g}, so they run {at_most}"

    def plan(self, state: BatchState) -> StepPlan:
        prefilling = state.prefilling_count
        decoding = state.running_count - prefilling
        if self._cap is None or (decoding and (prefilling or state.waiting_count)):
            self._cap = self._new_cap(state)
        highest = self.config.max_batch_size or state.slots
        return capped_plan(state, min(max(self._cap, self.config.min_batch_size, decoding), highest), Limit.ALGORITHM_1)

    def observe(self, result: StepResult) -> None:
        self.lengths.observe(result)

    def _new_cap(self, state: BatchState) -> int:
        mean, std = self._request_moments(state)
        capacity, overflow = state.capacity_tokens, self.config.overflow_probability
        exact = memory_safe_batch_size(capacity, mean, std, overflow)
        self._is_safe = exact >= 1
        if self.config.form == "exact":
            return exact
        self._buffer_age += 1
        if self._buffer_age >= self.config.buffer_refresh_steps:
            self._buffer_tokens, self._buffer_age = safety_buffer_tokens(std, overflow, exact), 0
        return floor(linear_batch_size(capacity, mean, self._buffer_tokens) + ROUNDING)

    def _request_moments(self, state: BatchState) -> tuple[float, float]:
        """Mean and standard deviation of what one request needs, tokens, half a block of rounding included."""
        moments = self.lengths.moments()
        rounding = 0.5 * state.block_size
        if moments is None or moments.requests < self.config.min_samples:
            output, std = self._prior_moments(state)
            return _mean_known_prompt_tokens(state) + output + rounding, std
        if self.config.basis == "resident":
            return moments.mean_resident_tokens + rounding, moments.std_resident_tokens
        if self.config.known_prompts:
            known = _mean_known_prompt_tokens(state)
            return known + moments.mean_output_tokens + rounding, moments.std_output_given_prompt
        return moments.mean_total_tokens + rounding, moments.std_total_tokens

    def _prior_moments(self, state: BatchState) -> tuple[float, float]:
        """The prior, weighing min_samples requests, with every token generated so far, ended or not, against it."""
        c, sums = self.config, self.lengths.sums()
        generated = sums.output + int(state.running.output_tokens.sum())
        mean = (c.min_samples * c.prior_output_tokens + generated) / (c.min_samples + sums.requests)
        return mean, c.prior_output_std_tokens * mean / c.prior_output_tokens


def _mean_known_prompt_tokens(state: BatchState) -> float:
    """Mean prompt length in tokens of the requests that run or could start next; 0 when there are none."""
    upcoming = state.waiting[: max(1, state.free_slots)]
    requests = state.running_count + len(upcoming)
    total = state.running.total_prompt_tokens + sum(request.prompt_tokens for request in upcoming)
    return total / requests if requests else 0.0
