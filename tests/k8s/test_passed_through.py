"""What values say of Kubernetes' own objects and of the application arrives as it is, whatever it is."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.k8s.cases import FILES, holds, values_of, with_password
from tests.k8s.engines import CHART, Helm4, Manifest, RefusedError, Values, documents, ray_service, settings_of
from tests.k8s.schemas import templates_of
from tests.k8s.test_any_values import SCHEMA, value_of

GPU = "nvidia.com/gpu"
ROOM = {"replicas": 1000, "rayCpus": 1024}
_DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
WIDE: Values = {"name": "engine", "replicas": 1000, "enginesPerPod": 64, "resources": {}}

NAMES = st.from_regex(r"[a-z]{1,6}", fullmatch=True)
# What YAML could take for something else, or break at.
TEXTS = st.sampled_from(["true", "1e3", "no", "~", "a: b", "# c", "two\nlines", "'", '"', "{{ .x }}", "é"]) | NAMES
NUMBERS = st.integers(0, 1 << 31) | st.booleans()
OBJECTS = st.dictionaries(
    NAMES,
    st.recursive(TEXTS | NUMBERS, lambda each: st.lists(each, max_size=2) | st.dictionaries(NAMES, each, max_size=2)),
    min_size=1,
    max_size=2,
)
LISTS = st.lists(OBJECTS, min_size=1, max_size=2)
MAPS = st.dictionaries(NAMES, TEXTS, min_size=1, max_size=2)
QUANTITIES = st.dictionaries(
    st.sampled_from(["cpu", "memory", "ephemeral-storage"]), st.sampled_from(["1", "250m", "3Gi", 2, 1.5]), max_size=3
)
NAMED = st.lists(st.builds(lambda name, more: {**more, "name": name}, NAMES, OBJECTS), min_size=1, max_size=2)
RESOURCES = st.fixed_dictionaries({}, optional={"requests": QUANTITIES, "limits": QUANTITIES})
POD = {
    "resources": RESOURCES,
    "nodeSelector": MAPS,
    "tolerations": LISTS,
    "affinity": OBJECTS,
    "topologySpreadConstraints": LISTS,
    "priorityClassName": NAMES,
    "runtimeClassName": NAMES,
    "podLabels": MAPS,
    "podAnnotations": MAPS,
    "extraEnv": st.lists(st.fixed_dictionaries({"name": NAMES, "value": TEXTS}), min_size=1, max_size=2),
    "extraVolumes": NAMED,
    "extraVolumeMounts": st.lists(
        st.fixed_dictionaries({"name": NAMES, "mountPath": NAMES.map("/m/{}".format)}), min_size=1, max_size=2
    ),
    "initContainers": NAMED,
    "extraContainers": NAMED,
}
# Of values that are not a group's.
AROUND: dict[str, Any] = {
    "podSecurityContext": OBJECTS,
    "containerSecurityContext": OBJECTS,
    "extraEnvFrom": LISTS,
    "extraContainers": NAMED,
    "rayService.annotations": MAPS,
    "imagePullSecrets": st.lists(st.fixed_dictionaries({"name": NAMES}), min_size=1, max_size=2),
    "commonLabels": MAPS,
    "redis.internal.resources": RESOURCES,
    "redis.internal.nodeSelector": MAPS,
    "redis.internal.tolerations": LISTS,
    "redis.internal.affinity": OBJECTS,
    "autoscaler.resources": RESOURCES,
    "service.annotations": MAPS,
    "ingress.annotations": MAPS,
    "ingress.tls": LISTS,
    "httpRoute.parentRefs": NAMED,
    "podMonitor.labels": MAPS,
    "dashboards.labels": MAPS,
    "prometheusRule.labels": MAPS,
    "networkPolicy.clients": LISTS,
    "networkPolicy.monitoring": LISTS,
    "networkPolicy.extraEgress": LISTS,
}
WHERE: dict[str, Callable[[dict[str, Manifest]], Any]] = {
    "podSecurityContext": lambda all_: _head(all_)["spec"]["securityContext"],
    "containerSecurityContext": lambda all_: _head(all_)["spec"]["containers"][0]["securityContext"],
    "extraEnvFrom": lambda all_: _head(all_)["spec"]["containers"][0]["envFrom"],
    "extraContainers": lambda all_: _head(all_)["spec"]["containers"][1:],
    "rayService.annotations": lambda all_: all_["RayService my-sluice"]["metadata"]["annotations"],
    "imagePullSecrets": lambda all_: _head(all_)["spec"]["imagePullSecrets"],
    "commonLabels": lambda all_: all_["RayService my-sluice"]["metadata"]["labels"],
    "redis.internal.resources": lambda all_: _redis(all_)["containers"][0]["resources"],
    "redis.internal.nodeSelector": lambda all_: _redis(all_)["nodeSelector"],
    "redis.internal.tolerations": lambda all_: _redis(all_)["tolerations"],
    "redis.internal.affinity": lambda all_: _redis(all_)["affinity"],
    "autoscaler.resources": lambda all_: _cluster(all_)["autoscalerOptions"]["resources"],
    "service.annotations": lambda all_: all_["RayService my-sluice"]["spec"]["serveService"]["metadata"]["annotations"],
    "ingress.annotations": lambda all_: all_["Ingress my-sluice"]["metadata"]["annotations"],
    "ingress.tls": lambda all_: all_["Ingress my-sluice"]["spec"]["tls"],
    "httpRoute.parentRefs": lambda all_: all_["HTTPRoute my-sluice"]["spec"]["parentRefs"],
    "podMonitor.labels": lambda all_: all_["PodMonitor my-sluice-ray"]["metadata"]["labels"],
    "dashboards.labels": lambda all_: all_["ConfigMap my-sluice-dashboards"]["metadata"]["labels"],
    "prometheusRule.labels": lambda all_: all_["PrometheusRule my-sluice"]["metadata"]["labels"],
    "networkPolicy.clients": lambda all_: _policy(all_)["ingress"][2]["from"][:-1],
    "networkPolicy.monitoring": lambda all_: _policy(all_)["ingress"][3]["from"],
    "networkPolicy.extraEgress": lambda all_: _policy(all_)["egress"][4:],
}


def _cluster(all_: dict[str, Manifest]) -> Manifest:
    cluster: Manifest = all_["RayService my-sluice"]["spec"]["rayClusterConfig"]
    return cluster


def _head(all_: dict[str, Manifest]) -> Manifest:
    template: Manifest = _cluster(all_)["headGroupSpec"]["template"]
    return template


def _redis(all_: dict[str, Manifest]) -> Manifest:
    pod: Manifest = all_["StatefulSet my-sluice-redis"]["spec"]["template"]["spec"]
    return pod


def _policy(all_: dict[str, Manifest]) -> Manifest:
    policy: Manifest = all_["NetworkPolicy my-sluice-ray"]["spec"]
    return policy


def _arrived(template: Manifest, field: str) -> Any:
    pod, container = template["spec"], template["spec"]["containers"][0]
    match field:
        case "resources":
            return container["resources"]
        case "podLabels":
            return {name: value for name, value in template["metadata"]["labels"].items() if "/" not in name}
        case "podAnnotations":
            return template["metadata"]["annotations"]
        case "extraContainers":
            return pod["containers"][1:]
        case "extraEnv":
            return [entry for entry in container["env"] if entry["name"].islower()]
        case "extraVolumes":
            return [
                volume for volume in pod["volumes"] if volume["name"] not in ("dshm", "ray-logs", "scripts", "models")
            ]
        case "extraVolumeMounts":
            return [mount for mount in container["volumeMounts"] if mount["mountPath"].startswith("/m/")]
    return pod[field]


def _with_gpus(resources: dict[str, Any], gpus: int) -> dict[str, Any]:
    if not gpus:
        return resources
    return {part: {**resources.get(part, {}), GPU: str(gpus)} for part in ("requests", "limits")}


@given(
    groups=st.fixed_dictionaries(
        {name: st.fixed_dictionaries({}, optional=POD) for name in ("head", "router", "engine")}
    ),
    gpus=st.integers(0, 3),
    engines=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_a_group_says_of_its_pods_arrives(
    helm4: Helm4, groups: dict[str, Values], gpus: int, engines: int
) -> None:
    engine = {"name": "engine", "replicas": 1, "enginesPerPod": engines, "resources": {}, **groups["engine"]}
    values = {
        "app": {"vllm_args": ["-tp", str(gpus)]},
        "gpusPerEngine": gpus,
        "head": groups["head"],
        "routerGroup": {"replicas": 1, "rayCpus": 2, **groups["router"]},
        "engineGroups": [engine],
    }
    templates = templates_of(ray_service(helm4.render(values)))
    defaults = _DEFAULTS["head"]["resources"]
    for name, given_ in groups.items():
        for field, value in given_.items():
            wanted = value
            if field == "resources" and name != "engine":  # Helm lays these over the defaults
                wanted = {part: {**defaults[part], **value.get(part, {})} for part in ("requests", "limits")}
            if field == "resources" and name == "engine":
                wanted = _with_gpus(value, gpus * engines)
            assert _arrived(templates[name], field) == wanted, (name, field)


@given(given_=st.fixed_dictionaries({}, optional=AROUND))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_what_values_say_of_everything_else_arrives(helm4: Helm4, given_: dict[str, Any]) -> None:
    values: Values = {
        "autoscaler": {"enabled": True},
        "ingress": {"enabled": True, "hosts": ["a"]},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        "podMonitor": {"enabled": True},
        "dashboards": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "networkPolicy": {"clients": [{}], "monitoring": [{}]},
    }
    defaults = {path: _at(_DEFAULTS, path) for path in given_}
    for path, value in given_.items():
        _put(values, path, value)
    all_ = {f"{m['kind']} {m['metadata']['name']}": m for m in documents(helm4.render(values))}
    for path, value in given_.items():
        wanted = {**defaults[path], **value} if isinstance(value, dict) else value
        if path.endswith("resources"):
            wanted = {part: {**defaults[path].get(part, {}), **value.get(part, {})} for part in ("requests", "limits")}
        if path.endswith("labels"):
            wanted = value
        arrived = WHERE[path](all_)
        if path.lower().endswith("labels"):  # several maps of labels meet there
            arrived = {name: arrived[name] for name in wanted}
        assert arrived == wanted, path


def _put(values: Values, path: str, value: Any) -> None:
    *folders, last = path.split(".")
    for folder in folders:
        values = values.setdefault(folder, {})
    values[last] = value


def _at(values: Values, path: str) -> Any:
    for step in path.split("."):
        values = values[step]
    return values


@given(app=value_of("", SCHEMA["definitions"]["app"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_setting_of_the_application_arrives(helm4: Helm4, app: dict[str, Any]) -> None:
    """With room for as many replicas as it asks for, and GPUs, keys and prefill pods, which the chart adds."""
    models = [app, *app.get("more_models", [])]
    reads = any((model.get("engine") or {}).get("prefill") for model in models)
    values = {
        "app": app,
        "gpusPerEngine": 1,
        "drainSeconds": 1 << 41,
        "routerGroup": ROOM,
        "engineGroups": [WIDE, {**WIDE, "name": "prefill", "role": "prefill" if reads else "engine"}],
        "auth": {"apiKeys": {"existingSecret": "keys"}},
    }
    try:
        args = settings_of(helm4.render(values))
    except RefusedError:
        return
    assert holds(args, app)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_limits_of_every_engine_pod_are_those_of_its_values(rendered: dict[str, str], file: Path) -> None:
    """Requests were once copied into them."""
    templates = templates_of(ray_service(rendered[file.stem]))
    values = values_of(file)
    for group in values.get("engineGroups", _DEFAULTS["engineGroups"]):
        gpus = values.get("gpusPerEngine", 0) * group.get("enginesPerPod", 1) // values.get("nodesPerEngine", 1)
        assert templates[group["name"]]["spec"]["containers"][0]["resources"] == _with_gpus(group["resources"], gpus)


def test_labels_that_meet_stand_once_and_the_narrower_counts(helm4: Helm4) -> None:
    values = {"commonLabels": {"team": "all"}, "podMonitor": {"enabled": True, "labels": {"team": "mine"}}}
    text = helm4.render(with_password(values))
    (monitor,) = [part for part in text.split("---") if 'name: "my-sluice-ray"' in part and "PodMonitor" in part]
    assert re.findall(r"^ +team: .*$", monitor, re.MULTILINE) == ["    team: mine"]


def test_no_template_merges_maps() -> None:
    """`merge` changes its first map, fills what is 0 or false there from the second, and shares what lies deeper."""
    for template in CHART.glob("templates/**/*"):
        if template.is_file():
            assert not re.search(r"\(\s*(must)?[mM]erge\w*\s", template.read_text()), template
