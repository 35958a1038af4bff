"""The schemas of custom resources are no formality: they take what the chart makes, and refuse what is misspelt."""

from typing import Any

import pytest

from tests.k8s.engines import documents, ray_service
from tests.k8s.kuberay import ray_service_validator
from tests.k8s.schemas import CUSTOM, HIGHEST, errors


def test_kuberay_takes_every_ray_service(rendered: dict[str, str]) -> None:
    for name, text in rendered.items():
        found = ray_service_validator().iter_errors(ray_service(text))
        assert [f"{list(error.path)}: {error.message}" for error in found] == [], name


def test_kuberay_refuses_a_misspelt_field(rendered: dict[str, str]) -> None:
    service = ray_service(rendered["one-gpu"])
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["tolerationz"] = []
    assert "tolerationz" in str(errors(service, HIGHEST))


@pytest.mark.parametrize("kind", CUSTOM)
def test_a_misspelt_field_deep_inside_is_refused(rendered: dict[str, str], kind: str) -> None:
    everything = (document for text in rendered.values() for document in documents(text))
    resource = next(document for document in everything if document["kind"] == kind)
    assert errors(resource, HIGHEST) == []
    _innermost(resource["spec"])["mispelt"] = "x"
    assert "mispelt" in str(errors(resource, HIGHEST))


def _innermost(spec: Any) -> dict[str, Any]:
    """The last mapping of fixed fields in the last list."""
    last = [value for value in spec.values() if isinstance(value, list) and isinstance(value[-1], dict)]
    return _innermost(last[-1][-1]) if last else spec
