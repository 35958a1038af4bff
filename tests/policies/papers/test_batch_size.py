"""Batch sizes by memory and latency: 001's equations, their corrected algorithms, and what the printed ones do."""

from math import floor, hypot, sqrt
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.engine.stock import Stock
from policies.errors import ConfigError, InputError
from policies.papers.chunk_size import ChunkSize, ChunkSizeConfig
from policies.papers.memory_aware import (
    MemoryAware,
    MemoryAwareConfig,
    linear_batch_size,
    memory_safe_batch_size,
    safety_buffer_tokens,
)
from policies.papers.sla_constrained import SlaConstrained, SlaConstrainedConfig
from policies.papers.sla_constrained_literal import SlaConstrainedLiteral, SlaConstrainedLiteralConfig
from policies.papers.smallest import Smallest
from policies.types import (
    BatchState,
    FinishedRequest,
    Limit,
    Phase,
    RunningRequests,
    StepCoefficients,
    StepPlan,
    StepResult,
    StepTimes,
)
from tests.policies.states import answers_of, batch_of, queue_of, result_of, state_of
from tests.toy_engine import ToyEngine, random_jobs, run_closed

# 001, Fig. 3: decode latency 26.92 ms + 0.2308 ms per request.
SEED_BASE_S, SEED_SLOPE_S = 0.02692, 0.0002308
SEED_TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.005, prefill_s=2e-5),
    decode=StepCoefficients(overhead_s=SEED_BASE_S, decode_s=SEED_SLOPE_S),
    mixed=StepCoefficients(overhead_s=SEED_BASE_S, prefill_s=2e-5, decode_s=SEED_SLOPE_S),
)

# What those steps allow at 50 ms.
TARGET_BATCH = (0.05 - SEED_BASE_S) / SEED_SLOPE_S


def seed_latency_s(batch_size: float) -> float:
    return SEED_BASE_S + SEED_SLOPE_S * batch_size


def make_state(*, running: int = 0, waiting: int = 0, prompt_tokens: int = 100, **overrides: object) -> BatchState:
    running_requests = batch_of(decoding=running, prompt_tokens=prompt_tokens)
    state = {"running": running_requests, "waiting": queue_of(waiting, prompt_tokens), "total_blocks": 6250}
    return state_of(**{**state, **overrides})


def decode_result(*, step_s: float, batch: int, waiting: int = 1, finished: int = 0, output: int = 100) -> StepResult:
    return result_of(
        step_s=step_s,
        decode_requests=batch,
        waiting_count=waiting,
        finished=answers_of(*[output] * finished, prompt_tokens=100),
    )


class TestMemorySafeBatchSize:
    @pytest.mark.parametrize(
        ("std_tokens", "expected"),
        [
            (hypot(1109, 163), 58.9),  # Azure 2023 conversation trace, prompt variance in the margin
            (163.0, 71.0),  # the same with known prompts
        ],
    )
    def test_known_prompts_leave_the_margin_and_the_azure_batch_grows(self, std_tokens: float, expected: float) -> None:
        # Mean prompt 1155, mean output 211 tokens, capacity 100 000, 1 %: ERRATA 1.3 to 1 %.
        size = memory_safe_batch_size(100_000, 1155 + 211, std_tokens, 0.01)
        assert size == pytest.approx(expected, rel=0.02)
        assert size == floor(expected * 0.995)

    @given(
        capacity=st.integers(0, 10**7),
        mean=st.floats(1, 1e5),
        std=st.floats(0, 1e5),
        overflow=st.floats(1e-6, 0.5),
    )
    @settings(deadline=None)
    def test_it_is_the_largest_batch_whose_need_and_margin_fit(
        self, capacity: int, mean: float, std: float, overflow: float
    ) -> None:
        def need(batch: int) -> float:
            return mean * batch + NormalDist().inv_cdf(1 - overflow) * std * sqrt(batch)

        size = memory_safe_batch_size(capacity, mean, std, overflow)
        assert size == 0 or need(size) <= capacity * (1 + 1e-9) + 1e-6
        assert need(size + 1) > capacity * (1 - 1e-9)

    def test_totals_in_the_place_of_one_requests_moments_leave_no_batch_at_all(self) -> None:
        # As printed, mu_S and sigma_S are totals at the present batch of 100 (ERRATA 1.1).
        assert memory_safe_batch_size(100_000, 504.8, 420, 0.01) == 172
        assert memory_safe_batch_size(100_000, 504.8 * 100, 420 * 10, 0.01) == 1

    @pytest.mark.parametrize(("requests", "most"), [(8, 0.02), (20, 0.017), (168, 0.014)])
    def test_gamma_lengths_overflow_about_as_often_as_asked(self, requests: int, most: float) -> None:
        # ERRATA 1.5: 1.1 to 1.2 % at a 1 % target with a coefficient of variation near 0.6; more for small batches.
        rng = np.random.default_rng(1)
        mean, cv = 500.0, 0.6
        capacity = mean * requests + NormalDist().inv_cdf(0.99) * mean * cv * requests**0.5
        assert memory_safe_batch_size(capacity, mean, mean * cv, 0.01) == requests
        totals = rng.gamma(requests / cv**2, mean * cv**2, 200_000)
        assert 0.009 < np.mean(totals > capacity) < most

    @pytest.mark.parametrize(
        "arguments", [(-1, 1, 1, 0.1), (1, 0, 1, 0.1), (1, 1, -1, 0.1), (1, 1, 1, 0.0), (1, 1, 1, 1.0)]
    )
    def test_values_out_of_domain_are_refused(self, arguments: tuple[float, float, float, float]) -> None:
        with pytest.raises(InputError):
            memory_safe_batch_size(*arguments)


