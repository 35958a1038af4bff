"""One application for the tests of this folder, where another was killed."""

from collections.abc import Iterator

import pytest

from tests.integration.application import Sluice


@pytest.fixture(scope="package")
def models(models_begun: Sluice) -> Iterator[Sluice]:
    try:
        yield models_begun.wait_until_ready()
    finally:
        models_begun.kill()
