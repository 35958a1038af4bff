"""What a Kubernetes API server would say to a manifest.

By Kubernetes' own schemas, by KubeRay's for its RayService, and for resources of other projects by models of the fields
that the chart uses, written here.
"""

from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate.utils

from tests.k8s.engines import Manifest
from tests.k8s.kuberay import ray_service_validator

LOWEST, HIGHEST = "1.27", "1.37"
# It would parse megabytes of definitions for every object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, ANY = {"type": "string", "minLength": 1}, {"type": "object"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
# By the API references of the Prometheus operator and of the Gateway API.
DURATION = {"type": "string", "pattern": "^(0|([0-9]+(ms|[smhd]))+)$"}
_ENDPOINT = _object(("port",), port=TEXT, path={"type": "string", "pattern": "^/"}, interval=DURATION)
_ALERT = _object(("alert", "expr"), alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
_PARENT = _object(("name",), name=TEXT, namespace=TEXT, sectionName=TEXT, port=PORT, group=TEXT, kind=TEXT)
_MATCH = _object(path=_object(("type", "value"), type={"enum": ["Exact", "PathPrefix"]}, value=TEXT))
_ROUTE = _object(
    ("backendRefs",),
    matches=_list(_MATCH),
    timeouts=_object(request=DURATION, backendRequest=DURATION),
    backendRefs=_list(_object(("name", "port"), name=TEXT, port=PORT)),
)
# The fields that the chart uses of other projects' resources.
CUSTOM = {
    "PodMonitor": _object(
        ("selector", "podMetricsEndpoints"), selector=_object(matchLabels=TEXTS), podMetricsEndpoints=_list(_ENDPOINT)
    ),
    "PrometheusRule": _object(("groups",), groups=_list(_object(("name", "rules"), name=TEXT, rules=_list(_ALERT)))),
    "HTTPRoute": _object(
        ("parentRefs", "rules"), parentRefs=_list(_PARENT), hostnames=_list(TEXT), rules=_list(_ROUTE)
    ),
}


def errors(manifest: Manifest, version: str) -> list[str]:
    """Why Kubernetes of this version would refuse the manifest, unknown fields included."""
    kind = manifest["kind"]
    if kind == "RayService":
        found = _messages(ray_service_validator(), manifest)
        return found or [error for pod in pods_of(manifest) for error in _kubernetes_errors(pod, version)]
    if kind in CUSTOM:
        return _messages(jsonschema.Draft7Validator(CUSTOM[kind]), manifest["spec"])
    return _kubernetes_errors(manifest, version)


def _messages(validator: jsonschema.Draft7Validator, document: Any) -> list[str]:
    return [f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(document)]


def _kubernetes_errors(manifest: Manifest, version: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{manifest['kind']} {'/'.join(map(str, error.path))}: {error.message}"]
    return []


def templates_of(ray_service: Manifest) -> dict[str, Manifest]:
    """Pod templates by group, `head` among them."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster.get("workerGroupSpecs", [])}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def pods_of(ray_service: Manifest) -> list[Manifest]:
    """Its pod templates as pods, for Kubernetes' schema does not look into a custom resource."""
    return [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": group, **template["metadata"]}}
        for group, template in templates_of(ray_service).items()
    ]