class TestLinearForm:
    def test_iterating_the_buffer_at_the_previous_batch_converges_to_equation_12(self) -> None:
        # ERRATA 1.2: from 50: 184.4, 171.8, 172.7, 172.67, to one unit of the last digit.
        sizes, size = [], 50.0
        for _ in range(4):
            size = linear_batch_size(100_000, 504.8, safety_buffer_tokens(420, 0.01, size))
            sizes.append(size)
        assert sizes == pytest.approx([184.4, 171.8, 172.7, 172.67], abs=0.03)

    @given(capacity=st.floats(1e3, 1e7), mean=st.floats(10, 1e4), cv=st.floats(0, 3), overflow=st.floats(1e-4, 0.5))
    @settings(deadline=None)
    def test_with_the_buffer_of_equation_12_it_gives_equation_12(
        self, capacity: float, mean: float, cv: float, overflow: float
    ) -> None:
        exact = memory_safe_batch_size(capacity, mean, cv * mean, overflow)
        linear = linear_batch_size(capacity, mean, safety_buffer_tokens(cv * mean, overflow, exact))
        assert exact <= linear + 1e-6
        assert (
            linear_batch_size(capacity, mean, safety_buffer_tokens(cv * mean, overflow, exact + 1)) < exact + 1 + 1e-6
        )


