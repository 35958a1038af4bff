"""The scaling policy inside Ray Serve's own delays, over loads that jump up and down."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from ray.serve import autoscaling_policy as serve_policy
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from deployments.config.scaling import AutoscalingSection, RouterAutoscalingSection
from deployments.serving.autoscaling import (
    ByEventLoop,
    ByPredictedWork,
    ByPromises,
    FleetUse,
    LoopUse,
    Stats,
    engines_config,
    fleet_stats,
    routers_config,
)
from router.event_loop import LOOK_S, look_for_lag
from router.metrics import RouterMetrics
from router.state_store import ReplicaLoad, Snapshot

SLOTS, HIGH, LOW = 10, 30, 4
SECTION = AutoscalingSection(max_replicas=8, upscale_delay_s=4.0, downscale_delay_s=30.0)
DEPLOYMENT = DeploymentID("EngineReplica", "sluice")


def report(replicas: int, requests: int) -> Stats:
    running = min(requests, SLOTS * replicas)
    loads = {f"r{n}": ReplicaLoad(slots=SLOTS, running=0, outstanding_s=0.0) for n in range(replicas)}
    loads["r0"] = ReplicaLoad(slots=SLOTS, running=running, outstanding_s=0.0)
    waiting = requests - running
    lanes = {("standard", 0): waiting} if waiting else {}
    return fleet_stats(Snapshot(lanes=lanes, replicas=loads, waiting_s=0.1 * waiting))


def test_replicas_that_drain_do_not_count_as_those_that_serve() -> None:
    """Else the rest would seem to have half the slots, and as many as leave would be asked for again."""
    drains = {f"d{n}": ReplicaLoad(slots=0, running=5, outstanding_s=1.0, slowness=9.0) for n in range(4)}
    serves = {f"r{n}": ReplicaLoad(slots=16, running=5, outstanding_s=1.0) for n in range(4)}
    stats = fleet_stats(Snapshot(replicas=drains | serves))
    assert (stats["replicas"], stats["slots"], stats["running"], stats["slowness"]) == (4, 64, 20, 1.0)


def test_a_request_that_came_and_ended_between_two_looks_is_seen() -> None:
    """Else the last replica would end under requests that are shorter than what lies between looks."""
    loads, use = {"r": ReplicaLoad(slots=16, running=0, outstanding_s=0.0)}, FleetUse()
    seen = [use.report(Snapshot(replicas=loads, starts=starts))["running"] for starts in (7, 7, 9, 9)]
    assert seen == [0, 0, 1, 0]


def test_the_last_replica_ends_after_its_own_delay_and_without_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    section = AutoscalingSection(min_replicas=0, max_replicas=8, downscale_delay_s=5.0, downscale_to_zero_delay_s=20.0)
    config = engines_config(section)
    assert config.initial_replicas == 1
    decide = serve_policy._apply_autoscaling_config(ByPredictedWork(**config.policy.policy_kwargs))
    state, targets = dict[str, Any](), []
    for now_s in range(60):
        monkeypatch.setattr(serve_policy.time, "time", lambda at_s=float(now_s): at_s)
        stats = report(1, 1 if now_s == 10 else 0)
        target, state = decide(context(1, state, {"r0": stats}, now_s, config))
        targets.append(target)
    assert targets.index(0) == 31  # none has come for so long
    assert decide(context(0, {}, {}, 60.0, config))[0] == 0, "nothing is reported, and no call waits"


def context(
    target: int, state: dict[str, Any], reports: dict[str, Stats], now_s: float, config: object
) -> AutoscalingContext:
    raw: dict[str, Any] = {}
    for replica, stats in reports.items():
        for name, value in stats.items():
            raw.setdefault(name, {})[ReplicaID(replica, DEPLOYMENT)] = [TimeStampedValue(now_s, value)]
    return AutoscalingContext(
        deployment_id=DEPLOYMENT, deployment_name="EngineReplica", app_name="sluice", current_num_replicas=target,
        target_num_replicas=target, running_replicas=[], total_num_requests=0, total_queued_requests=0,
        aggregated_metrics={}, raw_metrics=raw, capacity_adjusted_min_replicas=1, capacity_adjusted_max_replicas=8,
        policy_state=state, last_scale_up_time=None, last_scale_down_time=None, current_time=now_s, config=config,
    )  # fmt: skip


def targets_over(wave_s: float, periods: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The target at every second of a square wave, half of each period high and half low."""
    config = engines_config(SECTION)
    decide = serve_policy._apply_autoscaling_config(ByPredictedWork(**config.policy.policy_kwargs))
    target, state, targets = 1, dict[str, Any](), []
    for now_s in range(int(wave_s * periods)):
        monkeypatch.setattr(serve_policy.time, "time", lambda at_s=float(now_s): at_s)
        requests = HIGH if now_s % wave_s < wave_s / 2 else LOW
        stats = report(target, requests)
        target, state = decide(context(target, state, {"r0": stats}, now_s, config))
        targets.append(target)
    return targets


def changes(targets: list[int]) -> int:
    return sum(before != after for before, after in zip(targets, targets[1:], strict=False))


def test_a_wave_faster_than_the_delays_moves_it_once_and_to_what_the_peaks_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = targets_over(20, 30, monkeypatch)
    assert changes(targets) == 1
    assert targets[-1] == 4  # 30 requests at eight tenths of ten slots


def test_a_wave_too_short_to_stand_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(targets_over(6, 50, monkeypatch)) == {1}


