"""003's own closed forms of exclusive batching: theta0, the IFR correction, N* and the throughput crossover (eq. 8).

Source: 003 (EB+). What serves by default is in ``policies.engine.phases``. Departures, with the numbers of ERRATA:

* theta0 is kept by name, and so is the IFR correction, which loses up to 9.7 % because it takes the time since the
  phase began for a request's age (3.3).
* N* follows the peak of the tokens held and the full variance (3.14): the published forms overflow in up to 29 % of
  the steps at a 1 % target.

Symbols: as in ``policies.engine.phases``; theta refill share, zeta = -ln(1 - theta), p0 hazard per token.
"""

from math import exp, expm1, log1p, sqrt

import numpy as np

from policies.checks import check_positive
from policies.engine.phases import (
    WorkloadMeans,
    exclusive_throughput,
)
from policies.errors import InputError
from policies.lengths.statistics import LifeTable
from policies.papers.memory_aware import memory_safe_batch_size
from policies.types import StepCoefficients, StepTimes


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


def hazard_line(table: LifeTable) -> tuple[float, float] | None:
    """(p0, eta) of h(t) = p0 + eta*t by weighted least squares on the cells' hazards, t at mid-cell; None before the
    first end.

    A cell's weight is its exposure, the inverse of the binomial variance h (1 - h) / n up to a common factor. A fit
    with p0 <= 0 or eta < 0 is replaced by the constant hazard (ERRATA 3.5, 3.6).
    """
    constant, seen = table.constant_hazard(), table.exposure > 0
    if constant is None:
        return None
    if np.count_nonzero(seen) < 2:
        return constant, 0.0
    age, weight = 0.5 * (table.edges[:-1] + table.edges[1:] + 1)[seen], np.sqrt(table.exposure[seen])
    eta, p0 = np.polyfit(age, table.ended[seen] / table.exposure[seen], deg=1, w=weight)
    return (float(p0), float(eta)) if p0 > 0.0 and eta > 0.0 else (constant, 0.0)


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


def seconds_per_token(form: StepCoefficients, *, decode_fraction: float, context_tokens: float) -> float:
    """Marginal cost of a token in a large step, s: 003's beta(r) with the context made explicit.

        beta(r) = prefill_s*(1-r) + (decode_s + kv_s*context)*r + interference_s*r*(1-r)

    Raises:
        InputError: decode_fraction is outside [0, 1].
    """
    r = decode_fraction
    if not 0.0 <= r <= 1.0:
        raise InputError(f"decode_fraction must be in [0, 1], got {r}")
    decode_s = form.decode_s + form.kv_s * context_tokens
    return form.prefill_s * (1.0 - r) + decode_s * r + form.interference_s * r * (1.0 - r)


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
