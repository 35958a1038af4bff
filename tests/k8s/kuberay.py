"""KubeRay's own schemas of a RayService, strict about unknown fields.

python -m tests.k8s.kuberay 1.7 FOLDER     takes that one anew from KubeRay's `helm-chart/kuberay-operator/crds`
"""

import gzip
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.k8s.engines import LOADER

# The last release of each minor version, by the name of its schema, as `kuberayVersion` has it.
VERSIONS = {"1.4": "1.4.2", "1.5": "1.5.2", "1.6": "1.6.2", "1.7": "1.7.0"}
NEWEST = "1.7"


def _packed(version: str) -> Path:
    return Path(__file__).with_name("crds") / f"rayservice-{version}.json.gz"


@cache
def ray_service_validator(version: str = NEWEST) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads(gzip.decompress(_packed(version).read_bytes())))


def pack(folder: Path) -> bytes:
    """Version v1 of the RayService in `folder`, as a JSON schema."""
    crd = yaml.load((folder / "ray.io_rayservices.yaml").read_text(), LOADER)
    version = next(version for version in crd["spec"]["versions"] if version["name"] == "v1")
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return gzip.compress(json.dumps(schema, sort_keys=True).encode(), mtime=0)


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


if __name__ == "__main__":
    _packed(sys.argv[1]).write_bytes(pack(Path(sys.argv[2])))
