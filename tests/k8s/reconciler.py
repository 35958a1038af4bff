"""What KubeRay's operator makes of a RayService and of its changes (v1.4 to v1.7, rayservice_controller.go).

The numbers of pods are not in the hash by which the operator knows whether a cluster is still the one that is wanted.
It writes the specification of a running cluster anew, whole, in two cases: groups were appended, or the operator is
another version than the one that wrote it last.
"""

import copy
import json
from dataclasses import dataclass, replace
from typing import Any

from tests.k8s.engines import Manifest
from tests.k8s.kuberay import NEWEST
from tests.k8s.operator_rules import INCREMENTAL


@dataclass(frozen=True)
class RayCluster:
    """`hash` and `groups` are annotations: of the specification as it was written, not as it was edited."""

    name: str
    spec: dict[str, Any]
    hash: str
    groups: int
    kuberay: str


def made(service: Manifest, name: str = "a", kuberay: str = NEWEST) -> RayCluster:
    spec = copy.deepcopy(service["spec"]["rayClusterConfig"])
    return RayCluster(name, spec, _hash(spec, kuberay), len(spec.get("workerGroupSpecs", [])), kuberay)


def reconciled(service: Manifest, cluster: RayCluster, kuberay: str = NEWEST) -> tuple[RayCluster, bool]:
    """The running cluster, and whether a second one is made beside it."""
    goal = made(service, cluster.name, kuberay)
    if cluster.kuberay != kuberay:
        return goal, False
    if goal.hash == cluster.hash:
        return cluster, False
    first = {**goal.spec, "workerGroupSpecs": goal.spec["workerGroupSpecs"][: cluster.groups]}
    if goal.groups >= cluster.groups and _hash(first, kuberay) == cluster.hash:
        return goal, False
    return cluster, service["spec"]["upgradeStrategy"]["type"] != "None"


def edited(cluster: RayCluster, group: str, **numbers: int) -> RayCluster:
    """After `kubectl edit raycluster`."""
    spec = copy.deepcopy(cluster.spec)
    next(each for each in spec["workerGroupSpecs"] if each["groupName"] == group).update(numbers)
    return replace(cluster, spec=spec)


def services(service: Manifest, cluster: RayCluster) -> set[str]:
    """Names of those that the operator makes for clients and for the head."""
    name = service["metadata"]["name"]
    serving = cluster.name if service["spec"]["upgradeStrategy"]["type"] == INCREMENTAL else name
    return {f"{serving}-serve-svc", f"{name}-head-svc"}


def _hash(spec: dict[str, Any], kuberay: str) -> str:
    spec = copy.deepcopy(spec)
    groups = spec.get("workerGroupSpecs", [])
    for group in groups:
        for number in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(number, None)
    if kuberay != "1.4":
        for group in [spec["headGroupSpec"], *groups]:
            group["template"]["spec"].pop("tolerations", None)
    return json.dumps(spec, sort_keys=True)
