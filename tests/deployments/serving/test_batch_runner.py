"""The ways between what runs batches and routers, where the other side hangs."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.serving import batch_runner as module
from deployments.serving.batch_runner import RemoteRouters, RemoteRunner
from policies.errors import ReplicaLostError


class Hanging:
    """A handle of what never answers."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *_: asyncio.Future())


async def test_routers_that_hang_tell_no_load_and_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOADS_TIMEOUT_S", 0.01)
    hanging: Any = Hanging()
    async with asyncio.timeout(5):
        with pytest.raises(ReplicaLostError):
            await RemoteRouters(hanging).loads()


async def test_a_runner_that_hangs_is_told_once_and_no_task_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.01)
    hanging: Any = Hanging()
    async with asyncio.timeout(5):
        await RemoteRunner(hanging).look()