class TestMemoryAware:
    def test_where_not_even_one_request_is_safe_it_says_so(self) -> None:
        wide = {"prior_output_tokens": 20_000, "prior_output_std_tokens": 60_000}
        safe, unsafe = (
            MemoryAware(MemoryAwareConfig(overflow_probability=chance, **wide))  # type: ignore[arg-type]
            for chance in (0.4, 1e-9)
        )
        plans = [policy.plan(make_state(waiting=256)) for policy in (safe, unsafe)]
        assert plans[0].max_batch_size > plans[1].max_batch_size == 1
        assert safe.out_of_reach is None
        assert unsafe.out_of_reach == (
            "not even one request is safe at overflow_probability 1e-09, so they run one at a time"
        )

    def test_the_first_wave_is_bounded_by_the_prior_and_not_by_the_slots(self) -> None:
        policy = MemoryAware(MemoryAwareConfig(prior_output_tokens=400, prior_output_std_tokens=420))
        plan = policy.plan(make_state(waiting=256))
        assert plan.max_batch_size == memory_safe_batch_size(100_000, 100 + 400 + 8, 420, 0.01)
        assert plan.limited_by is Limit.ALGORITHM_1 and plan.limited_by.is_memory
        assert plan.starts == plan.max_batch_size

    def test_a_young_batch_does_not_look_small(self) -> None:
        young = make_state(running=50, waiting=50)
        old = young._replace(running=RunningRequests.of(prompt_tokens=[100] * 50, output_tokens=[900] * 50))
        caps = []
        for state in (young, old):
            policy = MemoryAware(MemoryAwareConfig(min_samples=1))
            policy.observe(decode_result(step_s=0.01, batch=4, finished=5, output=1000))
            caps.append(policy.plan(state).max_batch_size)
        assert caps == [floor(100_000 / (100 + 1000 + 8))] * 2

    def test_answers_that_outgrow_the_prior_are_believed_before_any_has_ended(self) -> None:
        def cap(age: int) -> int:
            running = RunningRequests.of(prompt_tokens=[100] * 20, output_tokens=[age] * 20)
            policy = MemoryAware(MemoryAwareConfig(prior_output_tokens=200, prior_output_std_tokens=200))
            return policy.plan(make_state(waiting=200)._replace(running=running)).max_batch_size

        assert cap(2000) < 0.5 * cap(0)

    def test_the_cap_stays_while_nothing_waits_for_a_prefill(self) -> None:
        policy = MemoryAware(MemoryAwareConfig(min_samples=1))
        first = policy.plan(make_state(running=4, waiting=4)).max_batch_size
        policy.observe(decode_result(step_s=0.01, batch=4, finished=1, output=2000))
        assert policy.plan(make_state(running=4)).max_batch_size == first
        assert policy.plan(make_state(running=4, waiting=4)).max_batch_size < first

    def test_it_never_asks_for_less_than_what_decodes(self) -> None:
        policy = MemoryAware(MemoryAwareConfig(prior_output_tokens=5000))
        plan = policy.plan(make_state(running=60, waiting=10))
        assert (plan.max_batch_size, plan.starts) == (60, 0)

    def test_known_prompts_take_the_prompts_spread_out_of_the_cap(self) -> None:
        def cap(known_prompts: bool) -> int:
            policy = MemoryAware(MemoryAwareConfig(min_samples=2, known_prompts=known_prompts))
            spread = tuple(FinishedRequest(prompt_tokens=p, output_tokens=200) for p in (100, 1900) * 10)
            policy.observe(decode_result(step_s=0.01, batch=4)._replace(finished=spread))
            return policy.plan(make_state(running=4, waiting=4, prompt_tokens=1000)).max_batch_size

        assert cap(known_prompts=True) == floor(100_000 / (1000 + 200 + 8))
        assert cap(known_prompts=False) < cap(known_prompts=True)

    def test_the_resident_basis_is_the_smaller_one_for_outputs_more_variable_than_geometric_ones(self) -> None:
        def cap(basis: str) -> int:
            policy = MemoryAware(MemoryAwareConfig(min_samples=2, known_prompts=False, basis=basis))  # type: ignore[arg-type]
            outputs = (10,) * 95 + (2000,) * 5  # coefficient of variation 4
            mixed = tuple(FinishedRequest(prompt_tokens=100, output_tokens=o) for o in outputs)
            policy.observe(decode_result(step_s=0.01, batch=4)._replace(finished=mixed))
            return policy.plan(make_state(running=4, waiting=4)).max_batch_size

        assert cap("resident") < cap("final")

    def test_the_linear_form_follows_the_exact_one(self) -> None:
        caps = {}
        for form in ("exact", "linear"):
            policy = MemoryAware(MemoryAwareConfig(form=form))
            caps[form] = policy.plan(make_state(running=1, waiting=300)).max_batch_size
        assert abs(caps["exact"] - caps["linear"]) <= 1

    @pytest.mark.slow
    def test_it_prevents_most_of_the_preemptions_of_a_batch_that_fills_its_slots(self) -> None:
        def preemptions(policy: Stock | MemoryAware) -> int:
            jobs = random_jobs(200, prompt=(50, 150), mean_output=150, seed=2)
            return run_closed(ToyEngine(policy, SEED_TIMES, slots=64, total_blocks=400), jobs, 128).preemptions

        stock = preemptions(Stock())
        aware = preemptions(MemoryAware(MemoryAwareConfig(prior_output_tokens=150, prior_output_std_tokens=150)))
        assert stock > 20
        assert aware <= stock // 4

    def test_bounds_out_of_order_are_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match="max_batch_size must not be below min_batch_size"):
            MemoryAwareConfig(min_batch_size=8, max_batch_size=4)


