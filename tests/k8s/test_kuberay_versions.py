"""Each KubeRay from 1.4 on: what the chart renders for it is in its CRD and by its rules, or the chart refuses."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.cases import FILES, named, values_of
from tests.k8s.engines import Helm4, Manifest, RefusedError, Values, documents, ray_service
from tests.k8s.kuberay import NEWEST, VERSIONS, ray_service_validator
from tests.k8s.operator_rules import broken_rules
from tests.k8s.reconciler import made, services

INCREMENTAL = named("incremental")


def _needed(values: Values) -> str:
    """The first KubeRay that has all that these values use."""
    upgrade = values.get("upgrade", {}).get("type", "NewCluster")
    if values.get("rayService", {}).get("suspend") or upgrade == INCREMENTAL["upgrade"]["type"]:
        return "1.7"
    return "1.5" if values.get("auth", {}).get("rayToken") else "1.4"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kuberay_takes_what_is_rendered_for_it_or_the_chart_refuses(helm4: Helm4, file: Path, version: str) -> None:
    values = values_of(file)
    values["kuberayVersion"] = VERSIONS[version]
    if version < _needed(values):
        with pytest.raises(RefusedError, match=rf"needs KubeRay 1\.\d.*, and kuberayVersion is {VERSIONS[version]}"):
            helm4.render(values)
        return
    service = ray_service(helm4.render(values))
    assert [error.message for error in ray_service_validator(version).iter_errors(service)] == []
    assert broken_rules(service, version) == []


def test_a_kuberay_before_1_4_is_refused(helm4: Helm4) -> None:
    with pytest.raises(RefusedError, match=r"kuberayVersion is 1\.3\.9: the chart needs KubeRay 1\.4"):
        helm4.render({"kuberayVersion": "1.3.9"})


def test_the_first_releases_of_1_5_know_no_token(helm4: Helm4) -> None:
    values = {"auth": {"rayToken": True}, "kuberayVersion": "1.5.0"}
    with pytest.raises(RefusedError, match=r"auth\.rayToken needs KubeRay 1\.5\.1"):
        helm4.render(values)
    assert ray_service(helm4.render({**values, "kuberayVersion": "1.5.1"}))


def _names_of_services(text: str) -> Iterator[str]:
    """Those that requests are sent to, wherever they stand."""
    for manifest in documents(text):
        if manifest["kind"] not in ("RayService", "NetworkPolicy"):
            yield from re.findall(r"[-\w]+-serve-svc", str(manifest))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_requests_go_only_to_services_that_the_operator_makes(rendered: dict[str, str], file: Path) -> None:
    text = rendered[file.stem]
    service = ray_service(text)
    there = services(service, made(service, "my-sluice-x7k2p"))
    assert set(_names_of_services(text)) <= there
    if named_by_values := service["spec"].get("serveService"):
        assert named_by_values["metadata"]["name"] in there


def test_the_rules_of_these_tests_know_what_an_incremental_upgrade_is_to_older_ones(helm4: Helm4) -> None:
    service: Manifest = ray_service(helm4.render(INCREMENTAL))
    assert broken_rules(service, NEWEST) == []
    assert broken_rules(service, "1.4") == ["upgradeStrategy.type NewClusterWithIncrementalUpgrade"]
    assert all("does nothing" in str(broken_rules(service, version)) for version in ("1.5", "1.6"))
    service["spec"]["serveService"] = {}
    assert "serveService is ignored" in str(broken_rules(service, NEWEST))
