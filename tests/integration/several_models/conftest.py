"""One application for the tests of this folder."""

from collections.abc import Iterator

import pytest
import yaml

from tests.integration.application import Sluice, free_port
from tests.integration.several_models.models import KEY, settings


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("models")
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    application = Sluice(folder, free_port(), "--config", str(config), key=KEY)
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()
