"""Whole runs: nothing is lost, nothing overflows, the same seed gives the same run, and closed forms are met."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.engine.forecast import ForecastAdmission
from policies.engine.step_time import StepTimeConfig
from policies.errors import ConfigError
from policies.gang.batches import GangConfig
from policies.router.multi_bin import MultiBinConfig
from policies.router.order import IdleOrder
from policies.router.promise import Promise
from policies.types import BatchState, StepCoefficients, StepPlan, StepResult, StepTimes
from simulator import cluster
from simulator.cluster import ClusterConfig, Run, run
from simulator.core import Event, EventLoop, Kind
from simulator.engine import Engine, EngineConfig
from simulator.fleet import AutoscaleConfig, Failure
from simulator.predictors import predicted
from simulator.requests import Request
from simulator.router import RouterConfig
from simulator.workload import Workload, length_law, poisson, synthetic
from tests.toy_engine import check_plan

pytestmark = pytest.mark.long

TIMES = StepTimes(
    prefill=StepCoefficients(overhead_s=0.004, prefill_s=5e-5),
    decode=StepCoefficients(overhead_s=0.01, decode_s=1e-4, kv_s=5e-8),
    mixed=StepCoefficients(overhead_s=0.012, prefill_s=5e-5, decode_s=1e-4, kv_s=5e-8),
)
SMALL = EngineConfig(slots=16, total_blocks=120, max_batch_tokens=512)
PRIOR = StepTimeConfig(prior=TIMES)
BATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("stock", {}),
    "memory_aware": ("memory_aware", {"min_samples": 4}),
    "memory_aware resident": ("memory_aware", {"basis": "resident", "min_samples": 4}),
    "sla_constrained": ("sla_constrained", {"itl_target_s": 0.03}),
    "sla_constrained_literal": ("sla_constrained_literal", {"itl_target_s": 0.03, "max_batch_size": 8}),
    "chunk_size": ("chunk_size", {"itl_target_s": 0.03}),
    "forecast_admission": ("forecast_admission", {"min_samples": 8, "classes": 3}),
    "exclusive": ("exclusive_mixed", {"mode": "exclusive", "step_times": PRIOR, "min_samples": 8, "replan_steps": 16}),
    "exclusive fixed": ("exclusive_mixed_literal", {"mode": "exclusive", "phase_rule": "fixed", "refill": 4}),
    "auto": ("auto", {"step_times": TIMES}),
}


def workload(
    count: int, rate: float, seed: int, prompt: str = "uniform:1:400", output: str = "exponential:60"
) -> Workload:
    rng = np.random.default_rng(seed)
    drawn = synthetic("drawn", length_law(prompt), length_law(output), count, rng)
    return predicted(drawn.arriving(poisson(rate, count, rng)), "noise:0.44", rng)


def small(batch: str, **changes: Any) -> ClusterConfig:
    kind, batch_settings = BATCHES[batch]
    bins = MultiBinConfig(bins=3, refit_every=16)
    router = RouterConfig(class_by_bin=True)
    given = {"replicas": 2, "bins": bins, "router": router, **changes}
    return ClusterConfig(times=TIMES, engine=SMALL, batch=kind, batch_settings=batch_settings, **given)


def history(result: Run) -> list[tuple[object, ...]]:
    return [
        (r.request_id, r.replica_id, r.started_s, r.first_token_s, r.finished_s, r.preemptions) for r in result.requests
    ]


def assert_all_served(result: Run) -> None:
    for request in result.requests:
        assert request.generated_tokens == request.output_tokens
        assert request.started_s is not None and request.first_token_s is not None and request.finished_s is not None
        assert request.arrival_s <= request.started_s < request.first_token_s <= request.finished_s


@pytest.mark.parametrize("batch", BATCHES)
def test_under_every_batch_policy_each_request_ends_once_with_all_its_tokens(batch: str) -> None:
    given_work = workload(300, 12.0, seed=1)
    result = run(small(batch), given_work)
    assert len(result.requests) + len(result.refused) == 300
    assert_all_served(result)
    decoded = sum(engine.totals.decode_tokens for engine in result.engines)
    prefills = sum(1 + request.preemptions for request in result.requests)
    # A prefill that was preempted before its end gave no token.
    assert 0 <= decoded + prefills - sum(r.output_tokens for r in result.requests) <= prefills - len(result.requests)


@pytest.mark.parametrize("order", ["shortest_first", "longest_first"])
def test_offline_work_waits_for_idle_capacity_and_starts_by_prompt_length(order: IdleOrder) -> None:
    """Slots are few, and what comes while they are taken is sorted: chat goes first, though both are promised much."""
    rng = np.random.default_rng(0)
    drawn = synthetic("drawn", length_law("uniform:1:400"), length_law("constant:20"), 120, rng)
    both = replace(drawn, arrival_s=np.zeros(120), slo_class=("chat", "nightly") * 60)
    router = RouterConfig(fills_idle={"nightly": order})
    engine = EngineConfig(slots=4, total_blocks=4000, ordered=True)
    targets = {"chat": Promise(ttft_s=1e6, tpot_s=1.0), "nightly": Promise(ttft_s=600.0, tpot_s=1.0)}
    result = run(ClusterConfig(times=TIMES, engine=engine, router=router, promises=targets), both)
    started = {name: [r for r in result.requests if r.slo_class == name and r.started_s] for name in targets}
    assert max(r.started_s or 0.0 for r in started["chat"]) <= min(r.started_s or 0.0 for r in started["nightly"])
    sign = -1 if order == "longest_first" else 1
    by_start = sorted(started["nightly"], key=lambda request: (request.started_s, sign * request.prompt_tokens))
    tokens = [request.prompt_tokens for request in by_start]
    assert tokens == sorted(tokens, reverse=order == "longest_first")


@settings(max_examples=40, deadline=None)
@given(
    batch=st.sampled_from(list(BATCHES)),
    slots=st.integers(1, 12),
    blocks=st.integers(40, 90),
    budget=st.integers(1, 300),
    rate=st.floats(1.0, 200.0),
    seed=st.integers(0, 2**16),
)
def test_cache_slots_and_budget_hold_at_every_step_and_every_plan_keeps_its_contract(
    batch: str, slots: int, blocks: int, budget: int, rate: float, seed: int
) -> None:
    config = small(batch, replicas=1)
    engine = EngineConfig(slots=slots, total_blocks=blocks, block_size=8, max_batch_tokens=budget)
    policy = _Watched(replace(config, engine=engine))
    ended: list[Request] = []

    def finished(now_s: float, engine: Engine, requests: list[Request]) -> Iterable[Event]:
        ended.extend(requests)
        return ()

    _serve(policy.engine(finished), workload(40, rate, seed, "uniform:1:200", "exponential:20"), blocks * 8)
    assert len(ended) == policy.submitted
    assert policy.states


class _Watched:
    """A batch policy that looks over another's shoulder."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config, self.inner = config, config.batch_policy()
        self.states = 0
        self.submitted = 0

    def engine(self, finished: Any) -> Engine:
        return Engine("watched", self.config.engine, self, TIMES, finished)

    def plan(self, state: BatchState) -> StepPlan:
        plan = self.inner.plan(state)
        check_plan(state, plan)
        assert 0 <= state.free_blocks <= state.total_blocks
        assert state.running_count <= self.config.engine.slots
        held = state.running.prompt_tokens + state.running.output_tokens - state.running.prefill_tokens_left
        assert state.total_blocks - state.free_blocks <= int(-(-held // state.block_size).sum()) + state.running_count
        self.states += 1
        self.plan_in_force = plan
        return plan

    def observe(self, result: StepResult) -> None:
        budget = self.plan_in_force.budget(result.decode_requests)
        assert result.scheduled_tokens <= budget <= self.config.engine.max_batch_tokens
        self.inner.observe(result)


def _serve(engine: Engine, given_work: Workload, capacity: int) -> None:
    watched = engine.policy
    assert isinstance(watched, _Watched)
    loop = EventLoop()
    for request in given_work.requests():
        if request.prompt_tokens + request.output_tokens <= capacity:
            watched.submitted += 1
            loop.add([Event(request.arrival_s, Kind.ARRIVAL, partial(engine.submit, request))])
    loop.run()


def test_what_does_not_fit_the_cache_is_refused_and_the_rest_served() -> None:
    given_work = workload(50, 5.0, seed=2, prompt="uniform:100:3000")
    result = run(small("stock"), given_work)
    capacity = SMALL.capacity_tokens
    assert result.refused and all(r.prompt_tokens + r.output_tokens > capacity for r in result.refused)
    assert_all_served(result)


def test_one_slot_and_constant_lengths_are_the_queue_m_d_1() -> None:
    """Mean wait rho / (2 (1 - rho)) service times (Pollaczek and Khinchine)."""
    steps = StepCoefficients(overhead_s=0.01)
    times = StepTimes(prefill=steps, decode=steps, mixed=steps)
    given_work = workload(15_000, 35.0, seed=3, prompt="constant:10", output="constant:2")
    config = ClusterConfig(times=times, engine=EngineConfig(slots=1))
    result = run(config, given_work)
    waits = [r.started_s - r.arrival_s for r in result.requests if r.started_s is not None]
    service_s, load = 0.02, 0.7
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)) * service_s, rel=0.06)


