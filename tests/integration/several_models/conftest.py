"""One application for the tests of this folder."""

from collections.abc import Iterator

import pytest
import yaml

from deployments.process.ports import free_port
from tests.integration.application import Sluice
from tests.integration.several_models.models import KEY, settings


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.yaml").write_text(yaml.safe_dump(settings(folder)))
    with Sluice(folder, free_port(), "--config", "models.yaml", key=KEY) as application:
        yield application.wait_until_ready()
