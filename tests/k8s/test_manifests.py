"""Every values file: both engines say the same, and what they say is what KubeRay and Kubernetes take."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.process.environment import serve_env, several_hosts_env
from tests.k8s.cases import FILES, golden, values_of, with_password
from tests.k8s.engines import CHART, Engine, Helm3, Helm4, Manifest, documents, ray_service
from tests.k8s.operator_rules import broken_rules
from tests.k8s.refresh import golden_text
from tests.k8s.schemas import HIGHEST, LOWEST, errors, templates_of

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


@every_file
def test_lint_finds_nothing(helm: Engine, file: Path) -> None:
    assert helm.lint(values_of(file)) == []


@every_file
def test_both_engines_render_the_same_objects(helm4: Helm4, file: Path) -> None:
    values = values_of(file)
    assert documents(Helm3().render(values)) == documents(helm4.render(values))


@every_file
def test_the_golden_is_what_is_rendered(helm4: Helm4, file: Path) -> None:
    """After a change that is meant: python -m tests.k8s.refresh"""
    assert golden(file).read_text() == golden_text(helm4, file)


@every_file
@pytest.mark.parametrize("version", [LOWEST, HIGHEST])
def test_kubernetes_takes_every_object(rendered: dict[str, str], file: Path, version: str) -> None:
    found = {f"{m['kind']}/{m['metadata']['name']}": errors(m, version) for m in documents(rendered[file.stem])}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@every_file
def test_the_operators_own_rules_hold(rendered: dict[str, str], file: Path) -> None:
    assert broken_rules(ray_service(rendered[file.stem])) == []


@every_file
def test_pods_have_rays_environment_as_hosts_have_it(rendered: dict[str, str], file: Path) -> None:
    service = ray_service(rendered[file.stem])
    grace_s = str(values_of(file).get("drainSeconds", 3600))
    wanted = serve_env() | several_hosts_env() | {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": grace_s}
    for group, template in templates_of(service).items():
        env = {e["name"]: e.get("value") for e in template["spec"]["containers"][0]["env"]}
        assert wanted.items() <= env.items(), group


@every_file
def test_all_containers_run_without_privileges(rendered: dict[str, str], file: Path) -> None:
    for name, pod in _pods(rendered[file.stem]).items():
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert not re.search(r":latest$", container["image"]), name
            assert "memory" in container["resources"]["limits"], name


def _pods(text: str) -> dict[str, Any]:
    found = {group: template["spec"] for group, template in templates_of(ray_service(text)).items()}
    for manifest in documents(text):
        if manifest["kind"] in ("Pod", "StatefulSet", "Job"):
            spec = manifest["spec"]
            found[manifest["metadata"]["name"]] = spec if manifest["kind"] == "Pod" else spec["template"]["spec"]
    return found


@every_file
def test_no_password_or_token_stands_outside_a_secret(rendered: dict[str, str], file: Path) -> None:
    for manifest in documents(rendered[file.stem]):
        if manifest["kind"] != "Secret":
            assert "not-a-secret" not in str(manifest) and "hub-token-of-nobody" not in str(manifest)


@pytest.mark.parametrize(("gpus", "build"), [(0, "cpu"), (2, "gpu")])
def test_without_a_tag_all_pods_have_the_build_that_the_engines_need(helm: Engine, gpus: int, build: str) -> None:
    pods = _pods(helm.render(with_password({"gpusPerEngine": gpus, "app": {"vllm_args": ["-tp", "2"]}})))
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    images = {name: pod["containers"][0]["image"] for name, pod in pods.items() if name != "my-sluice-redis"}
    assert set(images) == {"head", "router", "engine", "my-sluice-test", "my-sluice-config-check"}
    assert set(images.values()) == {f"sluice-serve/sluice:{version}-{build}"}


@pytest.mark.parametrize("file", sorted(CHART.glob("examples/*.yaml")), ids=lambda file: file.stem)
def test_examples_say_how_to_make_the_secrets_that_they_name(file: Path) -> None:
    named = set(_secrets(values_of(file)))
    assert named == set(re.findall(r"^#   kubectl create secret [a-z-]+ (\S+)", file.read_text(), re.MULTILINE))


def _secrets(values: dict[str, Any]) -> Iterator[str]:
    yield from (secret["name"] for secret in values.get("imagePullSecrets", []))
    for key, value in values.items():
        if key in ("existingSecret", "apiKeySecret"):
            yield value
        elif isinstance(value, dict):
            yield from _secrets(value)


def test_engine_pods_have_gpus_for_all_their_engines_and_others_none(rendered: dict[str, str]) -> None:
    templates = templates_of(ray_service(rendered["everything-values"]))
    gpus = {
        group: t["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for group, t in templates.items()
    }
    assert gpus == {"head": None, "router": None, "h100": "4", "spot": "2"}


def test_workers_drain_before_they_stop_and_have_the_time_for_it(rendered: dict[str, str]) -> None:
    templates = templates_of(ray_service(rendered["everything-values"]))
    for group in ("router", "h100", "spot"):
        spec = templates[group]["spec"]
        assert spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "900"
        assert spec["terminationGracePeriodSeconds"] > 900
    assert "lifecycle" not in templates["head"]["spec"]["containers"][0]


def test_sluice_and_ray_use_different_databases(rendered: dict[str, str]) -> None:
    for text in rendered.values():
        service = ray_service(text)
        options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        env = {e["name"]: e.get("value") for e in templates_of(service)["head"]["spec"]["containers"][0]["env"]}
        if options:
            assert re.fullmatch(r"rediss?://[^/]+", options["redisAddress"]), "Ray's is database 0"
            assert re.search(r":\d+/[1-9]\d*$", env["SLUICE_REDIS_URL"])


def test_every_mounted_volume_is_there(rendered: dict[str, str]) -> None:
    for text in rendered.values():
        for name, pod in _pods(text).items():
            volumes = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
            mounts = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])}
            assert mounts <= volumes, name


MISTAKES = {
    "a number among Ray's start parameters": (("headGroupSpec", "rayStartParams", "num-cpus"), 0, "is not of type"),
    "an unknown autoscaler option": (("autoscalerOptions", "idleTimeout"), 60, "idleTimeout"),
    "a misspelt field of a pod": (("headGroupSpec", "template", "spec", "restartPolicyy"), "Never", "restartPolicyy"),
    "a group without a template": (("workerGroupSpecs", 0, "template"), None, "None is not of type"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_schemas_of_these_tests_find(rendered: dict[str, str], mistake: str) -> None:
    path, value, message = MISTAKES[mistake]
    service = copy.deepcopy(ray_service(rendered["everything-values"]))
    _put(service["spec"]["rayClusterConfig"], path, value)
    assert message in str(errors(service, HIGHEST))


def _put(target: Any, path: tuple[Any, ...], value: object) -> None:
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value


BROKEN: dict[str, tuple[tuple[Any, ...], Any]] = {
    "longer than 47": (("metadata", "name"), "a" * 48),
    "minReplicas 5 > maxReplicas": (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplicas"), 5),
    "labels in rayStartParams": (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "labels"), "a=b"),
    "needs autoscaler v2": (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v1"),
    "needs Ray 2.52": (("spec", "rayClusterConfig", "rayVersion"), "2.51.0"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_the_rules_of_these_tests_find(rendered: dict[str, str], message: str) -> None:
    service: Manifest = copy.deepcopy(ray_service(rendered["everything-values"]))
    _put(service, *BROKEN[message])
    assert any(message in rule for rule in broken_rules(service))


def test_the_rules_of_these_tests_find_an_incremental_upgrade_that_nothing_scales(rendered: dict[str, str]) -> None:
    service = ray_service(rendered["incremental-values"])
    service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = False
    assert "incremental upgrade without autoscaling" in broken_rules(service)