def test_a_full_batch_takes_a_prefill_step_and_then_a_decode_step_per_token() -> None:
    """16 equal requests at once: alpha_p + beta_p 16 P + sum over n of (alpha_d + 16 beta_d + kv 16 (P + n))."""
    given_work = workload(16, 1.0, seed=0, prompt="constant:30", output="constant:50").arriving(np.zeros(16))
    result = run(ClusterConfig(times=TIMES, engine=EngineConfig(slots=16)), given_work)
    steps = sum(0.01 + 16e-4 + 5e-8 * 16 * (30 + n) for n in range(1, 50))
    assert result.makespan_s == pytest.approx(0.004 + 5e-5 * 480 + steps)


def test_a_lost_replica_costs_time_but_no_request() -> None:
    given_work = workload(200, 10.0, seed=4)
    calm = run(small("stock"), given_work)
    hit = run(small("stock", failures=(Failure(replica=0, at_s=5.0, replaced_after_s=3.0),)), given_work)
    assert_all_served(hit)
    moved = [r for r in hit.requests if r.moves]
    assert moved and len(hit.engines) == 3
    assert hit.makespan_s >= calm.makespan_s


def test_what_a_lost_replica_held_counts_as_computed_anew() -> None:
    given_work = workload(8, 1000.0, seed=4, prompt="constant:100", output="constant:200")
    roomy = EngineConfig(slots=16, total_blocks=4000)
    config = ClusterConfig(times=TIMES, engine=roomy, failures=(Failure(replica=0, at_s=1.0, replaced_after_s=0.0),))
    result = run(config, given_work)
    assert_all_served(result)
    lost, new = (engine.totals.recomputed_tokens for engine in result.engines)
    assert 8 * 100 < lost < 8 * 300 and new == 0


