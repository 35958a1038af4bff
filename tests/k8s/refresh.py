"""Writes what follows from other files: docs/reference/configuration.md, the application's part of values.schema.json
configuration, the chart's table of values, its list of what changes live, its environment of Ray, and the goldens.

    python -m tests.k8s.refresh

`app` in values is AppConfig, so its schema is AppConfig's, without what the chart itself sets. tests/k8s/test_values.py
holds that these files are up to date.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deployments.command import config
from deployments.config import reference
from deployments.config.application import AppConfig
from deployments.http.keys import KeyEntry
from deployments.process.environment import serve_env, several_hosts_env
from tests.k8s.cases import FILES, golden, values_of
from tests.k8s.engines import CHART, Helm4, documents, start_helm4

SCHEMA = CHART / "values.schema.json"
TABLE = CHART / "README.md"
LIVE_KEYS = CHART / "files/live-keys.json"
RAY_ENV = CHART / "files/ray-env.json"
PAGE = CHART.parents[1] / "docs" / "reference" / "configuration.md"
CHART_SETS = {
    "redis_url",
    "redis_ca_certs",
    "keys.file",
    "engine.num_gpus",
    "engine.num_cpus",
    "engine.resources",
    "engine.bind_host",
    "engine.placement_group_bundles",
    "engine.placement_group_strategy",
    "engine.prefill.resources",
}
# Live, but they also say how engines and routers start: whether a new engine is measured, and whether a policy of one's
# own can be made, and how those processes log that no router tells of a change. The chart leaves them in `args`.
OF_THE_START = re.compile(r"(mode|policy_args|logs\.to|logs\.format)$")
DROPPED = ("title", "format", "writeOnly", reference.LIVE)
ANYTHING: dict[str, Any] = {}  # the schema of pydantic's JsonValue
APP_NAME = "Keeps the shared state of several applications apart in one Redis; by default the name of the RayService."
SET_ELSEWHERE = ", ".join(f"`{path}`" for path in sorted(CHART_SETS))
APP_ROW = f"[Its keys](../../docs/reference/configuration.md), but for what the chart sets: {SET_ELSEWHERE}"
README_HEAD = """\
# The chart `sluice`

    helm install my-sluice k8s/sluice -f k8s/sluice/examples/one-gpu.yaml \\
      --set image.repository=registry.example.org/sluice --timeout 30m

No image is published yet: build it and push it to a registry of yours.
[Install on Kubernetes](../../docs/start/install-kubernetes.md) goes from nothing to the first token. `examples/` has
values to begin with. All values, `[]` for each item of a list:

| value | default | meaning |
|---|---|---|
"""


def definitions() -> dict[str, Any]:
    """`app`, `keyEntry` and what they refer to, in draft-07."""
    app = reference.schema(AppConfig)
    models = {**app.pop("$defs"), "AppConfig": app, "KeyEntry": reference.schema(KeyEntry)}
    sections = {name: model for name, model in sorted(models.items()) if "properties" in model}
    return {_name(name): _draft_07(name, model) for name, model in sections.items()}


def _name(model: str) -> str:
    return {"AppConfig": "app", "KeyEntry": "keyEntry"}.get(model, f"app{model}")


def _draft_07(name: str, model: dict[str, Any]) -> dict[str, Any]:
    set_here = {key.name for key in reference.all_keys(AppConfig) if key.owner == name and key.path in CHART_SETS}
    fields = {key: value for key, value in model["properties"].items() if key not in set_here}
    properties = {key: {"description": value["description"], **_clean(value)} for key, value in fields.items()}
    if name == "AppConfig":
        properties["name"] = {"description": APP_NAME, "type": "string", "pattern": fields["name"]["pattern"]}
    schema = {"description": model["description"], "type": "object", "additionalProperties": False}
    required = {"required": model["required"]} if "required" in model else {}
    return schema | {"properties": properties} | required


def _clean(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_clean(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") == "#/$defs/JsonValue":
        return ANYTHING
    if "$ref" in schema:  # draft-07 reads nothing beside a $ref
        return {"allOf": [{"$ref": f"#/definitions/{_name(schema['$ref'].split('/')[-1])}"}]}
    return {key: _clean(value) for key, value in schema.items() if key not in DROPPED and not _is_section(key, value)}


def _is_section(key: str, value: Any) -> bool:
    """A default that is no one value: what the section's own fields say is enough."""
    return key == "default" and (value is None or isinstance(value, dict))


