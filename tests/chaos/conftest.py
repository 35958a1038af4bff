"""A fleet, and a host of its own for a part of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.fleet import Fleet
from tests.island import Island


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


@pytest.fixture
def island() -> Iterator[Island]:
    with Island() as made:
        yield made
