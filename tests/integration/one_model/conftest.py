"""One application for the tests of this folder: two routers, two engine replicas, the demo model."""

from collections.abc import Iterator

import pytest

from tests.integration.application import Sluice, free_port

# Few slots, so that a test can fill them without being kept busy by its own streams.
OPTIONS = ("--router-replicas", "2", "--", "--max-num-seqs", "16")


@pytest.fixture(scope="package")
def sluice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    application = Sluice(tmp_path_factory.mktemp("sluice"), free_port(), *OPTIONS)
    try:
        yield application.wait_until_ready()
    finally:
        if application.process.poll() is None:
            application.interrupt()
