"""The experiment on scaling: what comes when, and how ways to scale are compared."""

from dataclasses import replace

import numpy as np
import pytest

from simulator.cluster import run
from simulator.fleet import AutoscaleConfig
from simulator.reproduce import scaling
from simulator.reproduce.scaling import Found, Job, frontier, hours_at, measured, traffic
from simulator.workload import Workload, poisson


def trace(count: int = 300) -> Workload:
    rng = np.random.default_rng(0)
    prompts, answers = rng.permutation(np.arange(100, 100 + 5 * count, 5)), rng.integers(20, 300, count)
    return Workload.of("trace", poisson(3.0, count, rng), prompts, answers)


def test_a_seed_begins_the_trace_elsewhere_and_its_requests_stay_in_their_order() -> None:
    rates = np.array([2.0, 6.0])
    one, two = (traffic(trace(), rates, 100.0, seed) for seed in (0, 1))
    assert len(one) == pytest.approx(400, abs=20)
    assert one.prompt_tokens[:50].tolist() != two.prompt_tokens[:50].tolist()
    first = trace().prompt_tokens.tolist().index(one.prompt_tokens[0])
    assert one.prompt_tokens[:20].tolist() == np.roll(trace().prompt_tokens, -first)[:20].tolist()
    assert set(one.slo_class or ()) == set(scaling.TARGETS)


def test_a_frontier_leaves_out_what_costs_more_and_keeps_less() -> None:
    good, dear, bad, best = Found(0.9, 40.0), Found(0.95, 60.0), Found(0.92, 65.0), Found(0.99, 80.0)
    curve = frontier([best, bad, dear, good])
    assert curve == [good, dear, best]
    assert hours_at(0.97, curve) == pytest.approx(70.0)
    assert hours_at(0.5, curve) is None and hours_at(0.995, curve) is None


@pytest.mark.long
def test_by_promises_replicas_come_and_go_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_DAY_S", 2400.0)
    monkeypatch.setattr(scaling, "COMPRESSION", 2.0)
    scale = AutoscaleConfig(max_replicas=6, start_s=10.0, downscale_delay_s=20.0, most_ratio=1.0)
    always = replace(scale, min_replicas=6)
    rates = np.array([1.0, 8.0, 1.0])
    found, most = (measured(trace(), rates, Job("by promises", each, 0)) for each in (scale, always))
    assert found.kept > most.kept - 0.1
    assert found.hours < 0.8 * most.hours


@pytest.mark.long
def test_more_replicas_keep_more_promises_and_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_DAY_S", 1200.0)
    monkeypatch.setattr(scaling, "COMPRESSION", 4.0)
    scale = AutoscaleConfig(max_replicas=8, start_s=10.0, slot_use=0.2)
    few = replace(scale, max_replicas=1)
    rates = np.array([4.0, 12.0, 4.0])
    found = [measured(trace(), rates, Job("by work", each, 0)) for each in (few, scale)]
    assert found[0].kept < found[1].kept
    assert found[0].hours < found[1].hours


def test_a_replica_costs_while_it_starts() -> None:
    scale = AutoscaleConfig(max_replicas=3, slot_use=0.01, upscale_delay_s=0.0, start_s=1e4)
    finished = run(replace(scaling.served_by(scale), replicas=1), at_once(1))
    starting_s = finished.makespan_s - scale.interval_s
    assert finished.requests[0].replica_id == "replica-0"
    assert finished.replica_s == pytest.approx(finished.makespan_s + starting_s, abs=0.1)


def test_a_replica_costs_until_it_has_drained() -> None:
    scale = AutoscaleConfig(max_replicas=3, slot_use=0.9, downscale_delay_s=0.0)
    finished = run(replace(scaling.served_by(scale), replicas=2), at_once(2))
    assert {request.replica_id for request in finished.requests} == {"replica-0", "replica-1"}
    assert finished.replica_s == pytest.approx(2 * finished.makespan_s, abs=2 * scale.interval_s)


def at_once(count: int) -> Workload:
    """Requests that take long."""
    return Workload.of("long", np.zeros(count), np.full(count, 1000), np.full(count, 900))
