"""What a Kubernetes API server would say to a manifest.

By Kubernetes' own schemas, and for KubeRay's RayService by a model of the fields that the chart uses, written here.
"""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.k8s.engines import LOADER, Manifest

LOWEST, HIGHEST = "1.27", "1.37"
# Of other projects, and written here by nobody's schema: the keys that each may have under `spec`.
CUSTOM = {
    "PodMonitor": {"selector", "podMetricsEndpoints"},
    "PrometheusRule": {"groups"},
    "HTTPRoute": {"parentRefs", "hostnames", "rules"},
}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, FLAG, ANY = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
_SECRET_KEY = _object(("name", "key"), name=TEXT, key=TEXT)
_VALUE = _object(value=TEXT, valueFrom=_object(("secretKeyRef",), secretKeyRef=_SECRET_KEY))
_HEAD = _object(("template", "rayStartParams"), rayStartParams=TEXTS, serviceType=TEXT, template=ANY)
_GROUP = _object(
    ("groupName", "minReplicas", "maxReplicas", "template", "rayStartParams"),
    groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, idleTimeoutSeconds=COUNT,
    rayStartParams=TEXTS, template=ANY,
)  # fmt: skip
_AUTOSCALER = _object(
    version={"enum": ["v2"]}, idleTimeoutSeconds=COUNT, upscalingMode=TEXT, resources=ANY, securityContext=ANY
)
_CLUSTER = _object(
    ("headGroupSpec", "rayVersion"),
    rayVersion=TEXT, enableInTreeAutoscaling=FLAG, autoscalerOptions=_AUTOSCALER,
    gcsFaultToleranceOptions=_object(("redisAddress",), redisAddress=TEXT, redisUsername=_VALUE, redisPassword=_VALUE),
    authOptions=_object(("mode",), mode={"enum": ["disabled", "token"]}),
    headGroupSpec=_HEAD, workerGroupSpecs={"type": "array", "items": _GROUP},
)  # fmt: skip
_UPGRADE = _object(
    ("gatewayClassName", "intervalSeconds", "stepSizePercent"),
    gatewayClassName=TEXT, intervalSeconds=COUNT, stepSizePercent=COUNT, maxSurgePercent=COUNT,
)  # fmt: skip
RAY_SERVICE = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"}, kind={"const": "RayService"}, metadata=ANY,
    spec=_object(
        ("serveConfigV2", "rayClusterConfig"),
        serveConfigV2=TEXT, rayClusterConfig=_CLUSTER, excludeHeadPodFromServeSvc=FLAG,
        rayClusterDeletionDelaySeconds=COUNT, serveService=ANY,
        upgradeStrategy=_object(type=TEXT, clusterUpgradeOptions=_UPGRADE),
    ),
)  # fmt: skip
_RAY_SERVICE = jsonschema.Draft7Validator(RAY_SERVICE)


def errors(manifest: Manifest, version: str) -> list[str]:
    """Why Kubernetes of this version would refuse the manifest, unknown fields included."""
    kind = manifest["kind"]
    if kind == "RayService":
        found = [f"{'/'.join(map(str, e.path))}: {e.message}" for e in _RAY_SERVICE.iter_errors(manifest)]
        return found or [error for pod in pods_of(manifest) for error in _kubernetes_errors(pod, version)]
    if kind in CUSTOM:
        return [f"spec.{key} of {kind}" for key in set(manifest["spec"]) - CUSTOM[kind]]
    return _kubernetes_errors(manifest, version)


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


def crd_validators(folder: Path) -> dict[str, jsonschema.Draft7Validator]:
    """KubeRay's custom resource definitions in `folder`, by kind, strict about unknown fields."""
    validators = {}
    for file in sorted(folder.glob("*.yaml")):
        crd = yaml.load(file.read_text(), LOADER)
        version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
        schema = _strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        validators[crd["spec"]["names"]["kind"]] = jsonschema.Draft7Validator(schema)
    return validators


def _strict(schema: Any) -> Any:
    """OpenAPI's dialect as a JSON schema. Fields with a default need not be given: the API server fills them in."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    fields = schema.get("properties", {})
    strict = {
        key: _strict(value) for key, value in schema.items() if key not in ("description", "default", "properties")
    }
    if isinstance(strict.get("required"), list):
        strict["required"] = [name for name in strict["required"] if "default" not in fields.get(name, {})]
    if fields:
        strict["properties"] = {name: _strict(value) for name, value in fields.items()}
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        strict |= {} if open_ended else {"additionalProperties": False}
    return strict
