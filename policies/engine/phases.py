"""Closed forms of exclusive batching: how long a decode phase lasts, how many slots fit, and when mixing wins.

Source: 003 (EB+): theta0, the IFR correction, N*, and the throughput crossover (eq. 8). ``policies.engine.exclusive``
drives them online.
Departures, with the numbers of ERRATA:

* The phase length is the integer T that minimises (alpha_p + alpha_d*T) * E[ceil(O/T)], exact for any length law (3.4).
  theta0 is kept by name, and so is the IFR correction, which loses up to 9.7 % because it takes the time since the
  phase began for a request's age (3.3).
* A prefill longer than the token budget pays its overhead once per step, which is part of the optimum (3.9); refills
  may be capped by the inter-token gap they cause (3.17).
* N* follows the peak of the tokens held and the full variance (3.14): the published forms overflow in up to 29 % of
  the steps at a 1 % target.
* Mixed costs come from a fit to iterations, so their overhead is not counted twice (3.12), and decode costs are taken
  at the live mean context (3.13).

Symbols: theta refill share, zeta = -ln(1 - theta), p0 hazard per token, N slots, k requests per refill, mu_L and mu_O
mean prompt and output tokens, alpha and beta fixed and marginal seconds, O a random output length.
"""

from dataclasses import dataclass
from math import ceil, exp, expm1, floor, inf, isfinite, log1p, sqrt

import numpy as np
from numpy.typing import ArrayLike

from policies.checks import check_positive
from policies.engine.step_time import seconds_per_token
from policies.errors import InputError
from policies.lengths.statistics import length_grid
from policies.papers.memory_aware import memory_safe_batch_size
from policies.types import BoolArray, FloatArray, IntArray, StepCoefficients, StepTimes


def phase_threshold(overhead_ratio: float) -> float:
    """theta0, the refill share that maximises throughput for geometric lengths and many slots.

    The root of theta/(1-theta) + ln(1-theta) = c, unique for every c > 0: theta0 = 1 + 1/W_-1(-exp(-1-c)), solved here
    as exp(zeta) - 1 - zeta = c, which does not cancel (ERRATA 3.1).

    Args:
        overhead_ratio: c = ``overhead_ratio(...)``, dimensionless.

    Raises:
        InputError: c is not positive and finite.
    """
    return -expm1(-_phase_zeta(overhead_ratio))


def _phase_zeta(overhead_ratio: float) -> float:
    c = overhead_ratio
    check_positive(overhead_ratio=c)
    zeta = log1p(c + sqrt(2.0 * c))
    for _ in range(60):
        step = (_exp_excess(zeta) - c) / expm1(zeta)
        zeta -= step
        if abs(step) <= 1e-15 * zeta:
            break
    return zeta


def _exp_excess(zeta: float) -> float:
    """exp(zeta) - 1 - zeta."""
    if zeta > 0.01:
        return expm1(zeta) - zeta
    return zeta * zeta / 2.0 * (1.0 + zeta / 3.0 * (1.0 + zeta / 4.0 * (1.0 + zeta / 5.0 * (1.0 + zeta / 6.0))))


def overhead_ratio(*, hazard: float, prefill_overhead_s: float, decode_overhead_s: float) -> float:
    """c = -ln(1 - p0) * alpha_p / alpha_d; the paper's p0*alpha_p/alpha_d is its limit for small p0 (ERRATA 3.2).

    Raises:
        InputError: hazard is outside (0, 1) or an overhead is not positive.
    """
    _require_hazard(hazard)
    check_positive(prefill_overhead_s=prefill_overhead_s, decode_overhead_s=decode_overhead_s)
    return -log1p(-hazard) * prefill_overhead_s / decode_overhead_s


