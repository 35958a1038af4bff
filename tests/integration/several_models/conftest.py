"""One application for the tests of this folder, where another was killed."""

from collections.abc import Iterator

import pytest

from tests.integration.application import Sluice


@pytest.fixture(scope="package")
def models(models_begun: Sluice) -> Iterator[Sluice]:
    with models_begun:
        yield models_begun.wait_until_ready()
