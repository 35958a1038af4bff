"""Rules that KubeRay's operator checks in code, beyond its CRD (v1.4 to v1.7, controllers/ray/utils/validation.go)."""

import re
from collections.abc import Iterator
from typing import Any

from tests.k8s.engines import Manifest
from tests.k8s.kuberay import NEWEST

MAX_NAME = 47
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
REDIS_ENV = {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}
REDIS_ANNOTATIONS = {"ray.io/external-storage-namespace", "ray.io/ft-enabled"}


def broken_rules(ray_service: Manifest, kuberay: str = NEWEST) -> list[str]:
    spec = ray_service["spec"]
    cluster = spec["rayClusterConfig"]
    groups = cluster.get("workerGroupSpecs", [])
    return [
        *_name(ray_service["metadata"]),
        *_upgrade(spec.get("upgradeStrategy", {}), cluster, kuberay),
        *_service(spec),
        *_fault_tolerance(ray_service["metadata"], cluster),
        *_autoscaler(cluster, groups),
        *(error for group in groups for error in _group(group, cluster)),
        *_start_params("head", cluster["headGroupSpec"]),
        *_auth(cluster),
    ]


def _name(metadata: dict[str, Any]) -> Iterator[str]:
    name = metadata["name"]
    if len(name) > MAX_NAME:
        yield f"name {name} is longer than {MAX_NAME}"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"name {name} is no DNS label"
    if int(metadata.get("annotations", {}).get("ray.io/initializing-timeout", "1").rstrip("smh")) <= 0:
        yield "initializing-timeout is not positive"


def _upgrade(strategy: dict[str, Any], cluster: dict[str, Any], kuberay: str) -> Iterator[str]:
    kind, options = strategy.get("type"), strategy.get("clusterUpgradeOptions")
    if kind not in (None, "None", "NewCluster", *([INCREMENTAL] if kuberay != "1.4" else [])):
        yield f"upgradeStrategy.type {kind}"
    if kind != INCREMENTAL:
        return
    if kuberay in ("1.5", "1.6"):
        yield f"{kind} is taken and does nothing: its feature gate is off by default"
    if not cluster.get("enableInTreeAutoscaling"):
        yield "incremental upgrade without autoscaling"
    if not options or not options.get("gatewayClassName"):
        yield "incremental upgrade without gatewayClassName"
        return
    if not 0 <= options["stepSizePercent"] <= options.get("maxSurgePercent", 100) <= 100:
        yield "stepSizePercent <= maxSurgePercent <= 100"
    if options["intervalSeconds"] <= 0:
        yield "intervalSeconds is not positive"


def _service(spec: dict[str, Any]) -> Iterator[str]:
    if spec.get("upgradeStrategy", {}).get("type") == INCREMENTAL and "serveService" in spec:
        yield "serveService is ignored with an incremental upgrade"


def _fault_tolerance(metadata: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    head = cluster["headGroupSpec"]
    env = {entry["name"] for container in head["template"]["spec"]["containers"] for entry in container.get("env", [])}
    if "gcsFaultToleranceOptions" not in cluster:
        if "RAY_REDIS_ADDRESS" in env:
            yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
        return
    annotations = {*metadata.get("annotations", {}), *head["template"]["metadata"].get("annotations", {})}
    yield from (f"{name} beside gcsFaultToleranceOptions" for name in sorted(env & REDIS_ENV))
    yield from (
        f"annotation {name} beside gcsFaultToleranceOptions" for name in sorted(annotations & REDIS_ANNOTATIONS)
    )
    if {"redis-password", "redis-username"} & set(head["rayStartParams"]):
        yield "Redis' password or user in rayStartParams"


def _autoscaler(cluster: dict[str, Any], groups: list[dict[str, Any]]) -> Iterator[str]:
    second = cluster.get("autoscalerOptions", {}).get("version") == "v2"
    for group in groups:
        if "idleTimeoutSeconds" in group and not second:
            yield f"{group['groupName']}: idleTimeoutSeconds needs autoscaler v2"
    for group in [cluster["headGroupSpec"], *groups]:
        if second and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield "restartPolicy must be Never with autoscaler v2"


def _group(group: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    name, least, most = group["groupName"], group.get("minReplicas"), group.get("maxReplicas")
    if not cluster.get("enableInTreeAutoscaling") and (least is None or most is None):
        yield f"{name}: minReplicas and maxReplicas must be set without autoscaling"
    if least is not None and most is not None and least > most:
        yield f"{name}: minReplicas {least} > maxReplicas {most}"
    yield from _start_params(name, group)


def _start_params(name: str, group: dict[str, Any]) -> Iterator[str]:
    params = group["rayStartParams"]
    if "labels" in params:
        yield f"{name}: labels in rayStartParams"
    if group.get("resources") and RESOURCES & set(params):
        yield f"{name}: resources stand in rayStartParams as well"
    if group.get("headService", {}).get("metadata", {}).get("name"):
        yield f"{name}: headService has a name"


def _auth(cluster: dict[str, Any]) -> Iterator[str]:
    version = tuple(map(int, cluster.get("rayVersion", "0.0.0").split(".")))
    if cluster.get("authOptions", {}).get("mode") == "token" and version < (2, 52, 0):
        yield f"authOptions.mode token needs Ray 2.52, not {version}"
