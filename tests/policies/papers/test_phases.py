"""003's own closed forms against independent arithmetic, published figures and a brute-force simulation of phases."""

from dataclasses import replace
from decimal import Decimal, getcontext
from math import exp, log, log1p

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.phases import (
    WorkloadMeans,
    best_phase_of_survival,
    exclusive_throughput,
    exclusive_token_s,
    mixed_steps_throughput,
)
from policies.engine.stock import Stock
from policies.errors import InputError
from policies.lengths.statistics import LifeTable, length_grid, life_table
from policies.papers.phases import (
    crossover_margin,
    hazard_line,
    max_batch_size_exclusive,
    mixed_throughput,
    overhead_ratio,
    phase_threshold,
    phase_threshold_ifr,
)
from policies.types import IntArray, StepCoefficients, StepTimes
from tests.policies.phase_simulation import simulate_phases, survival_of
from tests.toy_engine import ToyEngine, random_jobs, run_closed

# EB+ calibration of Qwen3-8B on H200 (weifang231/eb-vllm, Apache-2.0): mixed cost per token a + b r + c r^2.
A, B, C = 2.493675e-05, 5.192856e-05, 1.477785e-05
H200 = StepTimes(
    prefill=StepCoefficients(overhead_s=0.00127859, prefill_s=2.485255e-05),
    decode=StepCoefficients(overhead_s=0.00892118, decode_s=4.586468e-05),
    mixed=StepCoefficients(overhead_s=0.0, prefill_s=A, decode_s=A + B + C, interference_s=-C),
)
HALF_AND_HALF = WorkloadMeans(prompt_tokens=512, output_tokens=512, context_tokens=512)


