"""Ray Serve's autoscaling of engine replicas, by predicted work or by promises instead of ongoing requests, and of
routers, by their event loops.

Each replica reports the whole fleet as the shared state has it; the policy counts what is needed; Ray Serve applies the
bounds and holds every decision until it has stood for the configured delay, so that a square wave faster than the delay
moves nothing. Ray Serve sees no request on the engines (they come over the relay's wire), so its own policy could not.
"""

import time
from collections.abc import Iterable
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.config.scaling import AutoscalingSection, RouterAutoscalingSection, ScalingSection
from policies.router.autoscale import (
    FleetState,
    LoopLoad,
    ReplicasForLoops,
    ReplicasForLoopsConfig,
    ReplicasForWork,
    ReplicasForWorkConfig,
)
from policies.router.promised_scale import PromisedState, ReplicasForPromises, ReplicasForPromisesConfig
from router.scale_need import told
from router.state_store import Snapshot

INTERVAL_S = 1.0  # between two looks at the need; it has to stand for a delay of several
Stats = dict[str, float]


def fleet_stats(snapshot: Snapshot, needs: Iterable[bytes] = ()) -> Stats:
    """What a replica reports. Replicas that drain offer no slots and are leaving: what runs there needs none.

    Args:
        needs: pages of `router.scale_need`.
    """
    loads = [load for load in snapshot.replicas.values() if load.slots]
    return {
        "replicas": len(loads),
        "slots": sum(load.slots for load in loads),
        "running": sum(load.running for load in loads),
        "waiting": snapshot.waiting,
        "waiting_s": snapshot.waiting_s,
        "slowness": sum(load.slowness for load in loads) / max(1, len(loads)),
        **told(needs),
    }


class FleetUse:
    """What one replica reports at each look of Ray Serve."""

    def __init__(self) -> None:
        self._starts: int | None = None

    def report(self, snapshot: Snapshot, needs: Iterable[bytes] = ()) -> Stats:
        """A request that came and ended since the last look runs too: between looks the last replica is needed.

        Args:
            needs: as of `fleet_stats`.
        """
        stats, before = fleet_stats(snapshot, needs), self._starts
        self._starts = snapshot.starts
        if before is not None and snapshot.starts > before:
            stats["running"] = max(stats["running"], 1)
        return stats


def engines_config(section: AutoscalingSection) -> AutoscalingConfig:
    if section.by == "promises":
        return _serve_config(section, "deployments.serving.autoscaling:ByPromises", {"most_ratio": section.most_ratio})
    settings = {"slot_use": section.slot_use, "max_queue_s": section.max_queue_s}
    config = _serve_config(section, "deployments.serving.autoscaling:ByPredictedWork", settings)
    config.initial_replicas = max(1, section.min_replicas)  # routers learn from one what the model takes
    config.downscale_to_zero_delay_s = section.downscale_to_zero_delay_s
    return config


def routers_config(section: RouterAutoscalingSection) -> AutoscalingConfig:
    settings = {"cpu_use": section.cpu_use, "max_lag_s": section.max_lag_s}
    return _serve_config(section, "deployments.serving.autoscaling:ByEventLoop", settings)


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


class ByPromises:
    """Likewise; it learns as long as the controller lives, and keeps what there is until it has seen requests."""

    def __init__(self, **settings: Any) -> None:
        self._policy = ReplicasForPromises(ReplicasForPromisesConfig(**settings))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        state, value = latest_state(context), newest(context)
        if state is None or "arrived_s" not in value:
            return context.target_num_replicas, {}
        wanted = self._policy.choose(
            PromisedState(
                now_s=context.current_time or time.time(),
                replicas=state.replicas,
                starting=max(0, context.target_num_replicas - state.replicas),
                arrived_s=value["arrived_s"],
                waiting_s=state.waiting_s * state.slowness,
                ratio=value.get("ratio"),
                routers=round(value.get("routers", 1)),
            )
        )
        return wanted, {}


def newest(context: AutoscalingContext) -> dict[str, float]:
    """By name the newest value that any replica has reported."""
    found: dict[str, tuple[float, float]] = {}
    for name, by_replica in (context.raw_metrics or {}).items():
        points = [(point.timestamp, point.value) for series in by_replica.values() for point in series]
        if points:
            found[name] = max(points)
    return {name: value for name, (_, value) in found.items()}


def latest_state(context: AutoscalingContext) -> FleetState | None:
    """The newest report of any replica; None before the first."""
    value = newest(context)
    if not FleetState.__dataclass_fields__.keys() <= value.keys():
        return None
    return FleetState(
        replicas=round(value["replicas"]),
        slots=round(value["slots"]),
        running=round(value["running"]),
        waiting=round(value["waiting"]),
        waiting_s=value["waiting_s"],
        slowness=value["slowness"],
    )


class LoopUse:
    """What this process has used, and how late its event loop was, since the last report."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s, self._looks, self._lag_s = time.process_time(), time.monotonic(), 0.0, 0.0

    def report(self, looks: float, lag_s: float) -> Stats:
        """A `LoopLoad` by its names.

        Args:
            looks, lag_s: at the event loop so far, and all their lag together.
        """
        cpu_s, wall_s = time.process_time(), time.monotonic()
        used = (cpu_s - self._cpu_s) / max(1e-3, wall_s - self._wall_s)
        late_s = (lag_s - self._lag_s) / max(1.0, looks - self._looks)
        self._cpu_s, self._wall_s, self._looks, self._lag_s = cpu_s, wall_s, looks, lag_s
        return LoopLoad(cores=used, lag_s=late_s)._asdict()


class ByEventLoop:
    """Each router reports its own `LoopLoad`."""

    def __init__(self, **settings: Any) -> None:
        self._policy = ReplicasForLoops(ReplicasForLoopsConfig(**settings))

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        cores, lags = (_newest_of_each(context, name) for name in LoopLoad._fields)
        loads = [LoopLoad(cores[router], lags[router]) for router in cores.keys() & lags.keys()]
        return self._policy.choose(loads) if loads else context.target_num_replicas, {}


def _newest_of_each(context: AutoscalingContext, name: str) -> dict[Any, float]:
    """The last value under this name that each replica has reported."""
    reports = (context.raw_metrics or {}).get(name, {})
    return {
        replica: max((point.timestamp, point.value) for point in points)[1]
        for replica, points in reports.items()
        if points
    }
