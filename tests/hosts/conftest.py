"""One cluster for all faults, for its start takes minutes."""

from collections.abc import Iterator

import pytest

from tests.hosts.cluster import cluster
from tests.hosts.faults import Trial, first_run


@pytest.fixture(scope="session")
def trial() -> Iterator[Trial]:
    with cluster() as made:
        yield first_run(made)
