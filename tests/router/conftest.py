"""A service of routers and replicas, in which every move of a request must be legal."""

from collections.abc import AsyncIterator, Iterator

import pytest

from policies.errors import IllegalMoveError
from tests.gate import Gate
from tests.router.service import Service


@pytest.fixture
def every_move_is_legal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also in background tasks, which swallow errors."""
    raised: list[object] = []
    monkeypatch.setattr(IllegalMoveError, "__init__", lambda error, *words: raised.append(words))
    yield
    assert not raised


@pytest.fixture
async def service(redis_url: str, every_move_is_legal: None) -> AsyncIterator[Service]:
    made = Service(redis_url)
    yield made
    await made.close()


@pytest.fixture
async def gate(redis_url: str) -> AsyncIterator[Gate]:
    """Open at first."""
    made = Gate(redis_url)
    await made.open()
    yield made
    made.shut()


@pytest.fixture
async def parted(gate: Gate, every_move_is_legal: None) -> AsyncIterator[Service]:
    """A service that the gate parts from its Redis."""
    made = Service(gate.url)
    yield made
    if not gate.is_open:
        await gate.open()
    await made.close()
