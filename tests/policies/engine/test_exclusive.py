"""The phase controller: phases stay pure, refills come when due, nobody stalls, and the cheaper mode is found."""

import random

import numpy as np
import pytest

from policies.engine.exclusive import ExclusiveMixed, ExclusiveMixedConfig
from policies.engine.plans import STANDING_STEPS
from policies.engine.step_time import StepTimeConfig
from policies.papers.phases import overhead_ratio, phase_threshold
from policies.types import (
    FinishedRequest,
    Phase,
    StepCoefficients,
    StepResult,
    StepTimes,
)
from tests.policies.phased import Recorder, make_result, make_state, make_times, saturated, steady, tokens_per_s
from tests.policies.states import result_of
from tests.toy_engine import Job, ToyEngine, random_jobs, run_closed


def exclusive(times: StepTimes | None = None, **settings: object) -> ExclusiveMixed:
    config = {"mode": "exclusive", "step_times": StepTimeConfig(prior=times or make_times()), **settings}
    return ExclusiveMixed(ExclusiveMixedConfig(**config))  # type: ignore[arg-type]


@pytest.mark.slow
class TestPhases:
    def test_no_step_of_exclusive_batching_mixes_prefill_and_decode(self) -> None:
        engine = saturated(ToyEngine(exclusive(), make_times(), slots=32, total_blocks=300), count=200)
        assert engine.finished == 200
        assert engine.preemptions > 0
        assert all(not (result.prefill_tokens and result.decode_requests) for result in engine.results)

    def test_a_refill_takes_all_free_slots(self) -> None:
        engine = saturated(ToyEngine(exclusive(), make_times(), slots=64))
        refills = [r for r in steady(engine) if r.phase is Phase.PREFILL]
        assert len(refills) > 20
        assert all(result.running_count == 64 for result in refills)

    def test_the_refill_it_settles_on_is_the_share_of_the_exact_phase(self) -> None:
        policy = exclusive()
        engine = saturated(ToyEngine(policy, make_times(), slots=64))
        sizes = [r.prefill_requests for r in steady(engine) if r.phase is Phase.PREFILL]
        share = phase_threshold(overhead_ratio(hazard=0.01, prefill_overhead_s=0.04, decode_overhead_s=0.01))
        # Geometric lengths: theta0 is the optimum; several may end in the last step, so a little more.
        assert np.mean(sizes) == pytest.approx(64 * share, rel=0.12)

    def test_slots_that_come_free_in_a_refill_wait_for_the_next(self) -> None:
        policy = exclusive(initial_slots_fraction=8 / 64)
        assert policy.plan(make_state(decoding=40, waiting=30)).starts == 24
        # Of the 40 three have their last token in flight by now, of which no step has told yet.
        assert policy.plan(make_state(decoding=61, waiting=6, departed=3)).phase is Phase.DECODE

    def test_a_decode_phase_goes_on_while_few_slots_are_free(self) -> None:
        policy = exclusive(initial_slots_fraction=8 / 64)
        assert policy.plan(make_state(decoding=60, waiting=50)).phase is Phase.DECODE
        assert policy.plan(make_state(decoding=56, waiting=50)).phase is Phase.PREFILL

    def test_a_refill_that_is_due_starts_as_many_as_there_are_slots(self) -> None:
        policy = exclusive(initial_slots_fraction=8 / 64)
        plan = policy.plan(make_state(decoding=54, waiting=50))
        assert plan.starts == 10

    def test_a_lone_arrival_at_light_load_starts_at_once(self) -> None:
        policy = exclusive(initial_slots_fraction=16 / 64)
        assert policy.plan(make_state(decoding=3, waiting=1)).phase is Phase.PREFILL

    def test_with_nothing_to_decode_whatever_waits_is_prefilled(self) -> None:
        assert exclusive().plan(make_state(waiting=1)).starts == 1

    def test_an_exact_phase_ends_by_patience_when_arrivals_are_few(self) -> None:
        policy = exclusive(initial_phase_steps=10, initial_slots_fraction=0.5)
        state = make_state(decoding=40, waiting=2)
        phases = []
        for _ in range(20):
            phases.append(policy.plan(state).phase)
            policy.observe(make_result(phase=phases[-1], decodes=40))
        assert phases.index(Phase.PREFILL) == 15

    def test_a_phase_beyond_its_patience_ends_as_soon_as_somebody_leaves(self) -> None:
        policy = exclusive()
        for _ in range(60):  # the first phase is of 32 steps
            policy.plan(make_state(decoding=64))
            policy.observe(make_result(phase=Phase.DECODE, decodes=64))
        full = policy.plan(make_state(decoding=64, waiting=3))
        assert (full.phase, full.departures) == (Phase.DECODE, 0)
        assert policy.plan(make_state(decoding=63, waiting=3)).phase is Phase.PREFILL

    def test_a_prompt_cut_by_the_budget_is_finished_before_decoding_goes_on(self) -> None:
        policy = exclusive()
        policy.plan(make_state(waiting=4))
        plan = policy.plan(make_state(decoding=3, prefilling=1))
        assert (plan.phase, plan.starts) == (Phase.PREFILL, 0)

    def test_prompts_longer_than_the_budget_get_through_in_pure_phases(self) -> None:
        engine = ToyEngine(exclusive(), make_times(), slots=16, max_batch_tokens=64)
        saturated(engine, count=60, mean_output=20)
        assert engine.finished == 60
        assert all(not (result.prefill_tokens and result.decode_requests) for result in engine.results)

    def test_an_idle_engine_does_not_make_the_next_burst_wait(self) -> None:
        policy = exclusive()
        engine = ToyEngine(policy, make_times(), slots=64)
        saturated(engine, count=600)
        run_closed(engine, random_jobs(30, prompt=(50, 150), mean_output=100, seed=2), 1)
        engine.submit(Job(request_id="first", prompt_tokens=100, output_tokens=500))
        engine.step()
        engine.step()
        for index in range(40):
            engine.submit(Job(request_id=f"burst{index}", prompt_tokens=100, output_tokens=50))
        engine.step()
        assert len(engine.running) == 41


