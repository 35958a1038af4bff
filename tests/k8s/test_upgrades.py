"""What an upgrade touches.

Any change below rayClusterConfig, but for the numbers of pods, starts a second cluster with as many GPUs
again; a change of serveConfigV2 alone reaches the running one.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.cases import FILES, named, values_of, with_password
from tests.k8s.engines import CHART, Engine, Helm4, Manifest, Values, documents, ray_service
from tests.k8s.kuberay import NEWEST, VERSIONS
from tests.k8s.reconciler import edited, made, reconciled

BASE = named("eight-h100")
APP_ONLY: dict[str, Values] = {
    "another class": {"app": {"classes": {"batch": {"ttft_s": 100}}}},
    "other bins": {"app": {"bins": {"count": 8}}},
    "longer drains, within the pods' time": {"app": {"engine": {"drain_timeout_s": 1800}}},
    "another model": {"app": {"model": "org/other"}},
    "other arguments of vLLM": {"app": {"vllm_args": ["--max-model-len", "4096"]}},
    "fewer engines": {"app": {"engine": {"autoscaling": {"min_replicas": 1, "max_replicas": 4}}}},
    "shadow mode": {"app": {"mode": "shadow"}},
}
AROUND_THE_CLUSTER: dict[str, Values] = {
    "alerts": {"prometheusRule": {"ttftSeconds": {"interactive": 3}}},
    "labels": {"commonLabels": {"team": "other"}},
    "an ingress": {"ingress": {"enabled": True, "hosts": ["a.example.org"]}},
    "the budget": {"podDisruptionBudget": {"maxUnavailable": 2}},
    "network peers": {"networkPolicy": {"egressPorts": [443]}},
    "Redis' size": {"redis": {"internal": {"maxMemory": "600mb"}}},
    "the way of upgrading": {"upgrade": {"type": "None"}},
    "the service": {"service": {"type": "LoadBalancer"}},
}
OF_PODS: dict[str, Values] = {
    "the image": {"image": {"tag": "0.2.0-gpu"}},
    "memory": {"head": {"resources": {"limits": {"memory": "8Gi"}}}},
    "environment": {"extraEnv": [{"name": "A", "value": "b"}]},
    "the time to drain": {"drainSeconds": 7200},
    "GPUs of an engine": {"gpusPerEngine": 2, "app": {"vllm_args": ["-tp", "2"]}},
    "another source of keys": {"auth": {"apiKeys": {"existingSecret": "other"}}},
}


def changed(values: Values, change: Values) -> Values:
    merged = copy.deepcopy(values)
    for key, value in change.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = changed(merged[key], value) if both else value
    return merged


def _spec(helm: Engine, values: Values) -> Manifest:
    spec: Manifest = ray_service(helm.render(values))["spec"]
    return spec


@pytest.mark.parametrize("change", APP_ONLY)
def test_a_change_of_the_application_leaves_the_cluster_alone(helm: Engine, change: str) -> None:
    before, after = _spec(helm, BASE), _spec(helm, changed(BASE, APP_ONLY[change]))
    assert before["rayClusterConfig"] == after["rayClusterConfig"]
    assert before["serveConfigV2"] != after["serveConfigV2"]


@pytest.mark.parametrize("change", AROUND_THE_CLUSTER)
def test_a_change_around_the_cluster_touches_neither_it_nor_the_application(helm4: Helm4, change: str) -> None:
    text, other = helm4.render(BASE), helm4.render(changed(BASE, AROUND_THE_CLUSTER[change]))
    assert text != other
    before, after = ray_service(text)["spec"], ray_service(other)["spec"]
    assert (before["rayClusterConfig"], before["serveConfigV2"]) == (after["rayClusterConfig"], after["serveConfigV2"])


def _redis_pod(helm: Engine, change: Values) -> Manifest:
    text = helm.render(changed(with_password(BASE), {"redis": change}))
    redis = next(manifest for manifest in documents(text) if manifest["kind"] == "StatefulSet")
    template: Manifest = redis["spec"]["template"]
    return template


def test_redis_restarts_with_another_configuration(helm: Engine) -> None:
    before, after = _redis_pod(helm, {}), _redis_pod(helm, {"internal": {"maxMemory": "600mb"}})
    assert before != after


def test_no_annotation_follows_from_the_password(helm: Engine) -> None:
    assert _redis_pod(helm, {}) == _redis_pod(helm, {"auth": {"password": "another"}})


@pytest.mark.parametrize("change", OF_PODS)
def test_a_change_of_pods_is_a_change_of_the_cluster(helm4: Helm4, change: str) -> None:
    before, after = _spec(helm4, BASE), _spec(helm4, changed(BASE, OF_PODS[change]))
    assert before["rayClusterConfig"] != after["rayClusterConfig"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_new_version_of_the_chart_leaves_the_cluster_alone(helm: Engine, file: Path, tmp_path: Path) -> None:
    chart = tmp_path / "sluice"
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(text.replace("version: 0.1.0\n", "version: 9.9.9\n"))
    old, new = helm.render(values_of(file)), helm.render(values_of(file), chart)
    assert "9.9.9" in new, "the copy is newer"
    assert ray_service(old)["spec"] == ray_service(new)["spec"]


def test_numbers_of_pods_are_all_that_scaling_changes(helm4: Helm4) -> None:
    more = copy.deepcopy(BASE)
    more["engineGroups"][0] |= {"replicas": 4, "minReplicas": 4, "maxReplicas": 16}
    before, after = (_spec(helm4, values)["rayClusterConfig"] for values in (BASE, more))
    assert before != after
    assert _without_numbers(before) == _without_numbers(after)


def _without_numbers(cluster: Any) -> Any:
    numbers = {"replicas", "minReplicas", "maxReplicas"}
    groups = [{k: v for k, v in group.items() if k not in numbers} for group in cluster["workerGroupSpecs"]]
    return {**cluster, "workerGroupSpecs": groups}


def test_an_appended_group_leaves_those_before_it_as_they_are(helm4: Helm4) -> None:
    more = copy.deepcopy(BASE)
    more["engineGroups"].append({"name": "spot", "replicas": 2, "resources": {"limits": {"memory": "64Gi"}}})
    before, after = (_spec(helm4, values)["rayClusterConfig"]["workerGroupSpecs"] for values in (BASE, more))
    assert after[: len(before)] == before and [group["groupName"] for group in after[len(before) :]] == ["spot"]


def test_rendering_twice_gives_the_same_bytes(helm: Engine) -> None:
    assert helm.render(BASE | {"redis": {"auth": {"password": "a"}}}) == helm.render(
        BASE | {"redis": {"auth": {"password": "a"}}}
    )


def test_without_a_given_password_only_the_secret_differs_from_one_rendering_to_the_next(helm4: Helm4) -> None:
    first, second = helm4.render({}), helm4.render({})
    assert first != second
    assert ray_service(first) == ray_service(second)


every_kuberay = pytest.mark.parametrize("kuberay", VERSIONS)


def _service(helm: Engine, values: Values, **group: int) -> Manifest:
    first, *others = values["engineGroups"]
    return ray_service(helm.render({**values, "engineGroups": [{**first, **group}, *others]}))


def _numbers(cluster: Any) -> dict[str, int]:
    group = next(each for each in cluster.spec["workerGroupSpecs"] if each["groupName"] == "h100")
    return {name: group[name] for name in ("replicas", "minReplicas", "maxReplicas")}


SPOT = {"name": "spot", "replicas": 2, "resources": {"limits": {"memory": "64Gi"}}}
MORE = {"replicas": 4, "minReplicas": 4, "maxReplicas": 16}


@every_kuberay
def test_numbers_of_pods_in_values_do_not_reach_a_running_cluster(helm4: Helm4, kuberay: str) -> None:
    cluster = made(_service(helm4, BASE), kuberay=kuberay)
    assert reconciled(_service(helm4, BASE, **MORE), cluster, kuberay) == (cluster, False)


@every_kuberay
def test_an_edit_of_the_cluster_holds_while_only_the_application_changes(helm4: Helm4, kuberay: str) -> None:
    cluster = edited(made(_service(helm4, BASE), kuberay=kuberay), "h100", **MORE)
    other = changed(BASE, APP_ONLY["another class"])
    assert reconciled(_service(helm4, other), cluster, kuberay) == (cluster, False)


@every_kuberay
def test_an_appended_group_undoes_an_edit_unless_values_have_the_same_numbers(helm4: Helm4, kuberay: str) -> None:
    """So docs/guides/upgrade.md has both changed, values first."""
    cluster = edited(made(_service(helm4, BASE), kuberay=kuberay), "h100", **MORE)
    more = {**BASE, "engineGroups": [*BASE["engineGroups"], SPOT]}
    after, second = reconciled(_service(helm4, more), cluster, kuberay)
    assert not second and len(after.spec["workerGroupSpecs"]) == 3 and _numbers(after) != MORE
    after, second = reconciled(_service(helm4, more, **MORE), cluster, kuberay)
    assert not second and _numbers(after) == MORE


def test_another_kuberay_undoes_an_edit_unless_values_have_the_same_numbers(helm4: Helm4) -> None:
    cluster = edited(made(_service(helm4, BASE), kuberay="1.6"), "h100", **MORE)
    assert _numbers(reconciled(_service(helm4, BASE), cluster, NEWEST)[0]) != MORE
    assert _numbers(reconciled(_service(helm4, BASE, **MORE), cluster, NEWEST)[0]) == MORE


@every_kuberay
def test_tolerations_reach_a_running_cluster_by_a_second_one_or_not_at_all(helm4: Helm4, kuberay: str) -> None:
    cluster = made(_service(helm4, BASE), kuberay=kuberay)
    first, *others = BASE["engineGroups"]
    tolerant = {**BASE, "engineGroups": [{**first, "tolerations": [{"operator": "Exists"}]}, *others]}
    assert reconciled(_service(helm4, tolerant), cluster, kuberay) == (cluster, kuberay == "1.4")


@every_kuberay
@pytest.mark.parametrize("change", OF_PODS)
def test_a_change_of_pods_starts_a_second_cluster_or_none(helm4: Helm4, change: str, kuberay: str) -> None:
    cluster = made(_service(helm4, BASE), kuberay=kuberay)
    other = changed(BASE, OF_PODS[change])
    assert reconciled(_service(helm4, other), cluster, kuberay) == (cluster, True)
    other["upgrade"] = {"type": "None"}
    assert reconciled(_service(helm4, other), cluster, kuberay) == (cluster, False)
