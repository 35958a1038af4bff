"""Forecast admission: what it admits on paper, and what it does to an engine with little KV cache."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.engine.forecast import ForecastAdmission, ForecastAdmissionConfig
from policies.engine.stock import Stock
from policies.errors import InputError
from policies.papers.memory_aware import MemoryAware, MemoryAwareConfig
from policies.types import (
    BatchPolicy,
    BatchState,
    Limit,
    RequestView,
    RunningRequests,
    StepCoefficients,
    StepTimes,
)
from tests.policies.states import answers_of, queue_of, result_of, state_of
from tests.toy_engine import Job, ToyEngine, random_jobs, run_closed

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.005, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=3e-5, kv_s=6e-8),
    mixed=StepCoefficients(overhead_s=0.01, prefill_s=5e-5, decode_s=3e-5, kv_s=6e-8),
)


def taught(lengths: list[int], class_index: int = 0, **settings: object) -> ForecastAdmission:
    """A policy that has seen these output lengths, unbiased unless told."""
    policy = ForecastAdmission(ForecastAdmissionConfig(**{"length_bias": 1.0, **settings}))  # type: ignore[arg-type]
    teach(policy, lengths, class_index)
    return policy


def teach(policy: ForecastAdmission, lengths: list[int], class_index: int = 0) -> None:
    for length in lengths:
        policy.observe(result_of(decode_requests=1, finished=answers_of(length, class_index=class_index)))


def make_state(
    *, ages: list[int], waiting: int, capacity: int, prompt: int = 100, class_index: int = 0, shared: int = 0
) -> BatchState:
    held = sum(ages) + len(ages) * prompt - shared
    running = RunningRequests.of(
        prompt_tokens=[prompt] * len(ages), output_tokens=ages, class_index=[class_index] * len(ages)
    )
    return state_of(
        running=running,
        waiting=queue_of(waiting, prompt, class_index=class_index),
        slots=1000,
        free_blocks=capacity - held,
        total_blocks=capacity,
        block_size=1,
    )


class TestOnPaper:
    def test_certain_lengths_fill_the_cache_exactly(self) -> None:
        # Outputs are 200 for sure: five new requests of prompt 100 peak together at 5 * 300 tokens.
        policy = taught([200] * 100)
        plan = policy.plan(make_state(ages=[], waiting=50, capacity=1520))
        assert (plan.starts, plan.limited_by) == (5, Limit.MEMORY)

    def test_who_takes_over_knows_the_last_answers_too(self) -> None:
        # Short answers were seen before; those of the last steps are long.
        state = make_state(ages=[], waiting=50, capacity=5000)
        old, twin = (taught([20] * 8 + [400] * 60) for _ in range(2))
        new = ForecastAdmission(old.config, old)
        short = taught([20] * 40)
        assert new.plan(state).starts == twin.plan(state).starts < short.plan(state).starts

    def test_a_cap_that_binds_stands_for_some_steps_and_departures(self) -> None:
        plan = taught([200] * 100).plan(make_state(ages=[10] * 200, waiting=60, capacity=60_000))
        assert (plan.max_batch_size, plan.starts, plan.steps, plan.departures) == (208, 8, 12, 7)

    def test_requests_about_to_end_make_room_for_new_ones(self) -> None:
        old = taught([200] * 100).plan(make_state(ages=[190] * 4, waiting=50, capacity=2400))
        young = taught([200] * 100).plan(make_state(ages=[10] * 4, waiting=50, capacity=2400))
        assert young.starts < old.starts

    @pytest.mark.parametrize(
        ("setting", "values"), [("overflow_probability", (0.3, 0.05, 0.001)), ("length_bias", (0.5, 1.0, 2.0))]
    )
    def test_a_smaller_chance_of_overflow_and_longer_laws_admit_less(
        self, setting: str, values: tuple[float, ...]
    ) -> None:
        lengths = np.random.default_rng(1).geometric(1 / 200, 300).tolist()
        state = make_state(ages=[50] * 20, waiting=60, capacity=9000)
        admitted = [taught(lengths, **{setting: value}).plan(state).starts for value in values]
        assert admitted[0] > admitted[1] > admitted[2]

    def test_each_class_has_its_own_law(self) -> None:
        def admitted(class_index: int) -> float:
            policy = taught([20] * 100, class_index=0, classes=2)
            teach(policy, [2000] * 100, class_index=1)
            return policy.plan(make_state(ages=[], waiting=60, capacity=6000, class_index=class_index)).starts

        assert admitted(0) > 4 * admitted(1)

    def test_a_class_without_samples_uses_the_law_of_all(self) -> None:
        policies = [taught([200] * 100, class_index=0, classes=2) for _ in range(2)]
        plans = [
            policy.plan(make_state(ages=[], waiting=60, capacity=6000, class_index=class_index))
            for class_index, policy in enumerate(policies)
        ]
        assert plans[0].starts == plans[1].starts < 60

    def test_without_samples_everybody_is_taken_to_live_a_little_longer(self) -> None:
        policy = ForecastAdmission(ForecastAdmissionConfig(), step_times=lambda: TIMES)
        state = make_state(ages=[40] * 4, waiting=200, capacity=4 * 164 + 20 * 124 + 100)
        plan = policy.plan(state)  # of half a token in a block of one, 24 are 12 more
        assert (plan.starts, plan.limited_by) == (20, Limit.MEMORY)
        room = make_state(ages=[], waiting=20, capacity=20_000)
        assert policy.plan(room).limited_by is Limit.SLOTS

    def test_it_does_not_go_beyond_the_forecast_before_it_is_known_what_a_prompt_costs(self) -> None:
        known: list[StepTimes] = []
        policy = ForecastAdmission(ForecastAdmissionConfig(), step_times=lambda: known[0] if known else None)
        teach(policy, [200] * 100)

        def serve(steps: int) -> float:
            for _ in range(steps):
                policy.plan(make_state(ages=[10] * 5, waiting=20, capacity=1500))
                policy.observe(result_of(decode_requests=1))
            return policy.overcommit.share

        assert serve(100) == 0.0
        known.append(TIMES)
        assert serve(32) > 0.0

    def test_blocks_shared_by_a_prefix_are_counted_once(self) -> None:
        apart = make_state(ages=[10] * 10, waiting=60, capacity=12_000, prompt=1000)
        shared = make_state(ages=[10] * 10, waiting=60, capacity=12_000, prompt=1000, shared=9000)
        apart_plan, shared_plan = (taught([200] * 100).plan(state) for state in (apart, shared))
        assert apart_plan.starts == 0
        assert shared_plan.starts > 0

    @given(
        lengths=st.lists(st.integers(1, 800), min_size=10, max_size=60),
        ages=st.lists(st.integers(0, 900), max_size=20),
        prompts=st.lists(st.integers(1, 2000), max_size=20),
        capacity=st.integers(2000, 60_000),
    )
    @example(lengths=[200] * 20, ages=[10] * 20, prompts=[], capacity=2600)
    @example(lengths=[200] * 20, ages=[10] * 4, prompts=[1500] * 16, capacity=9000)
    @example(lengths=[200] * 20, ages=[10] * 4, prompts=[500] * 16, capacity=20_000)
    @settings(deadline=None)
    def test_that_no_cap_binds_stands_whoever_comes(
        self, lengths: list[int], ages: list[int], prompts: list[int], capacity: int
    ) -> None:
        capacity += sum(ages) + 100 * len(ages)
        state = make_state(ages=ages, waiting=0, capacity=capacity)._replace(
            slots=20, max_batch_tokens=512, max_model_len=2800
        )
        steps = taught(lengths).plan(state).steps
        if steps == 1:
            return
        come, room = [], steps * 512
        for prompt in prompts[: state.free_slots]:
            if (room := room - prompt) >= 0:
                come.append(RequestView(request_id=f"c{len(come)}", arrival_s=0.0, prompt_tokens=prompt))
        later = taught(lengths).plan(state._replace(waiting=tuple(come), waiting_count=len(come)))
        assert later.limited_by is Limit.SLOTS

    def test_it_need_not_be_asked_for_each_step_where_the_forecast_has_room(self) -> None:
        # Twenty requests of 1999 tokens would not fit; but hardly one of them grows so long.
        lengths = [*[50] * 200, *[1900] * 2]
        state = make_state(ages=[10] * 15, waiting=0, capacity=20_000)._replace(
            slots=20, max_batch_tokens=512, max_model_len=2000
        )
        assert taught(lengths).plan(state).steps > 8
        assert taught(lengths).plan(state._replace(free_blocks=2000)).steps == 1

    def test_blocks_that_nobody_in_the_batch_holds_are_no_capacity(self) -> None:
        # As in the first test, but 600 tokens belong to sessions that wait for input.
        policy = taught([200] * 100)
        idle = make_state(ages=[], waiting=50, capacity=1520, shared=-600)
        assert policy.plan(idle).starts == 3

    def test_a_cache_that_came_before_its_request_starts_is_counted_once(self) -> None:
        policy = taught([200] * 100)
        cold = make_state(ages=[10] * 2, waiting=8, capacity=12_000, prompt=1000)
        loaded = cold._replace(
            waiting=tuple(request._replace(cached_tokens=1000) for request in cold.waiting),
            free_blocks=cold.free_blocks - 8 * 1000,
        )
        assert all(policy.plan(state).limited_by is Limit.SLOTS for state in (loaded, cold))

    def test_preemptions_before_any_length_is_known_are_not_laid_to_overcommit(self) -> None:
        policy = ForecastAdmission(ForecastAdmissionConfig(length_bias=1.0), step_times=lambda: TIMES)
        for _ in range(64):
            policy.observe(result_of(decode_requests=1, preempted=3, kv_tokens=500))
        teach(policy, [200] * 100)
        for _ in range(32):
            policy.plan(make_state(ages=[10] * 5, waiting=20, capacity=1500))
            policy.observe(result_of(decode_requests=1))
        assert policy.overcommit.share > 0.0

    def test_the_only_request_is_never_held_back(self) -> None:
        policy = taught([2000] * 100)
        assert policy.plan(make_state(ages=[], waiting=3, capacity=500)).starts == 1

    @pytest.mark.parametrize(("ages", "grows"), [((190,) * 5, False), ((10,) * 5, True)], ids=["cache", "forecast"])
    def test_it_goes_beyond_the_forecast_where_that_keeps_somebody_waiting(
        self, ages: tuple[int, ...], grows: bool
    ) -> None:
        # Old ones fill the cache and end before they grow much: nobody fits now, whatever is forecast.
        policy = ForecastAdmission(ForecastAdmissionConfig(length_bias=1.0), step_times=lambda: TIMES)
        teach(policy, [200] * 100)
        for _ in range(64):
            policy.plan(make_state(ages=list(ages), waiting=20, capacity=1500))
            policy.observe(result_of(decode_requests=1))
        assert (policy.overcommit.share > 0.0) == grows

    def test_it_stops_at_the_first_request_that_does_not_fit(self) -> None:
        policy = taught([200] * 100)
        state = make_state(ages=[], waiting=20, capacity=3000)
        waiting = list(state.waiting)
        waiting[2] = waiting[2]._replace(prompt_tokens=10_000)
        assert policy.plan(state._replace(waiting=tuple(waiting))).starts == 2

    def test_a_class_that_was_not_configured_is_named(self) -> None:
        policy = taught([200] * 100, classes=2)
        with pytest.raises(InputError, match="class_index must be below 2, got 5"):
            policy.plan(make_state(ages=[1], waiting=1, capacity=6000, class_index=5))

    @given(
        lengths=st.lists(st.integers(1, 3000), min_size=40, max_size=80),
        ages=st.lists(st.integers(0, 5000), max_size=30),
        capacity=st.integers(1000, 200_000),
    )
    @settings(deadline=None, max_examples=50)
    def test_a_larger_cache_never_admits_less(self, lengths: list[int], ages: list[int], capacity: int) -> None:
        def admitted(tokens: int) -> float:
            return taught(lengths).plan(make_state(ages=ages, waiting=40, capacity=tokens)).starts

        assert admitted(capacity) <= admitted(2 * capacity)

    @given(
        lengths=st.one_of(
            st.lists(st.integers(1, 2000), min_size=40, max_size=80),
            # Many answers of one length, as a limit on tokens makes them.
            st.lists(st.integers(20, 2000), min_size=2, max_size=3).flatmap(
                lambda values: st.lists(st.sampled_from(values), min_size=40, max_size=80)
            ),
        ),
        capacity=st.integers(2000, 50_000),
    )
    @settings(deadline=None, max_examples=30)
    def test_what_it_admits_satisfies_the_constraint_at_every_horizon(self, lengths: list[int], capacity: int) -> None:
        policy = taught(lengths)
        admitted = min(200, policy.plan(make_state(ages=[], waiting=200, capacity=capacity)).starts)
        outputs = np.array(lengths)
        for horizon in {0, *(length - 1 for length in lengths)}:
            alive = np.mean(outputs > horizon)
            held = 100 + horizon
            need = admitted * alive * held + 1.645 * held * np.sqrt(admitted * alive * (1 - alive))
            need = min(need, admitted * held)
            # A peak may lie between two horizons (25 % apart at a tenth of the grid, 10 % at its end) and in a cell of
            # 8 %; the worst of 1000 pairs of lengths was 1.20, and 1.12 with the default length_bias of 1.1.
            assert admitted == 1 or need <= 1.3 * capacity

    @pytest.mark.parametrize(("capacity", "by_moments"), [(3000, 7), (4800, 12), (16_000, 44)])
    def test_a_few_are_admitted_as_the_exact_chance_has_it(self, capacity: int, by_moments: int) -> None:
        # Mean and variance alone would put the load higher than it is if nobody ends.
        lengths = [int(length) for length in np.random.default_rng(1).geometric(1 / 64, size=400)]

        def overflows(requests: int) -> bool:
            for horizon in range(max(lengths)):
                alive, fitting = float(np.mean(np.array(lengths) > horizon)), capacity // (350 + horizon)
                chances = [
                    comb(requests, left) * alive**left * (1.0 - alive) ** (requests - left)
                    for left in range(fitting + 1, requests + 1)
                ]
                if sum(chances) > 0.05:
                    return True
            return False

        admitted = int(taught(lengths).plan(make_state(ages=[], waiting=200, capacity=capacity, prompt=350)).starts)
        assert admitted > by_moments
        assert not overflows(admitted) and overflows(admitted + 1)


def drifting_jobs() -> list[Job]:
    """Outputs of mean 100, then of mean 300."""
    first = random_jobs(300, prompt=(50, 150), mean_output=100, seed=5)
    second = random_jobs(300, prompt=(50, 150), mean_output=300, seed=6)
    return first + [replace(job, request_id=f"s{job.request_id}") for job in second]


def run(policy: BatchPolicy, jobs: list[Job], total_blocks: int = 700) -> ToyEngine:
    return run_closed(ToyEngine(policy, TIMES, slots=128, total_blocks=total_blocks), jobs, 200)


def fresh(jobs: list[Job]) -> list[Job]:
    return [replace(job) for job in jobs]


@pytest.mark.slow
class TestInAnEngine:
    @pytest.mark.long
    def test_it_preempts_seldom_and_is_faster_than_filling_the_slots_and_than_equation_12(self) -> None:
        jobs = random_jobs(600, prompt=(50, 150), mean_output=200, seed=3)
        forecast = run(ForecastAdmission(ForecastAdmissionConfig()), fresh(jobs))
        stock = run(Stock(), fresh(jobs))
        equation_12 = run(MemoryAware(MemoryAwareConfig()), fresh(jobs))
        assert forecast.preemptions < 0.06 * stock.preemptions
        assert forecast.now_s < 0.97 * stock.now_s
        assert forecast.now_s < 0.95 * equation_12.now_s

    @pytest.mark.long
    def test_it_follows_answers_that_grow_three_times_as_long(self) -> None:
        forecast = run(ForecastAdmission(ForecastAdmissionConfig()), drifting_jobs())
        stock = run(Stock(), drifting_jobs())
        assert forecast.finished == 600
        assert forecast.preemptions < 0.25 * stock.preemptions

    @pytest.mark.long
    @pytest.mark.parametrize("horizons", [10, 80])
    def test_a_coarse_grid_of_horizons_is_as_good_as_a_fine_one(self, horizons: int) -> None:
        jobs = random_jobs(300, prompt=(50, 150), mean_output=200, seed=3)
        default = run(ForecastAdmission(ForecastAdmissionConfig()), fresh(jobs)).now_s
        other = run(ForecastAdmission(ForecastAdmissionConfig(horizons=horizons)), fresh(jobs)).now_s
        assert other == pytest.approx(default, rel=0.02)
