"""Install, upgrade, rollback, test and uninstall by the real Helm against a server that admits as Kubernetes does."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.k8s.cases import named
from tests.k8s.engines import CHART, RefusedError
from tests.k8s.fake_api import Cluster, serve
from tests.k8s.releases import Releases, releases


class Site(NamedTuple):
    cluster: Cluster
    helm: Releases


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with serve() as (cluster, kubeconfig):
        (tmp_path / "kubeconfig").write_text(kubeconfig)
        with releases(tmp_path / "kubeconfig") as helm:
            yield Site(cluster, helm)


def test_a_release_from_install_to_uninstall(site: Site) -> None:
    values = named("one-gpu")
    site.helm.install(values)
    first = site.cluster.one("RayService")["spec"]
    assert "StatefulSet" in site.cluster.kinds()

    site.helm.upgrade({**values, "app": {**values["app"], "order": {"policy": "sjf"}}})
    second = site.cluster.one("RayService")["spec"]
    assert first["rayClusterConfig"] == second["rayClusterConfig"]
    assert first["serveConfigV2"] != second["serveConfigV2"]

    site.helm.rollback(1)
    assert site.cluster.one("RayService")["spec"] == first
    assert "a token came" in site.helm.test()
    assert site.helm.history() == ["superseded", "superseded", "deployed"]

    site.helm.uninstall()
    # Downloaded models stay, as docs/start/install-kubernetes.md says; the pod of the test is Helm's to keep.
    assert site.cluster.kinds() == ["PersistentVolumeClaim", "Pod"]


def test_a_configuration_that_the_application_refuses_changes_nothing(site: Site) -> None:
    """Neither at the first install nor later, and the job stays, for its log."""
    values = named("one-gpu")
    site.cluster.failing.add("my-sluice-config-check")
    with pytest.raises(RefusedError, match="config-check"):
        site.helm.install(values)
    assert site.cluster.kinds() == ["Job"]

    site.cluster.failing.clear()
    site.helm.upgrade(values)
    before = site.cluster.one("RayService")["spec"]
    assert "Job" not in site.cluster.kinds(), "one that succeeded goes"

    site.cluster.failing.add("my-sluice-config-check")
    with pytest.raises(RefusedError, match="config-check"):
        site.helm.upgrade({**values, "app": {**values["app"], "vllm_args": ["--max-modle-len", "16384"]}})
    assert site.cluster.one("RayService")["spec"] == before


def test_a_random_password_of_redis_stays_over_upgrades(site: Site) -> None:
    site.helm.install({})
    before = site.cluster.one("Secret")["data"]["password"]
    site.helm.upgrade({"app": {"mode": "stock"}})
    assert site.cluster.one("Secret")["data"]["password"] == before
    assert len(before) >= 40


def test_the_server_refuses_a_chart_with_a_mistake(site: Site, tmp_path: Path) -> None:
    """So that the tests above say something."""
    chart = tmp_path / "sluice"
    shutil.copytree(CHART, chart)
    template = chart / "templates/rayservice.yaml"
    template.write_text(template.read_text().replace('num-cpus: "0"', "num-cpus: 0"))
    with pytest.raises(RefusedError, match="num-cpus: 0 is not of type 'string'"):
        site.helm.install(named("one-gpu"), chart)
