"""The two engines, and every values file rendered once."""

from collections.abc import Iterator

import pytest

from tests.k8s.cases import FILES, values_of
from tests.k8s.engines import Engine, Helm3, Helm4, start_helm4


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
