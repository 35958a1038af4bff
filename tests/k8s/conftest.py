"""The two engines, and every values file rendered once."""

import os
from collections.abc import Iterator

import pytest

from tests.k8s.cases import FILES, values_of
from tests.k8s.engines import Engine, Helm3, Helm4, start_helm4

# KubeRay's own CRDs are not ours to ship: where KUBERAY_CRDS names a folder of them, its tests run as well.
collect_ignore = [] if "KUBERAY_CRDS" in os.environ else ["test_crds.py"]


@pytest.fixture(scope="session")
def helm4() -> Iterator[Helm4]:
    with start_helm4() as engine:
        yield engine


@pytest.fixture(scope="session", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, helm4: Helm4) -> Engine:
    return Helm3() if request.param == "helm3" else helm4


@pytest.fixture(scope="session")
def rendered(helm4: Helm4) -> dict[str, str]:
    """Manifests by the name of the values file."""
    return {file.stem: helm4.render(values_of(file)) for file in FILES}