class TestMemoryGate:
    def test_only_prompts_that_fit_beside_a_block_per_running_request_are_started(self) -> None:
        policy = exclusive(initial_slots_fraction=2 / 64)
        # 44 free blocks, 30 kept for the running, 7 per prompt.
        assert policy.plan(make_state(decoding=30, waiting=30, free_blocks=44)).starts == 2

    def test_a_full_cache_leaves_the_phase_to_the_decodes(self) -> None:
        policy = exclusive(initial_slots_fraction=2 / 64)
        assert policy.plan(make_state(decoding=30, waiting=30, free_blocks=36)).phase is Phase.DECODE

    def test_an_empty_engine_starts_the_head_even_if_it_looks_too_large(self) -> None:
        assert exclusive().plan(make_state(waiting=3, free_blocks=2)).starts == 1


class TestAPrefillThatHeldNothing:
    def test_it_goes_back_to_decodes_for_a_while_and_tries_again(self) -> None:
        policy = exclusive(initial_slots_fraction=4 / 64)
        assert policy.plan(make_state(decoding=40, waiting=5)).phase is Phase.PREFILL
        policy.observe(make_result(phase=Phase.PREFILL))
        for _ in range(STANDING_STEPS):
            assert policy.plan(make_state(decoding=40, waiting=5)).phase is Phase.DECODE
            policy.observe(make_result(phase=Phase.DECODE, decodes=40))
        assert policy.plan(make_state(decoding=40, waiting=5)).phase is Phase.PREFILL

    def test_with_nothing_to_decode_it_is_tried_all_the_same(self) -> None:
        policy = exclusive(initial_slots_fraction=4 / 64)
        policy.observe(make_result(phase=Phase.PREFILL))
        assert policy.plan(make_state(waiting=5)).phase is Phase.PREFILL


class TestRules:
    def test_who_takes_over_knows_the_last_steps_too(self) -> None:
        config = ExclusiveMixedConfig(mode="exclusive")
        old, twin = ExclusiveMixed(config), ExclusiveMixed(config)
        for decodes in range(20, 40):
            for policy in (old, twin):
                policy.observe(make_result(phase=Phase.DECODE, decodes=decodes, finished=1))
        new = ExclusiveMixed(config, old)
        assert new.model.times() == twin.model.times() is not None
        laws = [policy.law() for policy in (new, twin)]
        assert laws[0] and laws[1] and laws[0].quantile(0.5) == laws[1].quantile(0.5)