def test_without_any_replica_left_requests_wait_for_the_next() -> None:
    given_work = workload(30, 10.0, seed=4)
    hit = run(small("stock", replicas=1, failures=(Failure(replica=0, at_s=1.0, replaced_after_s=30.0),)), given_work)
    assert_all_served(hit)
    assert min(r.finished_s for r in hit.requests if r.moves and r.finished_s is not None) > 31.0


def test_where_all_fit_a_plan_stands_for_many_steps_and_requests_fare_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that knows of no longest request, as one whose cache just holds it, plans each step anew."""
    given, planned, plan = workload(200, 12.0, seed=1), [0], ForecastAdmission.plan

    def counted(self: ForecastAdmission, state: BatchState) -> StepPlan:
        planned[0] += 1
        return plan(self, state)

    monkeypatch.setattr(ForecastAdmission, "plan", counted)

    def made(max_model_len: int | None) -> tuple[Run, float]:
        planned[0] = 0
        roomy = EngineConfig(slots=64, total_blocks=4000, max_batch_tokens=512, max_model_len=max_model_len)
        result = run(replace(small("forecast_admission", replicas=1), engine=roomy), given)
        return result, planned[0] / result.engines[0].totals.steps

    (by_workload, few), (by_cache, all_) = made(None), made(4000 * 16)
    assert few < 0.5 and all_ == 1.0
    assert history(by_workload) == history(by_cache)


def test_scaling_follows_the_load_and_pays_for_fewer_replicas_than_the_most() -> None:
    scale = AutoscaleConfig(
        max_replicas=4, slot_use=0.5, interval_s=2.0, start_s=4.0, upscale_delay_s=0.0, downscale_delay_s=6.0
    )
    result = run(small("stock", replicas=1, autoscale=scale), workload(600, 12.0, seed=5))
    assert_all_served(result)
    assert len(result.engines) > 1
    assert result.makespan_s < result.replica_s < 4 * result.makespan_s


def test_scaling_waits_until_more_have_been_wanted_for_a_while() -> None:
    """A burst of ten seconds moves nothing where the delay is longer."""
    burst = workload(100, 10.0, seed=5)

    def replicas(upscale_delay_s: float) -> int:
        scale = AutoscaleConfig(max_replicas=4, slot_use=0.5, start_s=1.0, upscale_delay_s=upscale_delay_s)
        return len(run(small("stock", replicas=1, autoscale=scale), burst).engines)

    assert replicas(2.0) > replicas(1000.0) == 1


def test_scaling_starts_no_second_replica_for_one_that_is_being_replaced() -> None:
    scale = AutoscaleConfig(min_replicas=2, max_replicas=2, interval_s=2.0, start_s=4.0, upscale_delay_s=0.0)
    failure = Failure(replica=0, at_s=5.0, replaced_after_s=10.0)
    result = run(small("stock", autoscale=scale, failures=(failure,)), workload(300, 10.0, seed=4))
    assert_all_served(result)
    assert len(result.engines) == 3


@pytest.mark.parametrize("batch", BATCHES)
def test_credit_by_what_is_unread_goes_with_every_batch_policy(batch: str) -> None:
    """One that does not know its pace offers its slots."""
    config = small(batch, router=RouterConfig(credit_s=0.5, class_by_bin=True))
    assert_all_served(run(config, workload(40, 12.0, seed=1)))


def test_scaling_down_keeps_those_that_serve_while_others_only_start() -> None:
    """A burst asks for three more that take long; it is over before they are there."""
    scale = AutoscaleConfig(
        max_replicas=4, slot_use=0.5, interval_s=2.0, start_s=500.0, upscale_delay_s=0.0, downscale_delay_s=6.0
    )
    burst = workload(60, 30.0, seed=5)
    rest = workload(40, 0.2, seed=6)
    arrivals = np.concatenate((burst.arrival_s, rest.arrival_s + 10.0))
    rng = np.random.default_rng(0)
    both = synthetic("both", length_law("uniform:1:400"), length_law("exponential:60"), 100, rng).arriving(arrivals)
    result = run(small("stock", replicas=1, autoscale=scale), predicted(both, "noise:0.44", rng))
    assert_all_served(result)
    assert max(request.ttft_s or 0.0 for request in result.requests[60:]) < 20.0, "somebody was always there"


def test_scaling_down_retires_nobody_for_a_replacement_that_is_under_way() -> None:
    scale = AutoscaleConfig(max_replicas=2, slot_use=0.05, interval_s=2.0, downscale_delay_s=4.0)
    failure = Failure(replica=0, at_s=1.0, replaced_after_s=1000.0)
    result = run(small("stock", replicas=3, autoscale=scale, failures=(failure,)), workload(300, 10.0, seed=4))
    assert_all_served(result)
    late = {request.replica_id for request in result.requests if request.arrival_s > 15.0}
    assert late == {"replica-1", "replica-2"}


def test_a_closed_loop_never_holds_more_than_its_clients() -> None:
    result = run(small("stock", clients=5), workload(100, 1.0, seed=6))
    assert_all_served(result)
    edges = sorted([(r.arrival_s, 1) for r in result.requests] + [(r.finished_s or 0.0, -1) for r in result.requests])
    assert max(np.cumsum([step for _, step in edges])) == 5


def test_a_replica_reserved_for_a_class_takes_no_other_and_neither_does_its_replacement() -> None:
    labels = tuple("chat" if n % 2 else "batch" for n in range(80))
    given_work = replace(workload(80, 5.0, seed=8), slo_class=labels)
    failures = tuple(Failure(replica=n, at_s=at_s, replaced_after_s=1.0) for n, at_s in ((0, 3.0), (2, 8.0)))
    reserved = (frozenset({"chat"}), None)
    result = run(small("stock", replica_classes=reserved, failures=failures), given_work)
    assert_all_served(result)
    served = {(r.replica_id, r.slo_class) for r in result.requests if r.replica_id != "replica-1"}
    assert served == {(f"replica-{n}", "chat") for n in (0, 2, 3)}


def test_a_cached_prefix_spares_its_prefill_and_still_takes_its_room() -> None:
    given_work = workload(40, 0.4, seed=9, prompt="constant:300")
    cached = replace(given_work, cached_tokens=np.full(40, 256))
    plain, reused = (run(small("stock", replicas=1), each) for each in (given_work, cached))
    assert sum(e.totals.prefill_tokens for e in plain.engines) == 40 * 300
    assert sum(e.totals.prefill_tokens for e in reused.engines) == 40 * 44
    assert reused.engines[0].totals.peak_blocks >= 300 // 16


def test_what_chunks_read_adds_up_to_half_the_square_of_the_prompt_and_takes_its_time() -> None:
    deep = replace(TIMES, prefill=replace(TIMES.prefill, prefill_kv_s=1e-6))
    given_work = workload(1, 1.0, seed=0, prompt="constant:300", output="constant:1")
    made = (
        run(ClusterConfig(times=times, engine=EngineConfig(max_batch_tokens=64)), given_work) for times in (TIMES, deep)
    )
    plain, slower = (result.requests[0].ttft_s for result in made)
    assert slower - plain == pytest.approx(1e-6 * 300 * 300 / 2)


def test_an_engine_starts_what_waits_by_promises_where_it_is_ordered() -> None:
    def first_of_chat(ordered: bool) -> int:
        router = RouterConfig(credit_lookahead=None)
        engine = EngineConfig(slots=1, total_blocks=400, ordered=ordered)
        promises = {"chat": Promise(ttft_s=0.5), "batch": Promise(ttft_s=60.0)}
        config = ClusterConfig(times=TIMES, engine=engine, router=router, promises=promises)
        mixed = replace(workload(4, rate=1000.0, seed=0), slo_class=("batch", "batch", "batch", "chat"))
        done = run(config, mixed).requests
        return sorted(done, key=lambda request: request.started_s or 0.0).index(done[3])

    assert (first_of_chat(ordered=False), first_of_chat(ordered=True)) == (3, 1)


def test_a_long_prompt_in_progress_lets_those_through_that_would_be_late_behind_it() -> None:
    """It takes 1.5 s by itself; short ones that come meanwhile are due within half a second."""
    engine = EngineConfig(slots=16, total_blocks=4000, max_batch_tokens=512, ordered=True)
    promises = {"chat": Promise(ttft_s=0.5), "document": Promise(ttft_s=30.0)}
    settings = {"mode": "mixed", "step_times": TIMES}
    config = ClusterConfig(times=TIMES, engine=engine, batch="auto", batch_settings=settings, promises=promises)
    given = Workload.of(
        "chat beside a document",
        arrival_s=np.array([0.0, 0.1, 0.4, 0.7]),
        prompt_tokens=np.array([20_000, 100, 100, 100]),
        output_tokens=np.full(4, 5),
        slo_class=("document", "chat", "chat", "chat"),
    )
    document, *chat = run(config, given).requests
    assert max(one.ttft_s for one in chat) < 0.5
    assert document.ttft_s < 5.0
    _, behind, *_ = run(replace(config, promises={}), given).requests
    assert behind.ttft_s > 1.0


def test_what_a_replica_could_not_read_soon_waits_in_the_router() -> None:
    """As live: there another replica may take it."""

    def most_unread_s(credit_s: float) -> float:
        unread_s = [0.0]

        class Watched(Engine):
            def submit(self, request: Request, now_s: float) -> list[Event]:
                events = super().submit(request, now_s)
                unread_s.append((self.seconds_per_prompt_token or 0.0) * self.in_time_tokens)
                return events

        auto = small("auto")
        router = RouterConfig(credit_s=credit_s)
        config = replace(auto, router=router, promises={"*": Promise(ttft_s=1e3)}, engine=replace(SMALL, ordered=True))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(cluster, "Engine", Watched)
            assert_all_served(run(config, workload(200, rate=50.0, seed=0)))
        return max(unread_s)

    assert most_unread_s(0.1) < most_unread_s(1e3) / 2


@pytest.mark.parametrize("mode", ["mixed", "exclusive"])
def test_promises_that_are_far_off_hold_nobody_back(mode: str) -> None:
    given = workload(400, 30.0, seed=3, prompt="uniform:50:150", output="exponential:128")
    roomy = EngineConfig(slots=128, total_blocks=40_000, ordered=True)
    settings = {"mode": mode, "step_times": TIMES}
    free, bound = (
        run(ClusterConfig(times=TIMES, engine=roomy, batch="auto", batch_settings=settings, promises=promises), given)
        for promises in ({}, {"*": Promise(ttft_s=100.0, tpot_s=0.5)})
    )
    assert np.median([r.ttft_s for r in bound.requests]) < 2 * np.median([r.ttft_s for r in free.requests])


def in_batches(max_wait_s: float = 0.5, **changes: Any) -> ClusterConfig:
    router = RouterConfig(batches=GangConfig(batch_size=4, max_wait_s=max_wait_s))
    return small("stock", router=router, order="fcfs", **changes)


def together(result: Run) -> list[list[Request]]:
    """Requests of each batch: those that came to one engine at one moment."""
    batches: dict[tuple[str | None, float | None], list[Request]] = {}
    for request in result.requests:
        batches.setdefault((request.replica_id, request.entered_s), []).append(request)
    return [batch for _, batch in sorted(batches.items(), key=lambda entry: entry[0][1] or 0.0)]


def test_an_idle_engine_takes_a_whole_batch_of_one_bin_and_class_and_nothing_until_it_has_ended() -> None:
    work = replace(workload(300, 8.0, seed=1), slo_class=tuple("ab"[n % 3 == 0] for n in range(300)))
    fixed = MultiBinConfig(bins=2, rule="fixed", initial_edges=(0.0, 40.0, 1000.0))
    result = run(in_batches(replicas=1, bins=fixed), work)
    assert_all_served(result)
    batches, free_s = together(result), 0.0
    for batch in batches:
        assert len(batch) <= 4
        assert len({(r.slo_class, (r.predicted_output_tokens or 0.0) >= 40.0) for r in batch}) == 1
        assert (batch[0].entered_s or 0.0) >= free_s
        free_s = max(r.finished_s or 0.0 for r in batch)
    assert max(map(len, batches)) == 4


def test_a_full_engine_takes_rolling_batches_and_one_with_room_what_comes() -> None:
    fixed = MultiBinConfig(bins=2, rule="fixed", initial_edges=(0.0, 40.0, 1000.0))
    rolling = small("stock", replicas=1, bins=fixed, router=RouterConfig(rolling_size=4), order="fcfs", clients=64)
    busy = run(rolling, workload(400, 1.0, seed=1))
    assert_all_served(busy)
    refills = [batch for batch in together(busy) if (batch[0].entered_s or 0.0) > 0.0]
    assert np.mean([len(batch) for batch in refills]) >= 3.5
    of_one_bin = [len({(r.predicted_output_tokens or 0.0) >= 40.0 for r in batch}) == 1 for batch in refills]
    assert np.mean(of_one_bin) > 0.8, "but where a bin has no more"
    idle = run(replace(rolling, clients=None), workload(50, 0.5, seed=1))
    assert all(request.entered_s == request.arrival_s for request in idle.requests)


def test_what_a_lost_engine_had_of_a_batch_is_served_by_another() -> None:
    result = run(in_batches(failures=(Failure(at_s=1.0, replica=0),)), workload(100, 8.0, seed=3))
    assert_all_served(result)
    assert any(request.moves for request in result.requests)


def test_batches_go_to_the_replicas_of_their_class() -> None:
    work = replace(workload(60, 8.0, seed=4), slo_class=tuple("ab"[n % 2] for n in range(60)))
    config = in_batches(replica_classes=(frozenset({"a"}), frozenset({"b"})))
    assert {(r.slo_class, r.replica_id) for r in run(config, work).requests} == {("a", "replica-0"), ("b", "replica-1")}


@pytest.mark.parametrize(
    ("router", "says"),
    [
        ({"batches": GangConfig(max_wait_s=math.inf)}, "max_wait_s must be finite"),
        ({"batches": GangConfig(), "credit_lookahead": None}, "of single requests"),
        ({"batches": GangConfig(), "rolling_size": 4}, "of single requests"),
        ({"rolling_size": 0}, "rolling_size"),
    ],
)
def test_batches_that_would_wait_for_ever_or_be_no_batches_are_refused(router: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterConfig(**router)


def test_a_batch_larger_than_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit into 16 slots"):
        small("stock", router=RouterConfig(batches=GangConfig(batch_size=17)))