def drive_literal(policy: SlaConstrainedLiteral, updates: int, batch: float | None = None) -> list[int]:
    sizes = []
    for _ in range(updates):
        used = policy.limit if batch is None else batch
        policy.update(seed_latency_s(used), used)
        sizes.append(policy.limit)
    return sizes


class TestSlaConstrainedLiteral:
    def test_it_stays_half_an_alpha_below_the_upper_bound_for_ever(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=1.0, max_batch_size=512, alpha=16))
        assert max(drive_literal(policy, 200)) == 504

    def test_it_stays_half_an_alpha_above_the_lower_bound_while_it_violates(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=0.001, tolerance_s=1e-4))
        assert min(drive_literal(policy, 200)) == 9

    def test_its_bounds_cross_after_a_small_batch_on_target(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=0.05, min_batch_size=32))
        policy.update(0.05, 5)
        assert (policy.low, policy.high, policy.limit) == (32, 13, 22)

    def test_it_stops_admission_when_the_bounds_are_closer_than_alpha(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=0.05, max_batch_size=8, alpha=16))
        policy.update(0.01, 1)
        assert policy.limit == 0
        assert policy.plan(make_state(waiting=1)).starts == 1

    def test_after_a_light_load_the_first_burst_runs_far_over_the_target(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=0.05))
        limit = drive_literal(policy, 50, batch=10)[-1]
        assert limit == 261
        assert seed_latency_s(limit) == pytest.approx(0.087, abs=5e-4)

    def test_after_an_upward_shift_it_falls_by_delta_per_update(self) -> None:
        policy = SlaConstrainedLiteral(SlaConstrainedLiteralConfig(itl_target_s=0.05, tolerance_s=0.001))
        drive_literal(policy, 30)
        violations = 0
        while seed_latency_s(policy.limit) + 0.017 > 0.051:
            policy.update(seed_latency_s(policy.limit) + 0.017, policy.limit)
            violations += 1
        assert violations >= 15


def drive(policy: SlaConstrained, updates: int, *, extra_s: float = 0.0, load: float = float("inf")) -> list[float]:
    """Latencies seen in each update window, the batch filled up to the limit or the load."""
    latencies = []
    for _ in range(updates):
        batch = int(min(policy.limit, load))
        latencies.append(seed_latency_s(batch) + extra_s)
        for _ in range(policy.config.window_steps):
            waiting = int(load > policy.limit)
            policy.observe(decode_result(step_s=latencies[-1], batch=batch, waiting=waiting))
    return latencies


