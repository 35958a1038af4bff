"""One application for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.integration.application import Sluice
from tests.integration.several_models.models import KEY, settings


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    folder = tmp_path_factory.mktemp("models")
    with Sluice(folder, settings=settings(folder), key=KEY) as application:
        yield application
