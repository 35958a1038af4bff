"""Closed forms of exclusive batching that serve by default: how long a decode phase lasts and what either mode costs.

Source: 003 (EB+). ``policies.engine.exclusive`` drives them online; what the paper itself prints is in
``policies.papers.phases``. Departures, with the numbers of ERRATA:

* The phase length is the integer T that minimises (alpha_p + alpha_d*T) * E[ceil(O/T)], exact for any length law (3.4).
* A prefill longer than the token budget pays its overhead once per step, which is part of the optimum (3.9).
* Mixed costs come from a fit to iterations, so their overhead is not counted twice (3.12), and decode costs are taken
  at the live mean context (3.13).

Symbols: T decode steps of a phase, N slots, k requests per refill, mu_L and mu_O mean prompt and output tokens, alpha
and beta fixed and marginal seconds, O a random output length.
"""

from dataclasses import dataclass
from math import ceil, expm1, floor, inf

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import ROUNDING, check_positive
from policies.lengths.statistics import length_grid
from policies.types import BoolArray, FloatArray, IntArray, StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseLength:
    """A decode phase of ``steps`` steps, after which the free slots are refilled.

    slots_fraction: expected share of the slots that a phase frees, 1 / E[ceil(O / steps)].
    """

    steps: int
    slots_fraction: float

    def refill(self, slots: int) -> int:
        """Requests per refill in a full batch of that many slots: floor, at least 1 (ERRATA 3.7)."""
        return max(1, min(slots, floor(self.slots_fraction * slots)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillLimits:
    """What bounds a refill besides throughput.

    Attributes:
        slots: N.
        mean_prompt_tokens: mu_L.
        max_batch_tokens: token budget of a step; a refill of k takes ceil(k * mu_L / budget) prefill steps.

    Raises:
        InputError: a value is not positive.
    """

    slots: int
    mean_prompt_tokens: float
    max_batch_tokens: int

    def __post_init__(self) -> None:
        check_positive(
            slots=self.slots, mean_prompt_tokens=self.mean_prompt_tokens, max_batch_tokens=self.max_batch_tokens
        )

    def prefill_steps(self, requests: ArrayLike) -> FloatArray:
        """Prefill steps that refills of these sizes take, for any shape."""
        tokens = np.asarray(requests, dtype=np.float64) * self.mean_prompt_tokens
        return np.asarray(np.maximum(1.0, np.ceil(tokens / self.max_batch_tokens - ROUNDING)))


def best_phase_of_survival(
    survival: FloatArray,
    prefill_overhead_s: float,
    decode_overhead_s: float,
    limits: RefillLimits | None = None,
    *,
    thinned: bool = False,
) -> PhaseLength:
    """The integer T that minimises (alpha_p*m + alpha_d*T) * E[ceil(O/T)] (ERRATA 3.4), for any length law.

    m is 1 without ``limits`` and otherwise the number of prefill steps a refill takes; with limits, T is also chosen
    among those whose refill holds at least one request, as far as there are any.

    Args:
        survival: P(O > t), t = 0, 1, ..., shape (longest + 1,), survival[0] = 1.
        thinned: look at every T up to 64 and then in steps of 5 %, for use while serving; the optimum is flat.
    """
    check_positive(prefill_overhead_s=prefill_overhead_s, decode_overhead_s=decode_overhead_s)
    steps = _candidates(_longest_useful(survival, prefill_overhead_s, decode_overhead_s), thinned)
    renewals = _renewals(survival, steps)
    if limits:
        refill = limits.slots / renewals
        prefill_s = np.where(_feasible(refill), prefill_overhead_s * limits.prefill_steps(refill), inf)
    else:
        prefill_s = np.full(len(steps), prefill_overhead_s)
    best = int(np.argmin((prefill_s + decode_overhead_s * steps) * renewals))
    return PhaseLength(steps=int(steps[best]), slots_fraction=float(1.0 / renewals[best]))


def _renewals(survival: FloatArray, steps: IntArray) -> FloatArray:
    """E[ceil(O/T)] = sum over j of P(O > j T), for every T of ``steps``, shape (candidates,)."""
    terms = -(-len(survival) // steps)
    first = np.cumsum(terms) - terms
    multiple = np.arange(int(terms.sum())) - np.repeat(first, terms)
    return np.add.reduceat(survival[multiple * np.repeat(steps, terms)], first)


def _longest_useful(survival: FloatArray, prefill_overhead_s: float, decode_overhead_s: float) -> int:
    """A phase longer than this costs more than T = max(1, round(E[O])) does, since E[ceil(O/T)] >= 1."""
    mean = max(1, round(float(survival.sum())))
    reference = (prefill_overhead_s + decode_overhead_s * mean) * float(survival[::mean].sum())
    return max(1, min(len(survival) - 1, ceil((reference - prefill_overhead_s) / decode_overhead_s)))


def _candidates(longest: int, thinned: bool) -> IntArray:
    grid = length_grid(longest, exact_up_to=64 if thinned else longest, ratio=1.05)[1:]
    return np.minimum(grid, longest)


def _feasible(refill: FloatArray) -> BoolArray:
    """Refills of at least one request, or the largest where none reaches one."""
    wanted = refill >= 1.0
    return wanted if wanted.any() else np.asarray(refill == refill.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadMeans:
    """Mean lengths of the requests served; context_tokens is the mean context of a decode token (ERRATA 1.4, 3.13).

    Raises:
        InputError: a value is not positive.
    """

    prompt_tokens: float
    output_tokens: float
    context_tokens: float

    def __post_init__(self) -> None:
        check_positive(
            prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens, context_tokens=self.context_tokens
        )

    @property
    def total_tokens(self) -> float:
        return self.prompt_tokens + self.output_tokens

    @property
    def decode_fraction(self) -> float:
        """r, the share of tokens that are decoded."""
        return self.output_tokens / self.total_tokens


def exclusive_token_s(times: StepTimes, means: WorkloadMeans) -> float:
    """beta_EB^w = (beta_p mu_L + beta_d mu_O) / (mu_L + mu_O), s per token of input + output (ERRATA 3.10)."""
    decode_s = times.decode.decode_s + times.decode.kv_s * means.context_tokens
    return (times.prefill.prefill_s * means.prompt_tokens + decode_s * means.output_tokens) / means.total_tokens


def exclusive_throughput(
    times: StepTimes, means: WorkloadMeans, *, refill: float, phase_steps: float, prefill_steps: float = 1.0
) -> float:
    """Tokens (input + output) per second of exclusive batching with a full batch and an endless queue.

        k (mu_L + mu_O) / (alpha_p m + beta_p k mu_L + alpha_d T + beta_d k mu_O)

    Args:
        refill: k requests per cycle; phase_steps: T decode steps per cycle; prefill_steps: m prefill steps per cycle.
            003's own form is k = theta0*N, T = zeta*mu_O.

    Raises:
        InputError: refill, phase_steps or prefill_steps is not positive.
    """
    check_positive(refill=refill, phase_steps=phase_steps, prefill_steps=prefill_steps)
    fixed_s = times.prefill.overhead_s * prefill_steps + times.decode.overhead_s * phase_steps
    return 1.0 / (fixed_s / (refill * means.total_tokens) + exclusive_token_s(times, means))


def mixed_steps_throughput(times: StepTimes, means: WorkloadMeans, *, slots: float) -> float:
    """Tokens (input + output) per second of mixed batching with a full batch and an endless queue.

    A step admits k = N / (1 + mu_O) requests on average; with k well below 1, i.e. answers longer than the batch is
    wide, most steps of mixed batching are pure decodes and neither alpha_MB nor any interference applies to them. The
    share of steps with a prefill is taken as 1 - exp(-k), completions being nearly independent. A mixed step takes at
    least as long as its decodes alone, whatever interference was fitted.

    Raises:
        InputError: slots is not positive.
    """
    check_positive(slots=slots)
    admitted = slots / (1.0 + means.output_tokens)
    share = -expm1(-admitted)
    decodes = slots - admitted
    context = decodes * means.context_tokens
    prefill = admitted * means.prompt_tokens
    with_s = times.step_s(prefill_tokens=prefill / share, decode_requests=decodes, kv_tokens=context)
    without_s = times.decode.step_s(decode_requests=decodes, kv_tokens=context)
    return (prefill + decodes) / (share * with_s + (1.0 - share) * without_s)