class TestPhaseThreshold:
    @pytest.mark.parametrize("c", [1e-9, 1e-7, 1e-5, 1e-3, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1e3])
    def test_it_is_the_root_of_the_papers_equation_in_50_digits(self, c: float) -> None:
        getcontext().prec = 50
        ratio = Decimal(c)
        low, high = Decimal(0), Decimal(1) - Decimal(10) ** -45
        for _ in range(160):
            middle = (low + high) / 2
            value = middle / (1 - middle) + (1 - middle).ln()
            low, high = (middle, high) if value < ratio else (low, middle)
        assert phase_threshold(c) == pytest.approx(float(low), rel=1e-12)

    @pytest.mark.parametrize(("hazard", "small", "exact"), [(0.1, 0.3405, 0.3472), (0.3, 0.497, 0.523)])
    def test_the_exact_ratio_differs_from_its_small_hazard_limit_as_computed(
        self, hazard: float, small: float, exact: float
    ) -> None:
        # ERRATA 3.2, equal overheads, to the digits given there.
        assert phase_threshold(hazard) == pytest.approx(small, abs=5e-4)
        ratio = overhead_ratio(hazard=hazard, prefill_overhead_s=1.0, decode_overhead_s=1.0)
        assert phase_threshold(ratio) == pytest.approx(exact, abs=5e-4)

    def test_for_small_ratios_it_is_the_square_root_of_twice_the_ratio(self) -> None:
        assert phase_threshold(1e-9) == pytest.approx((2e-9) ** 0.5, rel=1e-4)

    @given(c=st.floats(1e-9, 1e3), factor=st.floats(1.01, 10))
    @settings(deadline=None)
    def test_it_lies_between_0_and_1_and_rises_with_the_ratio(self, c: float, factor: float) -> None:
        assert 0 < phase_threshold(c) < phase_threshold(c * factor) < 1

    @pytest.mark.parametrize("c", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_ratio_without_a_root_is_refused(self, c: float) -> None:
        with pytest.raises(InputError):
            phase_threshold(c)


@pytest.mark.slow
class TestIfrCorrection:
    def test_it_is_the_papers_first_order_term(self) -> None:
        theta, p0, eta, cost = 0.2, 0.01, 1e-6, 0.5
        zeta = -log1p(-theta)
        bracket = zeta * (theta / (1 - theta) - zeta / 2) + cost * (zeta - theta)
        delta = eta * (1 - theta) ** 2 / (p0**2 * theta) * bracket
        found = phase_threshold_ifr(theta, hazard=p0, hazard_slope=eta, decode_cost_ratio=cost)
        assert found == pytest.approx(theta + delta)

    def test_a_falling_hazard_corrects_nothing(self) -> None:
        assert phase_threshold_ifr(0.2, hazard=0.01, hazard_slope=-1e-6, decode_cost_ratio=0.5) == 0.2

    def test_a_correction_past_its_use_is_cut_at_the_whole_batch(self) -> None:
        assert phase_threshold_ifr(0.2, hazard=1e-4, hazard_slope=1e-4, decode_cost_ratio=1.0) == 1.0

    @pytest.mark.long
    def test_the_exact_phase_beats_it_when_hazards_rise_steeply(self) -> None:
        # ERRATA 3.3: up to 5.8 % at eta = 10 p0^2, because t is not a request's own age.
        p0, eta, slots = 0.002, 10 * 0.002**2, 128
        ages = np.arange(1, 3000)
        survival = np.cumprod(1 - np.minimum(p0 + eta * ages, 1))
        lengths = 1 + np.searchsorted(-survival, -np.random.default_rng(2).random(20_000))
        prefill_s, decode_s, decode_per_request_s = 0.04, 0.01, 1e-4
        theta = phase_threshold(overhead_ratio(hazard=p0, prefill_overhead_s=prefill_s, decode_overhead_s=decode_s))
        cost = decode_per_request_s * slots / decode_s
        corrected = phase_threshold_ifr(theta, hazard=p0, hazard_slope=eta, decode_cost_ratio=cost)
        # The shortest phase that frees that share of the batch, in the same simulation.
        phases = (simulate_phases(lengths, slots, t, prefill_s, decode_s) for t in range(2, 1000, 4))
        literal = next(cycle for cycle in phases if cycle.requests >= min(corrected, 0.999) * slots)
        exact = simulate_phases(
            lengths, slots, best_phase_of_survival(survival_of(lengths), prefill_s, decode_s).steps, prefill_s, decode_s
        )
        assert exact.seconds / exact.requests < 0.97 * literal.seconds / literal.requests


def slots_overflowing(slots: int, capacity: int, prompt: float, std: float, hazard: float, theta: float) -> float:
    """Share of decode steps in which refilling at every theta*slots completions overflows the capacity."""
    rng = np.random.default_rng(7)
    prompts = np.maximum(1, rng.normal(prompt, std, slots))
    ages = rng.geometric(hazard, slots).astype(float)
    alive = np.ones(slots, dtype=bool)
    over = 0
    for step in range(-1000, 12_000):
        if slots - alive.sum() >= theta * slots:
            fresh = ~alive
            prompts[fresh], ages[fresh] = np.maximum(1, rng.normal(prompt, std, fresh.sum())), 0.0
            alive[:] = True
        ages += 1
        over += step >= 0 and (prompts + ages)[alive].sum() > capacity
        alive &= rng.random(slots) >= hazard
    return over / 12_000


class TestMaxBatchSizeExclusive:
    @pytest.mark.parametrize(("prompt", "std", "theta"), [(400.0, 150.0, 0.1), (20.0, 5.0, 0.1), (20.0, 5.0, 0.4)])
    def test_its_batch_overflows_no_more_often_than_asked(self, prompt: float, std: float, theta: float) -> None:
        # ERRATA 3.14 measured 0.0 to 0.7 % at a target of 1 %.
        slots = max_batch_size_exclusive(
            capacity_tokens=30_000,
            mean_prompt_tokens=prompt,
            std_prompt_tokens=std,
            hazard=1 / 200,
            threshold=theta,
            overflow_probability=0.01,
        )
        assert slots_overflowing(slots, 30_000, prompt, std, 1 / 200, theta) <= 0.015
        assert slots_overflowing(round(1.3 * slots), 30_000, prompt, std, 1 / 200, theta) > 0.05

    def test_short_prompts_peak_inside_the_decode_phase(self) -> None:
        # One slot, no margin: exp(-p0 t)(D + t) at t = 1/p0 - D, for D = 1 + 50 < 1/p0 = 100.
        hazard, theta = 0.01, 1 - exp(-1.0)
        opening = 1 + (1 - theta) / (theta * hazard)
        peak = exp(-(1 - hazard * opening)) / hazard
        assert opening < peak
        found = max_batch_size_exclusive(
            capacity_tokens=round(1000 * peak),
            mean_prompt_tokens=1,
            std_prompt_tokens=0,
            hazard=hazard,
            threshold=theta,
            overflow_probability=0.5,
        )
        assert found == pytest.approx(1000, abs=1)


@pytest.mark.slow
class TestCrossover:
    @pytest.mark.parametrize(
        ("slots", "mixed_overhead_s", "ratio"),
        [(32, 0.0, 0.31), (32, 0.00127859, 0.42), (1024, 0.0, 1.37), (1024, 0.00127859, 1.39)],
    )
    def test_published_constants_give_the_ratios_worked_out_from_them(
        self, slots: int, mixed_overhead_s: float, ratio: float
    ) -> None:
        # ERRATA 3.12: H200, prompts and outputs of 512; the second overhead counts what the fit already holds.
        times = replace(H200, mixed=replace(H200.mixed, overhead_s=mixed_overhead_s))
        theta = phase_threshold(
            overhead_ratio(hazard=1 / 512, prefill_overhead_s=0.00127859, decode_overhead_s=0.00892118)
        )
        exclusive = exclusive_throughput(times, HALF_AND_HALF, refill=theta * slots, phase_steps=-log(1 - theta) * 512)
        assert exclusive / mixed_throughput(times, HALF_AND_HALF, slots=slots) == pytest.approx(ratio, abs=0.006)

    @given(
        slots=st.floats(1, 2000),
        share=st.floats(0.01, 0.9),
        prompt=st.floats(1, 5000),
        output=st.floats(2, 2000),
        overhead_s=st.floats(0, 0.05),
    )
    @settings(deadline=None)
    def test_the_margin_is_equation_8_and_its_sign_names_the_faster_mode(
        self, slots: float, share: float, prompt: float, output: float, overhead_s: float
    ) -> None:
        times = replace(H200, mixed=replace(H200.mixed, overhead_s=overhead_s))
        means = WorkloadMeans(prompt_tokens=prompt, output_tokens=output, context_tokens=prompt)
        refill, phase_steps = share * slots, -log(1 - share) * output
        r = output / (prompt + output)
        left = A + B * r + C * r * r - exclusive_token_s(times, means)
        right = (
            (times.prefill.overhead_s + times.decode.overhead_s * phase_steps) / refill
            - overhead_s * (1 + output) / slots
        ) / (prompt + output)
        margin = crossover_margin(times, means, slots=slots, refill=refill, phase_steps=phase_steps)
        assert margin == pytest.approx(left - right, rel=1e-6, abs=1e-12)
        mixed = mixed_throughput(times, means, slots=slots)
        exclusive = exclusive_throughput(times, means, refill=refill, phase_steps=phase_steps)
        assert (margin < 0) == (mixed > exclusive)

    def test_the_mixed_formula_matches_an_engine_that_mixes(self) -> None:
        # ERRATA 3.15. The engine's prefill emits the first token, so a request takes mean output iterations.
        times = StepTimes(
            prefill=StepCoefficients(overhead_s=0.01, prefill_s=2e-5),
            decode=StepCoefficients(overhead_s=0.01, decode_s=4e-5),
            mixed=StepCoefficients(overhead_s=0.01, prefill_s=2e-5, decode_s=4e-5),
        )
        jobs = random_jobs(2500, prompt=(100, 301), mean_output=50, seed=8)
        engine = run_closed(ToyEngine(Stock(), times, slots=64, max_batch_tokens=10**6), jobs, 200)
        full = [result for result in engine.results if result.waiting_count][20:]
        measured = sum(r.scheduled_tokens for r in full) / sum(r.step_s for r in full)
        prompt = float(np.mean([job.prompt_tokens for job in jobs]))
        output = float(np.mean([job.output_tokens for job in jobs])) - 1
        means = WorkloadMeans(prompt_tokens=prompt, output_tokens=output, context_tokens=1)
        assert measured == pytest.approx(mixed_throughput(times, means, slots=64), rel=0.01)

    @pytest.mark.long
    def test_steps_that_hold_no_prefill_are_costed_as_decode_steps(self) -> None:
        # Answers of 300 tokens in 32 slots: nine steps in ten of mixed batching are pure decodes.
        times = StepTimes(
            prefill=StepCoefficients(overhead_s=0.03, prefill_s=2e-5),
            decode=StepCoefficients(overhead_s=0.01, decode_s=4e-5),
            mixed=StepCoefficients(overhead_s=0.03, prefill_s=2e-5, decode_s=4e-5, interference_s=1e-4),
        )
        jobs = random_jobs(600, prompt=(100, 301), mean_output=300, seed=8)
        engine = run_closed(ToyEngine(Stock(), times, slots=32, max_batch_tokens=10**6), jobs, 100)
        full = [result for result in engine.results if result.waiting_count][20:]
        measured = sum(r.scheduled_tokens for r in full) / sum(r.step_s for r in full)
        prompt = float(np.mean([job.prompt_tokens for job in jobs]))
        output = float(np.mean([job.output_tokens for job in jobs])) - 1
        means = WorkloadMeans(prompt_tokens=prompt, output_tokens=output, context_tokens=1)
        assert measured == pytest.approx(mixed_steps_throughput(times, means, slots=32), rel=0.02)
        assert mixed_throughput(times, means, slots=32) < 0.6 * measured

    def test_a_batch_of_no_slots_is_refused(self) -> None:
        for throughput in (mixed_throughput, mixed_steps_throughput):
            with pytest.raises(InputError, match="slots"):
                throughput(H200, HALF_AND_HALF, slots=0)


def table_of(lengths: IntArray) -> LifeTable:
    return life_table(length_grid(4096), np.minimum(lengths, 4096), np.ones(len(lengths), dtype=bool))


class TestHazardLine:
    def test_a_line_is_recovered_from_an_increasing_hazard(self) -> None:
        ages = np.arange(1, 4097)
        survival = np.cumprod(1 - np.minimum(0.002 + 2e-5 * ages, 1))
        lengths = 1 + np.searchsorted(-survival, -np.random.default_rng(4).random(50_000))
        assert hazard_line(table_of(lengths)) == pytest.approx((0.002, 2e-5), rel=0.1)

    def test_a_falling_hazard_and_an_intercept_below_zero_count_as_constant(self) -> None:
        # Uniform 150 to 250: the fit's intercept is negative (ERRATA 3.6).
        falling = np.maximum(1, np.random.default_rng(5).lognormal(3, 1.5, 5000)).astype(np.int64)
        for lengths in (falling, np.random.default_rng(6).integers(150, 251, 5000), np.full(9, 7)):
            table = table_of(lengths)
            assert hazard_line(table) == (table.constant_hazard(), 0.0)

    def test_before_the_first_end_there_is_none(self) -> None:
        assert hazard_line(life_table(length_grid(100), [10], [False])) is None
