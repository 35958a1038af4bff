"""One Ray for what is deployed one after the other."""

from collections.abc import Iterator

import pytest

from tests.integration.ray_head import RayHead, ray_head


@pytest.fixture(scope="package")
def ray_on_loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    with ray_head(tmp_path_factory.mktemp("ray")) as started:
        yield started