class TestSlaConstrained:
    def test_it_reaches_both_of_its_bounds(self) -> None:
        loose = SlaConstrained(SlaConstrainedConfig(itl_target_s=1.0, max_batch_size=512))
        drive(loose, 60)
        assert loose.limit == 512
        tight = SlaConstrained(SlaConstrainedConfig(itl_target_s=seed_latency_s(3), min_batch_size=3))
        drive(tight, 60)
        assert 3 <= tight.limit < 10 and tight.out_of_reach is None

    def test_a_target_that_its_least_batch_misses_cuts_no_batch_and_is_told(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.001, min_batch_size=3))
        drive(policy, 30)
        assert policy.limit == policy.config.max_batch_size
        assert policy.out_of_reach == "a batch of 3 misses 0.001 s between tokens, so no batch is cut for it"
        assert Smallest(policy).out_of_reach == policy.out_of_reach

    def test_an_upward_shift_is_met_in_a_few_updates(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05))
        drive(policy, 20)
        before = policy.limit
        latencies = drive(policy, 12, extra_s=0.017)
        assert policy.limit < before / 2
        assert sum(latency > 0.052 for latency in latencies) <= 5

    def test_a_latency_on_target_below_the_limit_pulls_the_limit_down(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05, max_batch_size=400, search_width=16))
        drive(policy, 1, load=99)
        assert policy.limit <= 99 + 8 + 1

    def test_before_a_step_was_measured_nothing_is_cut(self) -> None:
        plan = SlaConstrained(SlaConstrainedConfig(itl_target_s=1e-3)).plan(make_state(waiting=300))
        assert (plan.max_batch_size, plan.limited_by) == (256, Limit.SLOTS)

    def test_after_an_early_spike_of_slow_steps_the_batch_grows_back(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05))
        drive(policy, 2, extra_s=0.5, load=32)
        assert policy.limit < 8
        drive(policy, 14)
        assert policy.limit == pytest.approx(TARGET_BATCH, abs=12)

    def test_prefill_steps_between_two_tokens_count_as_latency(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05, max_batch_size=64, window_steps=4))
        prefill = decode_result(step_s=0.06, batch=0)._replace(prefill_tokens=500, prefill_requests=1, running_count=65)
        for _ in range(4):
            policy.observe(prefill)
            policy.observe(decode_result(step_s=0.03, batch=64))
        assert policy.limit < 64

    def test_a_prefill_into_an_empty_engine_delays_nobodys_token(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05, window_steps=4))
        alone = decode_result(step_s=0.5, batch=0)._replace(prefill_tokens=5000, prefill_requests=64, running_count=64)
        for _ in range(4):
            policy.observe(alone)
            policy.observe(decode_result(step_s=0.03, batch=64))
        assert policy.limit >= 64

    def test_a_small_batch_beside_chunks_that_fill_steps_to_the_target_grows_back(self) -> None:
        """Counted, such steps show three requests to be just what the target allows, and so they stay three."""
        limits = {}
        for fused in (False, True):
            policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05, fused=fused))
            drive(policy, 2, extra_s=0.5, load=32)
            assert policy.limit < 8
            for step in range(6400):
                batch = min(policy.limit, 64)
                reads = 700 * bool(step % 32)
                step_s = 0.049 if reads else seed_latency_s(batch)
                policy.observe(decode_result(step_s=step_s, batch=batch)._replace(prefill_tokens=reads))
            limits[fused] = policy.limit
        assert limits[False] < 40 < 64 <= limits[True]

    def test_drafted_tokens_that_prove_right_shorten_the_time_between_tokens(self) -> None:
        policies = [SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05, window_steps=4)) for _ in range(2)]
        for policy, accepted in zip(policies, (0, 64), strict=True):
            for _ in range(4):
                policy.observe(decode_result(step_s=0.08, batch=64)._replace(accepted_tokens=accepted))
        assert policies[0].limit < 64 <= policies[1].limit

    @pytest.mark.long
    @pytest.mark.slow
    def test_an_engine_under_it_holds_the_mean_time_between_tokens(self) -> None:
        policy = SlaConstrained(SlaConstrainedConfig(itl_target_s=0.05))
        jobs = random_jobs(1500, prompt=(50, 150), mean_output=100, seed=4)
        engine = run_closed(ToyEngine(policy, SEED_TIMES, slots=512), jobs, 400)
        gaps = np.array([r.step_s for r in engine.results if r.decode_requests and r.waiting_count])[200:]
        assert gaps.mean() == pytest.approx(0.05, rel=0.06)


class TestChunkSize:
    MIXED = StepCoefficients(overhead_s=0.01, prefill_s=5e-5, decode_s=1e-4)

    def test_what_steps_take_too_long_while_a_batch_drains_is_not_the_chunks(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1))
        slow = decode_result(step_s=0.5, batch=200)._replace(prefill_tokens=500, max_batch_size=100)
        for _ in range(200):
            policy.observe(slow)
        assert policy.chunk_tokens == 512

    def drive(self, policy: ChunkSize, updates: int, decoding: int = 50) -> float:
        step_s = 0.0
        for _ in range(updates * policy.config.window_steps):
            chunk = policy.chunk_tokens
            step_s = self.MIXED.step_s(prefill_tokens=chunk, decode_requests=decoding)
            result = decode_result(step_s=step_s, batch=decoding)._replace(prefill_tokens=chunk, max_batch_size=512)
            policy.observe(result)
        return step_s

    def test_it_finds_the_chunk_that_fills_the_target(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1))
        assert self.drive(policy, 20) == pytest.approx(0.1, rel=0.04)

    def test_more_decodes_leave_less_to_the_prompts(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1))
        self.drive(policy, 20, decoding=50)
        before = policy.chunk_tokens
        assert self.drive(policy, 20, decoding=400) == pytest.approx(0.1, rel=0.04)
        assert policy.chunk_tokens < before

    def test_prompts_that_do_not_fill_the_chunk_do_not_raise_it(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1, initial_chunk_tokens=512))
        for _ in range(100):
            policy.observe(decode_result(step_s=0.02, batch=10)._replace(prefill_tokens=40))
        assert policy.chunk_tokens == 512

    def test_decodes_always_keep_their_place_in_the_budget(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1, initial_chunk_tokens=512))
        assert policy.plan(make_state(running=40, waiting=1)).budget(40) == 552

    def test_no_prompt_is_cut_where_nobody_decodes(self) -> None:
        policy = ChunkSize(ChunkSizeConfig(itl_target_s=0.1, initial_chunk_tokens=512))
        empty = make_state(running=0, waiting=1)
        assert policy.plan(empty).budget(0) == empty.max_batch_tokens > 512
        reading = RunningRequests.of(prompt_tokens=[9000], output_tokens=[0], prefill_tokens_left=[5000])
        assert policy.plan(empty._replace(running=reading)).budget(0) == empty.max_batch_tokens