def schema_text() -> str:
    """The schema as it should be: ours stays, the application's is made anew."""
    schema = json.loads(SCHEMA.read_text())
    ours = {key: value for key, value in schema["definitions"].items() if not key.startswith(("app", "keyEntry"))}
    return json.dumps({**schema, "definitions": ours | definitions()}, indent=2) + "\n"


def rows(schema: dict[str, Any], path: str, root: dict[str, Any], defaults: Any) -> Iterator[tuple[str, str, str]]:
    """Path, default and meaning of each value below `schema`."""
    for key, value in schema["properties"].items():
        value = _resolved(value, root)
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if key == "app":
            yield key, "see values.yaml", f"{value['description']} {APP_ROW}"
            continue
        name, each = f"{path}{key}", _resolved(value.get("additionalProperties") or {}, root)
        if value.get("properties"):
            yield from rows(value, f"{name}.", root, default)
            continue
        default = value.get("default") if default is None else default
        shown = "" if default is None else f"`{json.dumps(default)}`"
        items = _resolved(value.get("items", {}), root)
        if items.get("additionalProperties") is False:
            yield name, "see values.yaml" if default else shown, value["description"]
            yield from rows(items, f"{name}[].", root, None)
        else:
            yield name, shown, value["description"]
        if "properties" in each:
            yield from rows(each, f"{name}.NAME.", root, None)


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = root["definitions"][schema["$ref"].split("/")[-1]]
        return found
    parts = [_resolved(part, root) for part in [*schema.get("allOf", []), *schema.get("anyOf", [])]]
    return next((part for part in parts if "properties" in part), schema)


def table_text() -> str:
    """One line for several values of one name that mean the same and have no default, as those of all pods do."""
    schema = json.loads(SCHEMA.read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    lines: dict[tuple[str, str, str], list[str]] = {}
    for path, default, meaning in rows(schema, "", schema, defaults):
        same = path if default else path.rpartition(".")[2]
        lines.setdefault((same, default, meaning.replace("|", "\\|")), []).append(path)
    table = (f"| {', '.join(paths)} | {default} | {meaning} |\n" for (_, default, meaning), paths in lines.items())
    return README_HEAD + "".join(table)


def live_keys() -> dict[str, Any]:
    """What the chart gives to routers in place of `args`: true at each key, in the mappings of their sections."""
    tree: dict[str, Any] = {}
    for key in reference.all_keys(AppConfig):
        if key.is_live and "NAME" not in key.path and not OF_THE_START.search(key.path):
            *sections, name = key.path.replace("[]", "").split(".")
            functools.reduce(lambda inside, section: inside.setdefault(section, {}), sections, tree)[name] = True
    return tree


def live_keys_text() -> str:
    default_class = AppConfig.model_fields["default_class"].default
    return json.dumps({"default_class": default_class, "keys": live_keys()}, indent=2) + "\n"


def ray_env_text() -> str:
    return json.dumps(serve_env() | several_hosts_env(), indent=2) + "\n"


def golden_text(engine: Helm4, file: Path) -> str:
    manifests = documents(engine.render(values_of(file)))
    return "---\n".join(yaml.safe_dump(manifest, width=120) for manifest in manifests)


def main() -> None:
    PAGE.write_text(config.page())
    SCHEMA.write_text(schema_text())
    TABLE.write_text(table_text())
    LIVE_KEYS.write_text(live_keys_text())
    RAY_ENV.write_text(ray_env_text())
    with start_helm4() as engine:
        for file in FILES:
            golden(file).parent.mkdir(exist_ok=True)
            golden(file).write_text(golden_text(engine, file))


if __name__ == "__main__":
    main()
