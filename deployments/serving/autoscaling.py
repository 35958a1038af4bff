"""Ray Serve's autoscaling of engine replicas, by predicted work instead of ongoing requests, and of routers, by CPU.

Each replica reports the whole fleet as the shared state has it; the policy counts what is needed; Ray Serve applies the
bounds and holds every decision until it has stood for the configured delay, so that a square wave faster than the delay
moves nothing. Ray Serve sees no request on the engines (they come over the relay's wire), so its own policy could not.
"""

import time
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config.scaling import AutoscalingSection, RouterAutoscalingSection, ScalingSection
from policies.router.autoscale import (
    FleetState,
    ReplicasForCpu,
    ReplicasForCpuConfig,
    ReplicasForWork,
    ReplicasForWorkConfig,
)
from router.state_store import Snapshot

INTERVAL_S = 1.0  # between two looks at the need; it has to stand for a delay of several
Stats = dict[str, float]


def fleet_stats(snapshot: Snapshot) -> Stats:
    """What a replica reports. Replicas that drain offer no slots and are leaving: what runs there needs none."""
    loads = [load for load in snapshot.replicas.values() if load.slots]
    return {
        "replicas": len(loads),
        "slots": sum(load.slots for load in loads),
        "running": sum(load.running for load in loads),
        "waiting": snapshot.waiting,
        "waiting_s": snapshot.waiting_s,
        "slowness": sum(load.slowness for load in loads) / max(1, len(loads)),
    }


def engines_config(section: AutoscalingSection) -> AutoscalingConfig:
    settings = {"slot_use": section.slot_use, "max_queue_s": section.max_queue_s}
    return _serve_config(section, "deployments.serving.autoscaling:ByPredictedWork", settings)


def routers_config(section: RouterAutoscalingSection) -> AutoscalingConfig:
    return _serve_config(section, "deployments.serving.autoscaling:ByCpu", {"cpu_use": section.cpu_use})


def _serve_config(section: ScalingSection, policy: str, settings: dict[str, Any]) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        upscale_delay_s=section.upscale_delay_s,
        downscale_delay_s=section.downscale_delay_s,
        metrics_interval_s=INTERVAL_S,
        look_back_period_s=2 * INTERVAL_S,
        policy=AutoscalingPolicy(
            policy_function=policy, policy_kwargs={**settings, "min_replicas": section.min_replicas}
        ),
    )


class ByPredictedWork:
    """Ray Serve makes one in its controller and calls it at every interval."""

    def __init__(self, **settings: Any) -> None:
        self._policy = ReplicasForWork(ReplicasForWorkConfig(**settings))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state = latest_state(context)
        if state is None:
            return context.target_num_replicas, {}
        return self._policy.choose(state), {}


def latest_state(context: AutoscalingContext) -> FleetState | None:
    """The newest report of any replica; None before the first."""
    reports = context.raw_metrics or {}
    newest: dict[str, tuple[float, float]] = {}
    for name, by_replica in reports.items():
        points = [(point.timestamp, point.value) for series in by_replica.values() for point in series]
        if points:
            newest[name] = max(points)
    if not FleetState.__dataclass_fields__.keys() <= newest.keys():
        return None
    value = {name: point[1] for name, point in newest.items()}
    return FleetState(
        replicas=round(value["replicas"]),
        slots=round(value["slots"]),
        running=round(value["running"]),
        waiting=round(value["waiting"]),
        waiting_s=value["waiting_s"],
        slowness=value["slowness"],
    )


class CpuUse:
    """Cores that this process has used since the last call."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = time.process_time(), time.monotonic()

    def cores(self) -> float:
        cpu_s, wall_s = time.process_time(), time.monotonic()
        used = (cpu_s - self._cpu_s) / max(1e-3, wall_s - self._wall_s)
        self._cpu_s, self._wall_s = cpu_s, wall_s
        return used


class ByCpu:
    """Each router reports its own `cores`."""

    def __init__(self, **settings: Any) -> None:
        self._policy = ReplicasForCpu(ReplicasForCpuConfig(**settings))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        series = (context.raw_metrics or {}).get("cores", {}).values()
        newest = [max((point.timestamp, point.value) for point in points)[1] for points in series if points]
        return self._policy.choose(newest) if newest else context.target_num_replicas, {}