class _Fixed:
    """A policy that always plans the same cap in the same phase."""

    def __init__(
        self,
        cap: int,
        limit: Limit,
        phase: Phase = Phase.MIXED,
        budget: int = 8192,
        chunk: int | None = None,
        kept: tuple[int, int] = (1, 0),
    ) -> None:
        """kept: steps and departures of its plans."""
        self.cap, self.limit, self.phase, self.budget, self.chunk = cap, limit, phase, budget, chunk
        self.kept = kept
        self.observed = 0

    def plan(self, state: BatchState) -> StepPlan:
        return StepPlan(
            phase=self.phase,
            max_batch_size=self.cap,
            limited_by=self.limit,
            max_batch_tokens=self.budget,
            max_prefill_tokens=self.chunk,
            starts=max(0, self.cap - state.running_count),
            steps=self.kept[0],
            departures=self.kept[1],
        )

    def observe(self, result: StepResult) -> None:
        self.observed += 1


class TestSmallest:
    def test_the_smallest_cap_counts_and_says_which_limit_it_was(self) -> None:
        policies = (_Fixed(40, Limit.MEMORY), _Fixed(12, Limit.SLA), _Fixed(30, Limit.SLOTS))
        plan = Smallest(*policies).plan(make_state(running=2, waiting=64))
        assert (plan.max_batch_size, plan.limited_by, plan.starts) == (12, Limit.SLA, 10)

    def test_a_plan_holds_for_as_long_as_every_part_of_it_does(self) -> None:
        parts = (_Fixed(40, Limit.MEMORY, kept=(4, 7)), _Fixed(64, Limit.SLOTS, kept=(16, 9)))
        plan = Smallest(*parts).plan(make_state(running=2, waiting=64))
        assert (plan.steps, plan.departures) == (4, 7)

    def test_every_policy_observes_every_step(self) -> None:
        policies = (_Fixed(40, Limit.MEMORY), _Fixed(12, Limit.SLA))
        Smallest(*policies).observe(decode_result(step_s=0.1, batch=1))
        assert [policy.observed for policy in policies] == [1, 1]

    def test_a_phase_opened_for_requests_that_a_later_cap_refuses_falls_back_to_decode(self) -> None:
        plan = Smallest(_Fixed(8, Limit.SLOTS, Phase.PREFILL), _Fixed(4, Limit.MEMORY)).plan(
            make_state(running=4, waiting=4)
        )
        assert (plan.phase, plan.starts) == (Phase.DECODE, 0)

    def test_the_budget_of_a_mixed_step_does_not_bind_a_prefill_phase(self) -> None:
        chunked, phased = _Fixed(64, Limit.SLOTS, budget=500, chunk=90), _Fixed(64, Limit.SLOTS, Phase.PREFILL)
        assert Smallest(chunked, phased).plan(make_state(waiting=4)).budget(10) == 8192
        mixed = Smallest(chunked, _Fixed(64, Limit.SLOTS)).plan(make_state(waiting=4))
        assert (mixed.budget(0), mixed.budget(10)) == (500, 100)

    def test_phases_wait_for_as_many_requests_as_memory_lets_in(self) -> None:
        phases = ExclusiveMixed(ExclusiveMixedConfig(mode="exclusive", initial_slots_fraction=8 / 20))
        composed = Smallest(_Fixed(20, Limit.MEMORY), phases)
        state = make_state(running=16, waiting=64)
        assert [composed.plan(state).phase for _ in range(3)][-1] is Phase.DECODE

    def test_without_a_policy_there_is_nothing_to_compose(self) -> None:
        with pytest.raises(InputError):
            Smallest()
