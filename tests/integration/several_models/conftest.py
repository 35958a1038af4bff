"""One application for the tests of this folder, where another was killed."""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import yaml

from tests.integration.application import Sluice, is_free
from tests.integration.several_models.models import KEY, settings
from tests.waiting import wait_until


@pytest.fixture(scope="package")
def killed(sluice: Sluice) -> list[psutil.Process]:
    """What an application had started that did not come to clear up."""
    started = sluice.processes()
    assert len(started) > 5
    os.kill(sluice.process.pid, signal.SIGKILL)
    wait_until(lambda: is_free(sluice.port), 30, "the killed application's address is free again")
    return started[1:]


@pytest.fixture(scope="package")
def models(sluice: Sluice, killed: list[psutil.Process], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sluice]:
    """On the killed one's address, while processes of that one are still ending."""
    folder = tmp_path_factory.mktemp("models")
    config = folder / "models.yaml"
    config.write_text(yaml.safe_dump(settings(folder)))
    application = Sluice(folder, sluice.port, "--config", str(config), key=KEY)
    try:
        yield application.wait_until_ready()
    finally:
        application.kill()