def phase_threshold_ifr(theta0: float, *, hazard: float, hazard_slope: float, decode_cost_ratio: float) -> float:
    """theta0 + delta theta: the paper's first-order correction for a hazard p0 + eta*t, kept for comparison only.

        delta = eta (1-theta0)^2 / (p0^2 theta0)
                * [zeta (theta0/(1-theta0) - zeta/2) + (beta_d N / alpha_d) (zeta - theta0)]

    Right as algebra, wrong as a model: t is the time since the phase began, while most slots carry older requests over
    (ERRATA 3.3). A negative slope counts as 0 (3.5) and the sum is cut at 1, where the first-order term is past use.

    Args:
        theta0: from ``phase_threshold``, in (0, 1).
        hazard, hazard_slope: p0 per token and eta per token squared.
        decode_cost_ratio: beta_d * N / alpha_d, >= 0.

    Raises:
        InputError: an argument is outside its domain.
    """
    _require_hazard(hazard)
    if not 0.0 < theta0 < 1.0 or not decode_cost_ratio >= 0.0:
        raise InputError(f"need 0 < theta0 < 1 and decode_cost_ratio >= 0, got {theta0}, {decode_cost_ratio}")
    zeta = -log1p(-theta0)
    bracket = zeta * (theta0 / (1.0 - theta0) - zeta / 2.0) + decode_cost_ratio * (zeta - theta0)
    delta = max(0.0, hazard_slope) * (1.0 - theta0) ** 2 / (hazard**2 * theta0) * bracket
    return min(1.0, theta0 + delta)


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
        max_refill: most requests per refill, or None.

    Raises:
        InputError: a value is not positive.
    """

    slots: int
    mean_prompt_tokens: float
    max_batch_tokens: int
    max_refill: int | None = None

    def __post_init__(self) -> None:
        check_positive(
            slots=self.slots, mean_prompt_tokens=self.mean_prompt_tokens, max_batch_tokens=self.max_batch_tokens
        )
        if self.max_refill is not None and self.max_refill < 1:
            raise InputError(f"max_refill must be at least 1, got {self.max_refill}")

    def prefill_steps(self, requests: ArrayLike) -> FloatArray:
        """Steps that a refill of so many requests takes, for any shape."""
        tokens = np.asarray(requests, dtype=np.float64) * self.mean_prompt_tokens
        return np.asarray(np.maximum(1.0, np.ceil(tokens / self.max_batch_tokens - 1e-9)))


def best_phase_steps(
    output_lengths: ArrayLike,
    prefill_overhead_s: float,
    decode_overhead_s: float,
    limits: RefillLimits | None = None,
) -> PhaseLength:
    """The integer T that minimises (alpha_p*m + alpha_d*T) * E[ceil(O/T)] (ERRATA 3.4), for any length law.

    m is 1 without ``limits`` and otherwise the number of prefill steps a refill takes; with limits, T is also chosen
    among those whose refill holds at least one request and at most ``max_refill``, as far as there are any.

    Args:
        output_lengths: sample of O, shape (n,), integers >= 1.

    Raises:
        InputError: the sample is empty or holds a length below 1, or an overhead is not positive.
    """
    lengths = np.asarray(output_lengths, dtype=np.int64)
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
        raise InputError("output_lengths must be a non-empty list of lengths >= 1")
    ended = np.cumsum(np.bincount(lengths))
    return best_phase_of_survival(1.0 - ended / len(lengths), prefill_overhead_s, decode_overhead_s, limits)


def best_phase_of_survival(
    survival: FloatArray,
    prefill_overhead_s: float,
    decode_overhead_s: float,
    limits: RefillLimits | None = None,
    *,
    thinned: bool = False,
) -> PhaseLength:
    """``best_phase_steps`` from P(O > t), t = 0, 1, ..., shape (longest + 1,), survival[0] = 1.

    Args:
        thinned: look at every T up to 64 and then in steps of 5 %, for use while serving; the optimum is flat.
    """
    check_positive(prefill_overhead_s=prefill_overhead_s, decode_overhead_s=decode_overhead_s)
    steps = _candidates(_longest_useful(survival, prefill_overhead_s, decode_overhead_s), thinned)
    renewals = _renewals(survival, steps)
    if limits:
        refill = limits.slots / renewals
        prefill_s = np.where(_feasible(refill, limits), prefill_overhead_s * limits.prefill_steps(refill), inf)
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


def _feasible(refill: FloatArray, limits: RefillLimits) -> BoolArray:
    """Refills of 1 to max_refill requests; the smallest one when all are larger, all when none reaches 1."""
    wanted = refill >= 1.0
    if limits.max_refill is not None:
        wanted &= refill <= limits.max_refill
    if wanted.any():
        return wanted
    nearest = refill.min() if refill.min() > 1.0 else refill.max()
    return np.asarray(refill == nearest)


def refill_cap(
    prefill: StepCoefficients, *, mean_prompt_tokens: float, max_batch_tokens: int, itl_budget_s: float
) -> int:
    """Most requests per refill whose prefill keeps the gap between two tokens of a running request in bounds.

        gap(k) = alpha_p * ceil(k*mu_L / budget) + beta_p * k * mu_L <= target (ERRATA 3.17); at least 1

    Raises:
        InputError: an argument is not positive.
    """
    check_positive(mean_prompt_tokens=mean_prompt_tokens, max_batch_tokens=max_batch_tokens, itl_budget_s=itl_budget_s)
    tokens = _tokens_within(prefill, max_batch_tokens, itl_budget_s)
    return max(1, floor(tokens / mean_prompt_tokens + 1e-9)) if isfinite(tokens) else 2**31 - 1


def _tokens_within(prefill: StepCoefficients, max_batch_tokens: int, target_s: float) -> float:
    """Most prefill tokens that run within target_s, in steps of at most max_batch_tokens."""
    full_s = prefill.overhead_s + prefill.prefill_s * max_batch_tokens
    if full_s <= 0.0:
        return inf
    whole = floor(target_s / full_s + 1e-9)
    rest_s = target_s - whole * full_s - prefill.overhead_s
    rest = min(rest_s / prefill.prefill_s, max_batch_tokens) if rest_s > 0.0 and prefill.prefill_s else 0.0
    return whole * max_batch_tokens + rest


def max_batch_size_exclusive(
    *,
    capacity_tokens: int,
    mean_prompt_tokens: float,
    std_prompt_tokens: float,
    hazard: float,
    threshold: float,
    overflow_probability: float,
) -> int:
    """N*, the most slots whose KV fits with the given probability under geometric lengths; 0 when not even one does.

        N D_peak + z sqrt(N (sigma_L^2 + zeta^2 (1-theta) / (p0 theta)^2)) <= C            (ERRATA 3.14)

    D = mu_L + (1-theta) zeta / (theta p0) is what a slot holds as a decode phase opens. During the phase it holds
    exp(-p0 t) (D + t), which peaks inside when p0 D < 1, i.e. for short prompts: D_peak.

    Args:
        std_prompt_tokens: sigma_L; pass 0 when prompts are all of one known length.
        threshold: theta, in (0, 1).

    Raises:
        InputError: an argument is outside its domain.
    """
    _require_hazard(hazard)
    check_positive(capacity_tokens=capacity_tokens, mean_prompt_tokens=mean_prompt_tokens)
    if not 0.0 < threshold < 1.0 or not std_prompt_tokens >= 0.0:
        raise InputError(f"need 0 < threshold < 1 and std_prompt_tokens >= 0, got {threshold}, {std_prompt_tokens}")
    zeta = -log1p(-threshold)
    age_variance = zeta**2 * (1.0 - threshold) / (hazard * threshold) ** 2
    peak = _peak_tokens(mean_prompt_tokens + (1.0 - threshold) * zeta / (threshold * hazard), hazard, zeta)
    std = sqrt(std_prompt_tokens**2 + age_variance)
    return memory_safe_batch_size(capacity_tokens, peak, std, overflow_probability)


def _peak_tokens(opening_tokens: float, hazard: float, zeta: float) -> float:
    at = min(max(0.0, 1.0 / hazard - opening_tokens), zeta / hazard)
    return exp(-hazard * at) * (opening_tokens + at)


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


def mixed_throughput(times: StepTimes, means: WorkloadMeans, *, slots: float) -> float:
    """Tokens (input + output) per second of mixed batching with a full batch and an endless queue.

    A request takes 1 + mu_O iterations, its prompt in one of them (ERRATA 3.15):

        (mu_L + mu_O) / (alpha_MB (1 + mu_O) / N + beta_MB(r) (mu_L + mu_O))

    Raises:
        InputError: slots is not positive.
    """
    check_positive(slots=slots)
    per_token_s = seconds_per_token(
        times.mixed, decode_fraction=means.decode_fraction, context_tokens=means.context_tokens
    )
    fixed_s = times.mixed.overhead_s * (1.0 + means.output_tokens) / slots
    return 1.0 / (fixed_s / means.total_tokens + per_token_s)


def mixed_steps_throughput(times: StepTimes, means: WorkloadMeans, *, slots: float) -> float:
    """As ``mixed_throughput``, but with steps that happen to hold no prefill costed as the decode steps they are.

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


def crossover_margin(
    times: StepTimes,
    means: WorkloadMeans,
    *,
    slots: float,
    refill: float,
    phase_steps: float,
    prefill_steps: float = 1.0,
) -> float:
    """What a token costs more in mixed than in exclusive batching, s per token; mixed wins when it is negative.

    003's eq. 8 with both sides brought together: left side minus right side. ``slots`` follows the occupancy observed,
    and so must ``refill`` (ERRATA 3.11).
    """
    exclusive = exclusive_throughput(times, means, refill=refill, phase_steps=phase_steps, prefill_steps=prefill_steps)
    return 1.0 / mixed_throughput(times, means, slots=slots) - 1.0 / exclusive


def _require_hazard(hazard: float) -> None:
    if not 0.0 < hazard < 1.0:
        raise InputError(f"hazard must be in (0, 1), got {hazard}")