def auto(prior: StepTimes | None = None, **settings: object) -> ExclusiveMixed:
    config = {"step_times": StepTimeConfig(prior=prior), **settings}
    return ExclusiveMixed(ExclusiveMixedConfig(**config))  # type: ignore[arg-type]


CONTENDED = make_times(prefill_overhead_s=0.01, interference_s=3e-4)
FREE = make_times(prefill_overhead_s=0.03)
SLOW = StepTimes(
    prefill=StepCoefficients(overhead_s=0.1, prefill_s=1e-4),
    decode=StepCoefficients(overhead_s=0.05, decode_s=1e-4),
    mixed=StepCoefficients(overhead_s=0.05, prefill_s=1e-4, decode_s=1e-4),
)


@pytest.mark.slow
class TestAuto:
    def test_it_takes_turns_where_mixing_is_dear(self) -> None:
        recorder = Recorder(auto(CONTENDED))
        saturated(ToyEngine(recorder, CONTENDED, slots=32), count=500)
        assert np.mean(recorder.modes[len(recorder.modes) // 3 : -300]) > 0.95

    @pytest.mark.parametrize("prior", [True, False])
    def test_it_mixes_where_mixing_is_free(self, prior: bool) -> None:
        recorder = Recorder(auto(FREE if prior else None))
        saturated(ToyEngine(recorder, FREE, slots=32), count=500)
        assert np.mean(recorder.modes[len(recorder.modes) // 3 : -300]) < 0.05

    def test_what_recomputing_costs_is_not_known_before_prompts_were_seen(self) -> None:
        policy = auto()
        for _ in range(32):
            policy.observe(make_result(phase=Phase.DECODE, decodes=8))
        assert policy.model.times() is not None
        assert policy.model.recompute_times() is None
        for _ in range(32):
            policy.observe(make_result(phase=Phase.MIXED, prefill_tokens=100, decodes=8))
        assert policy.model.recompute_times() == policy.model.times()
        assert auto(FREE).model.recompute_times() is not None

    def test_without_answers_that_end_it_stays_with_mixed_steps(self) -> None:
        recorder = Recorder(auto())
        engine = ToyEngine(recorder, FREE, slots=64)
        for number in range(640):
            if number % 10 == 0:
                engine.submit(Job(f"long-{number}", prompt_tokens=100, output_tokens=100_000))
            engine.step()
        assert not any(recorder.modes)
        assert {result.phase for result in engine.results[1:]} == {Phase.MIXED}

    @pytest.mark.long
    @pytest.mark.parametrize("times", [CONTENDED, FREE])
    def test_it_is_nearly_as_fast_as_the_better_of_the_two(self, times: StepTimes) -> None:
        speeds = [
            tokens_per_s(steady(saturated(ToyEngine(auto(times, mode=mode), times, slots=32), count=500)))
            for mode in ("exclusive", "mixed", "auto")
        ]
        assert speeds[2] > 0.97 * max(speeds[:2])

    @pytest.mark.long
    def test_it_takes_turns_where_that_wins_little(self) -> None:
        times = StepTimes(
            prefill=StepCoefficients(overhead_s=0.0024, prefill_s=2e-5),
            decode=StepCoefficients(overhead_s=0.006, decode_s=4e-5),
            mixed=StepCoefficients(overhead_s=0.006, prefill_s=2.12e-5, decode_s=4.24e-5),
        )
        recorder = Recorder(auto(times))
        jobs = random_jobs(2500, prompt=(200, 800), mean_output=80, seed=1)
        run_closed(ToyEngine(recorder, times, slots=96), jobs, 192)
        assert np.mean(recorder.modes[len(recorder.modes) // 2 : -300]) > 0.7

    def test_a_light_load_is_mixed_even_where_a_full_batch_takes_turns(self) -> None:
        recorder = Recorder(auto(CONTENDED))
        jobs = random_jobs(250, prompt=(50, 150), mean_output=60, seed=3)
        run_closed(ToyEngine(recorder, CONTENDED, slots=32), jobs, 3)
        assert np.mean(recorder.modes[len(recorder.modes) // 2 :]) < 0.1

    @pytest.mark.long
    @pytest.mark.parametrize(("times", "better"), [(FREE, False), (CONTENDED, True)])
    def test_bursts_that_run_dry_do_not_mislead_it(self, times: StepTimes, better: bool) -> None:
        """The last answers of a burst have the machine to themselves, which says nothing against the mode in use."""
        recorder = Recorder(auto(times))
        engine = ToyEngine(recorder, times, slots=32)
        for burst in range(8):
            run_closed(engine, random_jobs(300, prompt=(50, 150), mean_output=100, seed=burst), 64)
        busy = [mode for mode, result in zip(recorder.modes, engine.results, strict=True) if result.waiting_count]
        assert np.mean([mode is better for mode in busy[len(busy) // 4 :]]) > 0.9

    def test_between_two_equals_it_does_not_swing(self) -> None:
        times = make_times(prefill_overhead_s=0.01, interference_s=7e-5)
        recorder = Recorder(auto(times))
        saturated(ToyEngine(recorder, times, slots=32), count=700)
        assert recorder.switches <= 4

    def test_a_prior_that_flatters_exclusive_batching_is_found_out(self) -> None:
        # Mixing is said to be three times as dear as it is.
        recorder = Recorder(auto(make_times(prefill_overhead_s=0.03, interference_s=3e-4)))
        saturated(ToyEngine(recorder, FREE, slots=32), count=1200)
        assert np.mean(recorder.modes[-1500:-300]) < 0.5

    def test_a_slow_start_does_not_bind_it(self) -> None:
        class WarmingUp(ToyEngine):
            def step(self) -> StepResult:
                self.times = SLOW if len(self.results) < 80 else FREE
                return super().step()

        recorder = Recorder(auto())
        saturated(WarmingUp(recorder, FREE, slots=32), count=900)
        assert np.mean(recorder.modes[-1500:-300]) < 0.2

    @pytest.mark.long
    @pytest.mark.parametrize("factor", [1.3, 2.0])
    def test_spells_of_a_slow_machine_do_not_make_the_mode_in_use_look_dear(self, factor: float) -> None:
        times = make_times(prefill_overhead_s=0.015)
        slow = StepTimes(
            prefill=StepCoefficients(overhead_s=0.015 * factor, prefill_s=2e-5 * factor),
            decode=StepCoefficients(overhead_s=0.01 * factor, decode_s=3e-5 * factor),
            mixed=StepCoefficients(overhead_s=0.01 * factor, prefill_s=2e-5 * factor, decode_s=3e-5 * factor),
        )

        class Swinging(ToyEngine):
            def step(self) -> StepResult:
                steps = len(self.results)
                self.times = slow if steps >= 600 and steps // 300 % 2 == 0 else times
                return super().step()

        recorder = Recorder(auto())
        saturated(Swinging(recorder, times, slots=32), count=1500)
        assert sum(recorder.modes) < 0.03 * len(recorder.modes)

    def test_requests_that_end_while_nothing_is_computed_do_not_stop_it(self) -> None:
        """All are aborted at once, and what is left has to wait: steps without tokens until the next look."""
        policy = auto()
        saturated(ToyEngine(policy, FREE, slots=32), count=300)
        waiting = make_state(waiting=0, waiting_count=0, now_s=1e6)
        empty = result_of(now_s=1e6, step_s=0.0, phase=Phase.DECODE, waiting_count=1)
        aborted = FinishedRequest(prompt_tokens=10, output_tokens=5, aborted=True)
        for _ in range(3):
            for _ in range(1000):
                policy.plan(waiting)
                policy.observe(empty)
            policy.observe(empty._replace(finished=(aborted,) * 64))

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(4))
    def test_noise_in_which_tokens_cost_nothing_does_not_stop_it(self, seed: int) -> None:
        rng = random.Random(seed)

        class Noisy(ToyEngine):
            def step(self) -> StepResult:
                whatever = StepCoefficients(overhead_s=rng.expovariate(50.0))
                self.times = StepTimes(prefill=whatever, decode=whatever, mixed=whatever)
                return super().step()

        engine = saturated(Noisy(auto(), FREE, slots=8), count=300)
        assert len(engine.results) > 1000

    def test_a_named_mode_is_never_left(self) -> None:
        recorder = Recorder(auto(CONTENDED, mode="mixed"))
        saturated(ToyEngine(recorder, CONTENDED, slots=32), count=300)
        assert not any(recorder.modes)
