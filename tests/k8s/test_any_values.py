"""Values drawn from the schema render to what KubeRay takes, or are refused with a message: no template crashes."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployments.config.application import AppConfig
from tests.k8s.engines import CHART, Helm4, RefusedError, application, ray_service, settings_of
from tests.k8s.kuberay import ray_service_validator
from tests.k8s.operator_rules import broken_rules

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# How Helm begins when the chart itself refuses; a crash begins with `template:`.
OWN_CHECKS = "execution error at (sluice/templates/rayservice.yaml:1:"
# Objects of Kubernetes, which the schema leaves open: one of each that is right.
SAMPLES: Mapping[str, Any] = {
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"key": "a", "operator": "Exists"}],
    "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}],
    "initContainers": [{"name": "a", "image": "b"}],
    "extraEnvFrom": [{"secretRef": {"name": "a"}}],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}],
    "clients": [{"podSelector": {}}],
    "monitoring": [{"podSelector": {}}],
    "extraEgress": [{"to": [{"podSelector": {}}]}],
    "podSecurityContext": {"runAsUser": 1000},
    "containerSecurityContext": {"privileged": False},
    "global": {"a": 1},
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
}


def value_of(name: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if name in SAMPLES:
        return st.just(SAMPLES[name])
    if "$ref" in schema:
        return value_of("", SCHEMA["definitions"][schema["$ref"].split("/")[-1]])
    if "anyOf" in schema or "allOf" in schema:
        parts = [part for part in schema.get("anyOf") or schema["allOf"] if part.get("type") != "null"]
        return value_of(name, parts[0])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return _BY_TYPE[_kind(schema)](schema)


def _kind(schema: dict[str, Any]) -> str:
    kind = schema["type"]
    return str(kind[0] if isinstance(kind, list) else kind)


def _object(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "properties" not in schema:
        each = schema.get("additionalProperties", {"type": "string"})
        names = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
        return st.dictionaries(
            names,
            value_of("", each if each else {"type": "string"}),
            min_size=schema.get("minProperties", 0),
            max_size=2,
        )
    fields = {name: value_of(name, value) for name, value in schema["properties"].items()}
    required = {name: fields[name] for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional={k: v for k, v in fields.items() if k not in required})


def _text(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        short = st.from_regex(schema["pattern"], fullmatch=True, alphabet=st.characters(codec="ascii"))
        return short.filter(lambda text: len(text) <= min(20, schema.get("maxLength", 20)))
    return st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)


_BY_TYPE: dict[str, Callable[[dict[str, Any]], st.SearchStrategy[Any]]] = {
    "object": _object,
    "string": _text,
    "boolean": lambda schema: st.booleans(),
    "integer": lambda s: st.integers(s.get("minimum", 0), min(s.get("maximum", 1 << 40), s.get("minimum", 0) + 40)),
    "number": lambda s: st.floats(s.get("minimum", 0.25), s.get("maximum", s.get("minimum", 0.25) + 0.5)),
    "array": lambda schema: st.lists(value_of("", schema.get("items", {"type": "string"})), max_size=3),
}


@st.composite
def any_values(draw: st.DrawFn) -> dict[str, Any]:
    """A few sections at a time: all at once, some check would always refuse."""
    sections = draw(st.sets(st.sampled_from(sorted(SCHEMA["properties"])), max_size=4))
    return {name: draw(value_of(name, SCHEMA["properties"][name])) for name in sorted(sections)}


@example(values={"routerGroup": {"replicas": 1, "rayCpus": 2, "shmSize": "0.1"}})
@example(values={"auth": {"rayToken": True}, "rayVersion": "2.51.9"})
@example(values={"modelCache": {"enabled": True, "existingClaim": "0"}})
@given(values=any_values())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_values_render_or_are_refused(helm4: Helm4, values: dict[str, Any]) -> None:
    try:
        text = helm4.render(values)
    except RefusedError as refused:
        known = "don't meet the specifications of the schema" in str(refused)
        assert known or str(refused).startswith(OWN_CHECKS), refused
        return
    service = ray_service(text)
    assert [error.message for error in ray_service_validator().iter_errors(service)] == []
    assert broken_rules(service) == []
    assert application(text)["args"]["engine"]["resources"] == {"sluice_engine": 1}


def test_the_applications_own_defaults_pass_the_schema(helm4: Helm4) -> None:
    """Values that repeat the defaults change nothing."""
    app = AppConfig(model="demo").model_dump(mode="json", exclude_none=True)
    for section in ("engine", "keys"):
        allowed = SCHEMA["definitions"][f"app{section.capitalize()}Section"]["properties"]
        app[section] = {key: value for key, value in app[section].items() if key in allowed}
    args = settings_of(helm4.render({"app": app}))
    assert AppConfig.model_validate(args).bins == AppConfig(model="demo").bins