def test_a_slow_wave_is_followed_once_up_and_once_down_a_period(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = targets_over(200, 5, monkeypatch)
    assert changes(targets) == 2 * 5
    assert set(targets) == {1, 4}


PROMISING = AutoscalingSection(by="promises", max_replicas=8, upscale_delay_s=4.0, downscale_delay_s=30.0)


def told(replicas: int, arrived_s: float, ratio: float | None) -> Stats:
    """Of two routers, one of which had all requests."""
    loads = {f"r{n}": ReplicaLoad(slots=SLOTS, running=0, outstanding_s=0.0) for n in range(replicas)}
    pages = ({"arrived_s": arrived_s, "ratio": ratio}, {"arrived_s": 0.0, "ratio": None})
    return fleet_stats(Snapshot(replicas=loads), map(msgspec.json.encode, pages))


def test_by_promises_replicas_follow_the_work_that_comes_and_how_near_promises_are_to_breaking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica serves at once here, and keeps its promises up to one second of work a second."""
    config = engines_config(PROMISING)
    decide = serve_policy._apply_autoscaling_config(ByPromises(**config.policy.policy_kwargs))
    target, state, arrived_s, targets = 1, dict[str, Any](), 0.0, []
    for now_s in range(1, 3000):
        monkeypatch.setattr(serve_policy.time, "time", lambda at_s=float(now_s): at_s)
        rate = 3.5 if 1000 <= now_s < 2000 else 0.7
        arrived_s += rate
        stats = told(target, arrived_s, (rate / target) ** 2)
        target, state = decide(context(target, state, {"r0": stats}, now_s, config))
        targets.append(target)
    assert targets[990] == 1
    assert 4 <= targets[1900] <= 5
    assert targets[-1] == 1
    assert changes(targets) < 20


def test_by_promises_pages_that_were_lost_for_a_look_ask_for_no_replica() -> None:
    """As when the shared state begins anew: the next look sees all work of weeks again."""
    decide = ByPromises(**engines_config(PROMISING).policy.policy_kwargs)

    def wanted(now_s: float, stats: Stats) -> int:
        return int(decide(context(1, {}, {"r0": stats}, now_s, None))[0])

    weeks_s = 1e6
    for second in range(1, 600):
        wanted(second, told(1, weeks_s + 0.7 * second, 0.5))
    wanted(600.0, fleet_stats(Snapshot(replicas={"r0": ReplicaLoad(slots=SLOTS, running=0, outstanding_s=0.0)})))
    assert [wanted(second, told(1, weeks_s + 0.7 * second, 0.5)) for second in range(601, 660)] == [1] * 59


def test_by_promises_nothing_changes_before_routers_told_of_requests() -> None:
    decide = ByPromises(**engines_config(PROMISING).policy.policy_kwargs)
    assert decide(context(3, {}, {}, 1.0, None))[0] == 3
    assert decide(context(3, {}, {"r0": report(3, 30)}, 2.0, None))[0] == 3
    assert decide(context(3, {}, {"r0": told(3, 0.0, None)}, 3.0, None))[0] == 3


def test_routers_follow_the_cores_that_all_of_them_use() -> None:
    decide = ByEventLoop(cpu_use=0.5, max_lag_s=0.02, min_replicas=1)
    reports = {"a": {"cores": 0.9, "lag_s": 0.001}, "b": {"cores": 0.4, "lag_s": 0.001}}
    assert decide(context(2, {}, reports, 1.0, None))[0] == 3
    assert decide(context(2, {}, {"a": {"cores": 0.01, "lag_s": 0.0}}, 1.0, None))[0] == 1
    assert decide(context(2, {}, {}, 1.0, None))[0] == 2
    assert decide(context(2, {}, {"a": {"cores": 9.0}}, 1.0, None))[0] == 2, "half of a report is none"


def test_routers_that_are_late_get_one_more_at_a_time_and_keep_all_until_the_lag_is_halved() -> None:
    decide = ByEventLoop(**routers_config(RouterAutoscalingSection(max_replicas=8)).policy.policy_kwargs)

    def wanted(*lags_s: float) -> int:
        reports = {str(n): {"cores": 0.1, "lag_s": lag_s} for n, lag_s in enumerate(lags_s)}
        return int(decide(context(2, {}, reports, 1.0, None))[0])

    assert wanted(0.05) == 2
    assert wanted(0.05, 0.03) == 3
    assert wanted(0.015, 0.015, 0.015) == 3
    assert wanted(0.005, 0.005, 0.005) == 1


def test_a_busy_process_uses_a_core_and_an_idle_one_none() -> None:
    use = LoopUse()
    until_s = time.process_time() + 0.3  # far more than a hundredth, though the machine stands still meanwhile
    while time.process_time() < until_s:
        pass
    assert use.report(0.0, 0.0)["cores"] > 0.01
    time.sleep(0.2)
    assert use.report(0.0, 0.0)["cores"] < 0.5


async def test_the_lag_is_that_since_the_last_report() -> None:
    use, metrics = LoopUse(), RouterMetrics()
    look = asyncio.create_task(look_for_lag(metrics.loop_lag_s.observe))
    await asyncio.sleep(0)
    until_s = time.monotonic() + LOOK_S + 0.1
    while time.monotonic() < until_s:
        pass
    await look
    assert use.report(*metrics.loop_lag)["lag_s"] > 0.09
    metrics.loop_lag_s.observe(0.0)
    assert use.report(*metrics.loop_lag)["lag_s"] == 0.0
    assert use.report(*metrics.loop_lag)["lag_s"] == 0.0
