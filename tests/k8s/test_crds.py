"""KubeRay's own CRDs over every RayService of the chart. Runs where KUBERAY_CRDS names a folder of them."""

import os
from pathlib import Path

from tests.k8s.engines import ray_service
from tests.k8s.schemas import crd_validators


def test_the_crds_of_kuberay_take_every_ray_service(rendered: dict[str, str]) -> None:
    validator = crd_validators(Path(os.environ["KUBERAY_CRDS"]))["RayService"]
    for name, text in rendered.items():
        assert [f"{list(e.path)}: {e.message}" for e in validator.iter_errors(ray_service(text))] == [], name


def test_the_crds_refuse_a_misspelt_field(rendered: dict[str, str]) -> None:
    validator = crd_validators(Path(os.environ["KUBERAY_CRDS"]))["RayService"]
    service = ray_service(rendered["one-gpu"])
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["tolerationz"] = []
    assert "tolerationz" in str([error.message for error in validator.iter_errors(service)])
